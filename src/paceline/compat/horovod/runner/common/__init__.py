"""`horovod.runner.common`: small helpers that launchers built on Horovod import, without Horovod's services."""
