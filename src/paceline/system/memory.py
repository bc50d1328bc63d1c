"""Measure the available memory, within the limits of control groups."""

from __future__ import annotations

import os
from typing import NamedTuple


class Memory(NamedTuple):
    """Memory in bytes.

    Attributes:
        total: Memory of the machine, or the limit of a control group.
        available: Memory that processes can still use.
        limit: The source of the limit: "the machine's memory" or "the control group's limit".
    """

    total: int
    available: int
    limit: str


def memory() -> Memory:
    """Return total and available memory within this process's control group limits."""
    found = _machine()
    for group in groups():
        limit, used = _limit(group), _used(group)
        if limit is not None and used is not None and limit < found.total:
            found = Memory(limit, min(found.available, max(0, limit - used)), "the control group's limit")
    return found


def swap_free() -> int:
    """Return the free swap in bytes; 0 if unknown."""
    return _meminfo().get("SwapFree", 0)


def groups() -> list[str]:
    """Return the folders of this process's memory control groups (v1 or v2), innermost first."""
    found: list[str] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        # Drop "..", because inside a container the cgroup's path may lead above the container's root.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        places = ["/".join((top, *parts[:count])) for count in range(len(parts), -1, -1)]
        found += [place for place in places if os.path.isdir(place)]
    return found


def _machine() -> Memory:
    table = _meminfo()
    if "MemTotal" in table and "MemAvailable" in table:
        # MemFree excludes the cache, which the kernel frees on demand.
        return Memory(table["MemTotal"], table["MemAvailable"], "the machine's memory")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory(total, total // 2, "the machine's memory")


def _meminfo() -> dict[str, int]:
    """Return /proc/meminfo as {name: bytes}, or {} if it can't be read."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1 and words[1].isdecimal()}


def _limit(group: str) -> int | None:
    text = _read(f"{group}/memory.max") or _read(f"{group}/memory.limit_in_bytes")
    # If there is no limit, cgroups v2 have the text "max", and cgroups v1 a number above any machine's memory.
    return int(text) if text.strip().isdecimal() else None


def _used(group: str) -> int | None:
    text = _read(f"{group}/memory.current") or _read(f"{group}/memory.usage_in_bytes")
    if not text.strip().isdecimal():
        return None
    # Subtract cached files: they count as used, but the kernel frees them on demand.
    for line in _read(f"{group}/memory.stat").splitlines():
        name, _, count = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and count.isdecimal():
            return max(0, int(text) - int(count))
    return int(text)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
