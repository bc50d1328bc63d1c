"""Machines that are reached by `ssh`: nothing has to be installed or running on them but sshd and Python."""

from paceline.targets.ssh.target import SshTarget

__all__ = ["SshTarget"]
