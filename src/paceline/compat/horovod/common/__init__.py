"""The part of Horovod's interface that needs no framework."""

#: Version of Horovod with the same interface. Scripts compare this version.
__version__ = "0.28.1"
