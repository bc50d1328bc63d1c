"""The target for machines reached by `ssh`, on which only sshd and Python have to be installed."""

from paceline.targets.ssh.target import SshTarget

__all__ = ["SshTarget"]
