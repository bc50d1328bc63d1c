"""Messages of ssh, as OpenSSH 9.2 prints them, and their meanings."""

from __future__ import annotations

import pytest

from paceline.targets.ssh.command import explain
from paceline.targets.ssh.hosts import SshHost

HOST = SshHost(name="gpu1", user="alice")
LOGIN = ["ssh", "-F", "/my config", "gpu1"]

CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Add correct host key in /home/a/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/a/.ssh/known_hosts:7
  remove with:
  ssh-keygen -f "/home/a/.ssh/known_hosts" -R "gpu1"
Host key for gpu1 has changed and you have requested strict checking.
Host key verification failed.
"""
SAID = [
    (CHANGED, 255, 'forget the old key: `ssh-keygen -f "/home/a/.ssh/known_hosts" -R "gpu1"`'),
    (CHANGED.replace("ssh-keygen", "").replace("remove", ""), 255, "`ssh-keygen -f /home/a/.ssh/known_hosts -R gpu1`"),
    ("No ED25519 host key is known for gpu1\r\nHost key verification failed.\n", 255, "`ssh -F '/my config' gpu1`"),
    ("alice@gpu1: Permission denied (publickey,password).\n", 255, "does not let 'alice' in"),
    ("ssh: Could not resolve hostname gpu1: Name or service not known\n", 255, "no host of this name is known"),
    ("ssh: connect to host gpu1 port 22: Connection refused\n", 255, "no sshd listens on that port"),
    ("ssh: connect to host gpu1 port 22: Connection timed out\n", 255, "does not answer"),
    ("ssh: connect to host gpu1 port 22: No route to host\n", 255, "does not answer"),
    ("/my config: line 3: Bad configuration option: foo\n", 255, "can't use its own configuration"),
    ("kex_exchange_identification: Connection closed by remote host\n", 255, "has closed the connection"),
    ("sh: 1: /opt/py thon: not found\n", 127, "'/opt/py thon'"),
    ("sh: 1: /opt/py thon: Permission denied\n", 126, "there is no executable '/opt/py thon' there"),
    ("sh: 1: .profile: Permission denied\nsh: 1: /opt/py thon: not found\n", 127, "there is no '/opt/py thon' there"),
    ("tee: /tmp/x: No space left on device\n", 1, "its disk is full"),
    ("something new\n\n", 1, "something new (exit code 1)"),
    ("", 1, "ended without a word"),
]


@pytest.mark.parametrize(("said", "exit_code", "expected"), SAID)
def test_each_ssh_failure_is_explained_with_the_next_step(said: str, exit_code: int, expected: str) -> None:
    message = explain(HOST, said, exit_code, LOGIN, "/opt/py thon")

    assert expected in message
    assert "\n" not in message
    assert "@@@" not in message
