"""The part of Horovod's interface that needs no framework."""

#: The Horovod release whose interface this is. Scripts compare it.
__version__ = "0.28.1"
