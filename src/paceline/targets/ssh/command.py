"""Command lines of the system's own `ssh`, whose configuration then applies.

The first command of a user (a check at submission, a status query, the doctor) leaves its connection open for a few seconds, and
further commands share it, so that the user types a second factor once. A run's links never leave a connection open. If the user's
ssh configuration shares connections, it applies. If a shared connection breaks, all of its commands end, and a run loses a node.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import TargetError
from paceline.remote.wire import SILENCE_S
from paceline.system import processes
from paceline.targets.ssh.hosts import SshHost

#: Seconds that an idle ssh connection stays open for further commands. PERSIST_ASKED_S: after a typed password.
PERSIST_S = 30
PERSIST_ASKED_S = 60
CONNECT_S = 8
#: After this many unanswered keep-alive messages ssh ends the connection.
_ALIVE_COUNT = 3
#: Maximum length of the path of the sockets' folder. A socket's path has at most 104 characters; ssh appends up to 17.
_LONGEST_FOLDER = 45

#: Parts of Paceline's messages about problems that a user can fix by logging in once.
MENDED_BY_LOGIN = ("it does not let", "its key is not known here yet")

#: Part of Paceline's message about a problem that may be temporary: sshd drops connections if too many arrive at once.
PASSING = "it has closed the connection"

#: Pattern of ssh's message -> its meaning. The first match counts: for a changed key ssh prints "verification failed" too.
_MEANINGS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for \S+ has changed",
        "its key is not the one that it had before: it was installed anew, or somebody stands in between. "
        "If you know why, forget the old key: `{forget}`, then log in once: `{login}`",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its key is not known here yet. Log in once and look at the key: `{login}`",
    ),
    (
        r"Permission denied|Too many authentication failures|No more authentication methods",
        "it does not let {user} in with any key offered. Try `{login}`; give another key (identity) or user, load the key "
        "into ssh-agent, or, where a password or a second factor is asked for, log in first by `paceline compute login`",
    ),
    (
        r"Could not resolve hostname|Name or service not known|nodename nor servname",
        "no host of this name is known. Correct the name, or give it a HostName in ~/.ssh/config",
    ),
    (r"Connection refused", "the machine is there, but no sshd listens on that port. Start sshd, or give the port"),
    (
        r"timed out|No route to host|Network is unreachable|Host is down|Timeout, server .* not responding",
        "it does not answer: it is down, or the network in between is",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad configuration|"
        r"Can't open user config file|missing argument|[Uu]nsupported option",
        "ssh can't use its own configuration or an option that is set. Fix it: `{login}` shows the same message",
    ),
    (
        r"No space left|Disk quota exceeded",
        "its disk is full. Make room there, or choose another folder for this target (`folder`)",
    ),
    (
        r"Connection closed|Connection reset|kex_exchange_identification|Broken pipe",
        "it has closed the connection. sshd's log there says why; too many connections at once are the usual cause",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """The settings with which a target's hosts are reached by ssh.

    Attributes:
        config: A file that replaces ~/.ssh/config.
        options: Options as for `ssh -o`.
        silence_s: Seconds without a message after which a link counts as broken.
    """

    config: str | None = None
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    options: tuple[str, ...] = field(default=())
    silence_s: float = SILENCE_S

    def words(self, host: SshHost, command: Sequence[str], *, leave_open: bool = False, ask: bool = False) -> list[str]:
        """Return the command line that runs `command` on a host.

        leave_open: Whether to keep the connection open for a while, for other commands.
        ask: Whether ssh may prompt the user at a terminal.

        Raises:
            TargetError: This machine has no `ssh`.
        """
        return [
            self.program(),
            *self._base(host),
            *self._sharing(host, leave_open, PERSIST_ASKED_S if ask else PERSIST_S),
            *_words(
                f"BatchMode={'no' if ask else 'yes'}",
                f"ConnectTimeout={CONNECT_S * (5 if ask else 1)}",
                "ClearAllForwardings=yes",
                *self._common(),
            ),
            "--",
            host.name,
            *command,
        ]

    def forward_words(self, host: SshHost, socket_path: str, port: int) -> list[str]:
        """Return the command line that forwards a local socket to a host's port.

        Raises:
            TargetError: This machine has no `ssh`.
        """
        return [
            self.program(),
            *self._base(host),
            # Open a separate connection, because a shared connection would continue to forward after this command's end.
            *_words(
                *("ControlMaster=no", "ControlPath=none", "BatchMode=yes", f"ConnectTimeout={CONNECT_S}"),
                *("ExitOnForwardFailure=yes", "StreamLocalBindUnlink=yes", "StreamLocalBindMask=0177"),
                *self._common(),
            ),
            *("-N", "-L", f"{socket_path}:127.0.0.1:{port}"),
            "--",
            host.name,
        ]

    def login_words(self, host: SshHost) -> list[str]:
        """Return a command line for users to log in to a host."""
        return ["ssh", *self._base(host), host.name]

    def at_once(self, host: SshHost) -> int:
        """Return how many ssh connections may be opened simultaneously.

        The number is lower through a jump host, whose sshd drops some of more than ten new connections (MaxStartups).
        """
        found = self.resolve(host)
        is_direct = all(found.get(name, "none") == "none" for name in ("proxyjump", "proxycommand"))
        return 32 if is_direct else 8

    def program(self) -> str:
        """Return the path of `ssh`. Raise TargetError if this machine lacks it."""
        program = shutil.which("ssh")
        if program is None:
            raise TargetError(
                "there is no program 'ssh' on this machine's PATH, by which hosts are reached. "
                "Install OpenSSH's client (package openssh-client or openssh-clients)."
            )
        return program

    def _common(self) -> Iterator[str]:
        """Yield the ssh options that all connections need, such as keepalive."""
        yield f"ServerAliveInterval={math.ceil(self.silence_s / _ALIVE_COUNT)}"
        yield f"ServerAliveCountMax={_ALIVE_COUNT}"
        yield from ("ForwardX11=no", "RemoteCommand=none", "RequestTTY=no", "EscapeChar=none")

    def _base(self, host: SshHost) -> list[str]:
        words = ["-F", self.config] if self.config else []
        if user := host.user or self.user:
            words += ["-l", user]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity:
            # Offer only the configured key: servers disconnect after a few wrong keys, and an ssh-agent may hold a dozen keys.
            words += _words(f'IdentityFile="{_escaped(self.identity)}"', "IdentitiesOnly=yes")
        return [*words, *_words(*self.options)]

    def _sharing(self, host: SshHost, leave_open: bool, persist_s: int) -> list[str]:
        """Return the ssh options for connection sharing, persistent with `leave_open`."""
        if any(option.lower().startswith("controlpath") for option in self.options) or self._is_shared(host):
            return [] if leave_open else _words("ControlMaster=no")
        folder = sockets_dir()
        if folder is None:
            return _words("ControlMaster=no", "ControlPath=none")
        # Put a hash of the options into the path, because a connection to one host with another key is a separate connection.
        kind = hashlib.sha256(repr(self).encode()).hexdigest()[:6]
        path = f"ControlPath={str(folder).replace('%', '%%')}/{kind}-%C"
        if not leave_open:
            return _words("ControlMaster=no", path)
        return _words("ControlMaster=auto", path, f"ControlPersist={persist_s}")

    def _is_shared(self, host: SshHost) -> bool:
        return self.resolve(host).get("controlpath", "none") != "none"

    def resolve(self, host: SshHost) -> Mapping[str, str]:
        """Return ssh's configuration for a host as {lower-case option: value}; {} if invalid."""
        return _resolve(("ssh", "-G", *self._base(host), "--", host.name))


@functools.lru_cache(maxsize=1024)
def _resolve(argv: tuple[str, ...]) -> Mapping[str, str]:
    try:
        done = processes.said_by(argv, timeout_s=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = [line.partition(" ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return {name: value for name, _, value in pairs}


def sockets_dir() -> Path | None:
    """Return a private folder for shared connections' sockets, or None if impossible."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or ""
    for folder in (Path(runtime) / "paceline-ssh" if runtime else None, Path(f"/tmp/paceline-ssh-{os.getuid()}")):
        if folder is None or len(str(folder)) > _LONGEST_FOLDER:
            continue
        with contextlib.suppress(FileExistsError, OSError):
            folder.mkdir(mode=0o700)
        try:
            found = folder.lstat()
        except OSError:
            continue
        # Refuse a folder to which other users can write, because they could impersonate any host.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    return None


def _escaped(path: str) -> str:
    """Escape a text for double quotes in ssh's configuration."""
    return path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def _words(*options: str) -> list[str]:
    return [word for option in options for word in ("-o", option)]


def explain(host: SshHost, text: str, exit_code: int | None, login: list[str], python: str = "python3") -> str:
    """Explain why a host can't be used, and what to do.

    text: The output of ssh or the host's shell.
    login: An ssh command that users can try, for the message.
    """
    said = _said(text)
    # With exit codes 126 and 127, ssh has worked, but the host's shell could not run Python.
    is_missing = exit_code in (126, 127)
    for pattern, meaning in _MEANINGS:
        if not is_missing and re.search(pattern, text):
            words = meaning.format(
                forget=_forget(text, host), login=shlex.join(login), user=repr(host.user) if host.user else "you"
            )
            return f"{words} (ssh: {said})." if said else f"{words}."
    if is_missing or re.search(r"command not found|No such file or directory", text):
        is_path, kind = "/" in python, "executable " if exit_code == 126 else ""
        return (
            f"there is no {kind}{python!r} {'there' if is_path else 'on its PATH'}, and Python 3.10 or later is needed "
            f"({said}). Install it, or set `python` to {'one that is' if is_path else 'its full path'}."
        )
    return f"{said or 'ssh ended without a word'} (exit code {exit_code}). Try `{shlex.join(login)}`."


def _forget(text: str, host: SshHost) -> str:
    if advised := re.search(r"^\s*(ssh-keygen .*-R .*)$", text, re.MULTILINE):
        return advised[1].strip()
    place = re.search(r"Offending \S+ key in (.+):\d+", text)
    return shlex.join(["ssh-keygen", *(["-f", place[1]] if place else []), "-R", host.name])


def _said(text: str) -> str:
    """Return the last line with a letter in ssh's output."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    return lines[-1][:300].removeprefix("ssh: ").rstrip(".") if lines else ""
