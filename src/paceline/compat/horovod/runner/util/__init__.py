"""`horovod.runner.util`: threads."""
