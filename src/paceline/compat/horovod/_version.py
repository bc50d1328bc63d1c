"""The release of Horovod whose interface this is."""

#: Scripts compare it.
__version__ = "0.28.1"
