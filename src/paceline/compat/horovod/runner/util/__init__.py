"""`horovod.runner.util`: helpers for threads."""
