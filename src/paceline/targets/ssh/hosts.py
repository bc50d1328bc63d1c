"""Parse lists of hosts in the forms of Open MPI, DeepSpeed and MPICH.

# the lab
gpu1 slots=4
alice@gpu2:8            as user alice, 8 slots
[2001:db8::7]:2         an address with colons, 2 slots
gpu3                    all cores of the machine
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import TargetError
from paceline.job.secret_values import credentials_in

#: Pattern of names and addresses. Characters that it excludes could do harm in the shell of a ProxyCommand.
_NAME = re.compile(r"[A-Za-z0-9_.%][A-Za-z0-9_.%:-]*")
#: Characters that OpenSSH refuses in a user name (its function valid_ruser).
_BAD_IN_USER = re.compile(r"""[\s'`"$;&<>|(){}\x00-\x1f\x7f]""")
_FORM = "Write one host a line: 'gpu1 slots=4', 'gpu1:4', 'alice@gpu1' or 'gpu1'."


@dataclass(frozen=True, kw_only=True)
class SshHost:
    """A machine in an `ssh` target's list of hosts.

    Attributes:
        name: The name or address that is passed to ssh.
        slots: Number of cores that the machine offers to runs; None for all cores.
    """

    name: str
    user: str | None = None
    slots: int | None = None

    def __str__(self) -> str:
        """Return the host as a line of a list of hosts."""
        name = f"{self.user}@{self.name}" if self.user else self.name
        return name if self.slots is None else f"{name} slots={self.slots}"


def read_hosts(items: Sequence[str]) -> tuple[SshHost, ...]:
    """Parse a setting that lists hosts, or files with hosts.

    An item is a file if the item has a slash, ends with '.txt', or is the name of an existing file.

    Raises:
        TargetError: A file can't be read, or a host is invalid. The message names the file and the line.
    """
    lines: list[tuple[str, str]] = []
    for item in items:
        if "/" in item or item.endswith(".txt") or os.path.isfile(item):
            lines += _lines_of(item)
        else:
            lines += [("hosts", part) for part in item.split(",")]
    for where, text in lines:
        # Look for passwords before removing comments, because a password may contain a "#".
        if credentials_in(text):
            raise TargetError(
                f"{where}: a password is in it, which is not shown. Leave it out: ssh logs in with keys. {_FORM}"
            )
    hosts = _merged(_parse(line, where) for where, text in lines if (line := text.partition("#")[0].strip()))
    if not hosts:
        raise TargetError(f"hosts={list(items)!r} names no host. {_FORM}")
    return hosts


def read_login(text: str, where: str) -> SshHost:
    """Return the host that `host` or `user@host` names, or raise TargetError."""
    with contextlib.suppress(TargetError, ValueError):
        if (host := _parse(text, where)).slots is None and "," not in text:
            return host
    raise TargetError(f"{where}: login={text!r} is not 'host' or 'user@host'. Give a port as ssh_options=Port=2222.")


def check_user(user: str, where: str) -> str:
    """Return `user` if it is a valid user name for ssh.

    Raises:
        TargetError: ssh or a shell on the host could misread the name.
    """
    if ":" in user:
        raise TargetError(
            f"{where}: the name of a user has no ':'. The text behind it may be a password and is not shown; leave it out."
        )
    if not user or user.startswith("-") or user.endswith("\\") or _BAD_IN_USER.search(user):
        raise TargetError(f"{where}: {user!r} is not a user's name: no dash first, no blanks, quotes or $;&<>|(){{}}.")
    return user


def _lines_of(file: str) -> list[tuple[str, str]]:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(
            f"the list of hosts {file!r} can't be read: {error}. Give a text file with one host a line, or names."
        ) from error
    return [(f"{file}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]


def _parse(line: str, where: str) -> SshHost:
    name, *words = line.split()
    slots: int | None = None
    count = ""
    for word in words:
        key, _, value = word.partition("=")
        if key == "slots":
            slots = _count(value, line, where)
        elif key.replace("-", "_") == "max_slots":
            _count(value, line, where)  # check the number, but ignore it: it only limits mpirun's oversubscription
        else:
            raise TargetError(f"{where}: {line!r} has {word!r}, of which only slots=N is known. {_FORM}")
    user, at, name = name.rpartition("@")
    if at:
        check_user(user, f"{where}: {line!r}")
    # An IPv6 address contains colons, so it is in brackets, as in a URL.
    if name.startswith("["):
        name, bracket, count = name[1:].partition("]")
        if not bracket or (count and not count.startswith(":")):
            raise TargetError(f"{where}: {line!r} has no ']' where it should be. {_FORM}")
        count = count[1:] if count else ""
    # Split at a single colon, before the number of slots. A name with several colons is an IPv6 address without slots.
    elif name.count(":") == 1:
        name, _, count = name.partition(":")
        if not count:
            raise TargetError(f"{where}: {line!r} has no number after the colon. {_FORM}")
    if count:
        if slots is not None:
            raise TargetError(f"{where}: {line!r} says twice how many slots there are. {_FORM}")
        slots = _count(count, line, where)
    if not _NAME.fullmatch(name):
        raise TargetError(
            f"{where}: {name!r} in {line!r} is not a name of a host: letters, digits and '._-', no dash in front. {_FORM}"
        )
    return SshHost(name=name, user=user or None, slots=slots)


def _count(value: str, line: str, where: str) -> int:
    if not (value.isascii() and value.isdecimal() and 0 < int(value) < 1_000_000):
        raise TargetError(f"{where}: {value!r} in {line!r} is not a number of slots; 1 is the least. {_FORM}")
    return int(value)


def _merged(hosts: Iterable[SshHost]) -> tuple[SshHost, ...]:
    found: dict[str, SshHost] = {}
    for host in hosts:
        earlier = found.get(host.name)
        if earlier is None:
            found[host.name] = host
            continue
        if earlier.user != host.user:
            raise TargetError(f"hosts: {host.name!r} is there as {str(earlier)!r} and as {str(host)!r}. Keep one.")
        found[host.name] = SshHost(name=host.name, user=host.user, slots=(earlier.slots or 1) + (host.slots or 1))
    return tuple(found.values())
