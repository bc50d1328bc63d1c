"""`horovod.runner.common`: small things that launchers and helpers built on Horovod import; its services are not here."""
