"""Hosts and their slots, as `-H` and `--hostfile` name them, and the place of each rank on them."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine, by the name that reaches it, and how many ranks it takes."""

    name: str
    slots: int = 1


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one rank. cross_rank, cross_size: its place among the hosts that have as many ranks."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse(text: str) -> list[Host]:
    """The hosts of `a:2,b:4`; a host without a number has one slot.

    Raises:
        UserError: a part that is no host.
    """
    # From the right, for an address of IPv6 has colons of its own: `[fe80::1]:2`.
    return [_host(part.strip(), *part.strip().rpartition(":")[::2], of=f"-H {text!r}") for part in text.split(",")]


def read(path: str) -> list[Host]:
    """The hosts of a file with a line `name slots=2` for each; `name:2` and `name` are taken too, `#` begins a comment.

    Raises:
        UserError: the file can't be read, or has a line that is no host.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--hostfile {path!r} can't be read: {error}. Name a text file with `host slots=N` lines."
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # `name:2` is one word; `name slots=2` and `name slots = 2` are several.
        name, slots = words[0].rpartition(":")[::2] if len(words) == 1 else (words[0], " ".join(words[1:]))
        found.append(_host(" ".join(words), name, re.sub(r"^slots\s*=\s*", "", slots), of=f"line {number} of {path!r}"))
    if not found:
        raise UserError(f"--hostfile {path!r} names no host. Give it a line `host slots=N` for each.")
    return found


def named(hosts: str | None, hostfile: str | None, slots: int) -> list[Host]:
    """The hosts of `-H` or `--hostfile`. Without either this machine, with so many slots: more ranks than cores are allowed.

    Raises:
        UserError: they can't be read.
    """
    if hosts:
        return parse(hosts)
    return read(hostfile) if hostfile else [Host(name="localhost", slots=slots)]


def slots(hosts: Sequence[Host], ranks: int) -> list[Slot]:
    """The place of each rank: the hosts are filled in the order in which they are first named.

    Raises:
        UserError: there are fewer slots than ranks.
    """
    # A host that is named twice is one host: mpirun gives it all of its ranks at once.
    names = dict.fromkeys(host.name for host in hosts)
    hosts = [Host(name=name, slots=sum(host.slots for host in hosts if host.name == name)) for name in names]
    free = sum(host.slots for host in hosts)
    if ranks > free:
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UserError(
            f"-np {ranks} needs as many slots, but {named} has {free}. Name more hosts or slots, or lower -np."
        )
    sizes: list[int] = []
    # Hosts that the ranks don't reach keep a size of 0.
    for host in hosts:
        sizes.append(min(host.slots, ranks - sum(sizes)))
    result: list[Slot] = []
    for index, (host, size) in enumerate(zip(hosts, sizes, strict=True)):
        for local_rank in range(size):
            # Only hosts that have this local rank as well count for the cross rank: with `a:2,b:1` the second rank of `a`
            # is alone.
            peers = [number for number, other in enumerate(sizes) if other > local_rank]
            result.append(
                Slot(
                    rank=len(result),
                    host=host.name,
                    local_rank=local_rank,
                    local_size=size,
                    cross_rank=peers.index(index),
                    cross_size=len(peers),
                )
            )
    return result


def is_here(name: str) -> bool:
    """True if the name is this machine's.

    Raises:
        UserError: nobody knows the name.
    """
    # Without the resolver, for a machine that is off its network may not find its own name.
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"the host {name!r} is not known here ({error}). Check the name, or give its address."
        ) from error
    for family, kind, protocol, _, address in found:
        # Only an address of this machine's own can be bound.
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return True
    return False


def _host(text: str, name: str, slots_text: str, *, of: str) -> Host:
    if not name:
        name, slots_text = text, "1"
    # The brackets only part the address from the slots; ssh and the resolver want it without them.
    name = name.removeprefix("[").removesuffix("]")
    # What begins with a dash would be an option of ssh.
    if not re.fullmatch(r"[\w.:%][\w.:%-]*", name) or not slots_text.isdigit() or int(slots_text) < 1:
        raise UserError(f"{text!r} in {of} is no host with its slots. Write it as name:2, the slots from 1 on.")
    return Host(name=name, slots=int(slots_text))
