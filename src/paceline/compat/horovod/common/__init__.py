"""The part of Horovod's interface that needs no framework."""
