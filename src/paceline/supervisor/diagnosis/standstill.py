"""Whether workers get on, from two looks at them (`paceline.supervisor.looks`): a pure function.

A worker gets on if it, or what it has started, computes, reads or writes, or has come to another place of the script. One
that is in the same collective, in the same place, does not: it may burn a core while it waits. A stopped one does not either.
One in a debugger waits for a person: that is no hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.runs import waits

#: Of a core, by a worker and all below it: what threads that look for work now and then take is less.
_CPU = 0.05
#: Bytes in a second, likewise.
_IO = 16_000


def gets_on(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """Why the run does not hang, such as "rank 0 computes"; None where no worker gets on."""
    passed_s = max(0.1, float(second["time"]) - float(first["time"]))
    for rank, after in second["ranks"].items():
        before = first["ranks"].get(rank, {})
        if after.get("exit_code") is not None or after.get("gone"):
            continue
        if "pid" not in after or before.get("pid") != after["pid"]:
            # Its node has not told of it, or it began just now.
            return f"nothing is known of rank {rank}"
        if (text := _gets_on(before, after, passed_s, second)) is not None:
            return f"rank {rank} {text}"
    return None


def _gets_on(
    before: Mapping[str, Any], after: Mapping[str, Any], passed_s: float, told: Mapping[str, Any]
) -> str | None:
    if (debugger := waits.in_debugger(after)) is not None:
        return f"is in a debugger ({debugger})"
    if after.get("state") == "T":
        return None
    place, was = _own_place(after, told), _own_place(before, told)
    if place == was and _same_collective(before, after):
        return None
    if place != was:
        return "has come to another place"
    processes = {one["pid"]: one for one in (before, *before.get("children", ()))}
    cpu_s = io_bytes = 0.0
    for one in (after, *after.get("children", ())):
        known = processes.get(one["pid"])
        if known is None:
            return f"has started process {one['pid']}"
        cpu_s += one["cpu_s"] - known["cpu_s"]
        # Its answer to the look before was written by itself.
        io_bytes += one["io_bytes"] - known["io_bytes"] - known.get("answer_bytes", 0)
        if _own_place(one, told) != _own_place(known, told):
            return f"has a process {one['pid']} that has come to another place"
    if cpu_s > _CPU * passed_s:
        return "computes"
    if io_bytes > _IO * passed_s:
        return "reads or writes"
    return None


def _same_collective(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    def keys(one: Mapping[str, Any]) -> set[tuple[Any, ...]]:
        return {(e["channel"], e["kind"], e["name"], e["number"], e["began"]) for e in waits.entries(one)}

    return bool(keys(before) & keys(after))


def _own_place(one: Mapping[str, Any], told: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The script's own calls under way, outermost last: what a library does below them while it waits is no progress."""
    frames = (one.get("threads") or [{"frames": []}])[0]["frames"]
    return [(frame["file"], frame["line"]) for frame in frames if waits.is_own(frame["file"], told)]
