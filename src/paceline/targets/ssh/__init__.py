"""The target for machines with sshd and Python, reached by `ssh`."""

from paceline.targets.ssh.target import SshTarget

__all__ = ["SshTarget"]
