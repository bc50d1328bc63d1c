"""Hosts, their slots and the place of each rank, with Horovod's classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from paceline.compat.horovod.runner import hosts as _hosts

_HOST = re.compile(r"[\w.-]+:[0-9]+")


@dataclass
class HostInfo:
    """A machine and its number of ranks."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse a host of the form `name:slots`."""
        [name], [slots] = parse_hosts_and_slots(host_string)[0], parse_hosts_and_slots(host_string)[1].values()
        return HostInfo(name, slots)


@dataclass
class SlotInfo:
    """The host and numbering of one rank: in the job, on its host, and across hosts."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Return `rank,size,local_rank,local_size,cross_rank,cross_size`."""
        _, rank, local_rank, cross_rank, size, local_size, cross_size = astuple(self)
        return f"{rank},{size},{local_rank},{local_size},{cross_rank},{cross_size}"


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_host_files(filename: str) -> str:
    """Read a file with lines `host slots=N`, and return `host:slots,host:slots`.

    Raises:
        ValueError: The file cannot be read, or has an invalid line.
    """
    return ",".join(f"{host.name}:{host.slots}" for host in _hosts.read(filename))


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Return the names of the hosts in `host:slots,host:slots`, and the slots by name.

    Raises:
        ValueError: A part is not a host.
    """
    parts = [part.strip() for part in hosts.split(",")]
    wrong = [part for part in parts if not _HOST.fullmatch(part)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} in {hosts!r} is not a host. Write them as worker-0:2,worker-1:2.")
    pairs = [part.rsplit(":", 1) for part in parts]
    return [name for name, _ in pairs], {name: int(slots) for name, slots in pairs}


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Parse `host:slots,host:slots`.

    Raises:
        ValueError: A part is not a host.
    """
    return [HostInfo.from_string(part) for part in hosts_string.split(",")]


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Return each rank's place. Hosts are filled in order, up to `max_num_proc` ranks.

    Raises:
        ValueError: There are fewer slots than `min_num_proc`.
    """
    machines = [_hosts.Host(name=host.hostname, slots=host.slots) for host in hosts]
    free = sum(host.slots for host in machines)
    size = free if max_num_proc is None else min(free, max_num_proc)
    # If there are fewer slots than `min_num_proc`, request `min_num_proc` slots. Then `_hosts.slots` raises an error.
    places = _hosts.slots(machines, max(size, min_num_proc))
    return [
        SlotInfo(place.host, place.rank, place.local_rank, place.cross_rank, size, place.local_size, place.cross_size)
        for place in places
    ]
