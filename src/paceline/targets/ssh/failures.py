"""The errors of ssh, in words that say what to do."""

from __future__ import annotations

import re
import shlex

from paceline.targets.ssh.hosts import SshHost

#: The words of those failures that a person at a terminal can mend by logging in once.
MENDED_BY_LOGIN = ("it does not let", "its key is not known here yet")

#: The words of one that may be gone a moment later: a server drops connections when too many come at once.
PASSING = "it has closed the connection"

#: What ssh says -> what it means; the first that is found counts. ssh says of a changed key that its verification has failed,
#: too, so the order matters.
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
        "nobody knows a host of this name. Mend the name, or give it a HostName in ~/.ssh/config",
    ),
    (
        r"Connection refused",
        "the machine is there, but no sshd listens on that port. Start sshd, or give the port",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down|Timeout, server .* not responding",
        "it does not answer: it is down, or the network in between is",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad configuration|"
        r"Can't open user config file|missing argument|[Uu]nsupported option",
        "ssh can't use its own configuration or an option that is set. Mend it; `{login}` says the same",
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


def explain(host: SshHost, text: str, exit_code: int | None, login: list[str], python: str = "python3") -> str:
    """The reason why a host can't be used, and what to do, in a sentence or two.

    text: what ssh or the host's shell said. login: the command line of a plain login there.
    """
    said = _said(text)
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, text):
            words = meaning.format(
                forget=_forget(text, host), login=shlex.join(login), user=repr(host.user) if host.user else "you"
            )
            return f"{words} (ssh: {said})." if said else f"{words}."
    if exit_code == 127 or re.search(r"command not found|No such file or directory", text):
        is_path = "/" in python
        return (
            f"there is no {python!r} {'there' if is_path else 'on its PATH'}, and Python 3.10 or later is needed ({said}). "
            f"Install it, or set `python` to {'one that is' if is_path else 'its full path'}."
        )
    return f"{said or 'ssh ended without a word'} (exit code {exit_code}). Try `{shlex.join(login)}`."


def _forget(text: str, host: SshHost) -> str:
    """Ssh's own advice, or the plain command."""
    advised = re.search(r"^\s*(ssh-keygen .*-R .*)$", text, re.MULTILINE)
    if advised:
        return advised[1].strip()
    place = re.search(r"Offending \S+ key in (.+):\d+", text)
    return shlex.join(["ssh-keygen", *(["-f", place[1]] if place else []), "-R", host.name])


def _said(text: str) -> str:
    """The last line that says something; ssh's banners are all stars and at signs."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    return lines[-1][:300].removeprefix("ssh: ").rstrip(".") if lines else ""
