"""The part of Horovod's interface that needs no framework."""

#: The Horovod release that this interface follows. Scripts compare this version.
__version__ = "0.28.1"
