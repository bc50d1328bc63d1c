"""Find out from a stack dump of all workers which rank waits for which: pure functions.

op            an unfinished collective in Paceline or in torch's flight recorder, with the ranks that have started it
missing       the ranks of the collective's process group that have not started it
stands        what a rank outside collectives does: runs code, is in a debugger or the kernel, is stopped or gone

`gets_on` compares two dumps. A worker progresses if its process, or a descendant of this process, computes, reads,
writes, or has reached another line of the script. A worker in the same collective at the same line does not progress,
although it may use the CPU while it waits. A worker in a debugger waits for a person, and does not count as hanging.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.observe.node.messages import Collective, Frame, ProcessFacts, WorkerFacts, WorkersReport
from paceline.system.collective_state import ranks_of
from paceline.system.units import size_text

#: Maximum number of sentences about waiting ranks. Further sentences would not help to find the cause.
_MOST = 6
_DEBUGGERS = ("pdb.py", "bdb.py", "ipdb/__main__.py", "pudb/", "debugpy/", "pydevd")
#: Prefixes of the names of kernel functions that wait for a file server: NFS, CIFS, Lustre, FUSE, Ceph, GPFS.
_FILE_SERVERS = (
    *("nfs", "rpc_", "cifs", "smb", "fuse", "ceph", "ll_", "cl_"),
    *("ptlrpc", "gpfs", "cxi", "folio_wait", "io_schedule"),
)
_INSTALLED = re.compile(r"(?:/lib/python3[^/]*)?/(?:site|dist)-packages/|/lib/python3[^/]*/|^<frozen |/paceline/")
_STOPPED = "T"

#: Minimum share of a core, used by a worker and its children, that counts as progress; polling threads use less.
_CPU = 0.05
#: Maximum seconds of CPU time that a stack dump takes in a worker.
_DUMP_S = 0.1
#: Minimum number of bytes per second, read and written by a worker and its children, that counts as progress.
_IO = 16_000


@dataclass
class Op:
    """A collective that some ranks have entered and that has not completed.

    ages: Rank -> seconds since the rank entered it.
    """

    entry: Collective
    members: list[int]
    ages: dict[int, float] = field(default_factory=dict)
    #: Rank -> the other collective that this rank has called instead of this one.
    others: dict[int, Collective] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)


def sentences(told: WorkersReport) -> list[str]:
    """Return sentences on why workers wait, the cause first; [] if none wait."""
    ranks = {int(rank): found for rank, found in told["ranks"].items()}
    found, explained = [], set[int]()
    blocked = ops(told)
    inside: dict[int, Op] = {}
    for op in blocked:
        for rank in op.ages:
            inside.setdefault(rank, op)
    for op in blocked[:_MOST]:
        # A rank may have several open collectives. Describe the first incomplete one, because later collectives wait for it.
        if op.missing and set(op.missing) <= explained and any(rank in explained for rank in op.ages):
            continue
        found.append(_sentence(op, told, ranks, inside))
        explained |= set(op.missing) | set(op.ages) | set(op.others)
    for rank, one in ranks.items():
        if rank not in explained and (text := trouble(one, told)) is not None:
            found.append(f"Rank {rank}: {text}.")
            explained.add(rank)
    return found


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Ranks in a collective, and the ranks for which they wait."""

    ranks: tuple[int, ...]
    for_ranks: tuple[int, ...]
    collective: str
    seconds: float


def waits(told: WorkersReport) -> list[Wait]:
    """Return which ranks of a stack dump wait for which, the oldest wait first.

    If ranks call collectives in different orders, each rank waits for the other, and the result has both waits.
    """
    found = []
    for op in ops(told):
        now = float(told["time"])
        if op.missing or not op.others:
            found.append(_wait(op.entry, op.ages, op.missing))
        if op.others:
            ages = {rank: max(0.0, now - float(entry["began"])) for rank, entry in op.others.items()}
            found += [_wait(op.entry, op.ages, ages), _wait(next(iter(op.others.values())), ages, op.ages)]
    return found


def _wait(entry: Collective, ages: Mapping[int, float], for_ranks: Iterable[int]) -> Wait:
    return Wait(
        ranks=tuple(sorted(ages)),
        for_ranks=tuple(sorted(for_ranks)),
        collective=op_text(entry),
        seconds=max(ages.values(), default=0.0),
    )


def ops(told: WorkersReport) -> list[Op]:
    """Return the collectives that have not completed, the oldest first."""
    ranks = {int(rank): found for rank, found in told["ranks"].items()}
    found: dict[tuple[object, ...], Op] = {}
    for rank, one in ranks.items():
        for entry in entries(one):
            # Identify a collective by its number if all ranks start collectives in the same order, else by its kind and name.
            key = (
                (entry["channel"], entry["number"])
                if entry["number"]
                else (entry["channel"], entry["kind"], entry["name"])
            )
            op = found.setdefault(key, Op(entry, ranks_of(entry["ranks"]) or sorted(ranks)))
            age = max(0.0, float(told["time"]) - float(entry["began"]))
            if entry["kind"] == op.entry["kind"]:
                op.ages[rank] = age
            else:
                op.others[rank] = entry
    joined = {rank for op in found.values() if op.entry["kind"] == "join" for rank in op.ages}
    for op in found.values():
        # If ranks have called different collectives, take the collective that most ranks have called as the right one.
        _let_most_rule(op, told)
        there = set(op.ages) | set(op.others) | (joined if not op.entry["number"] else set())
        op.missing = [
            rank for rank in op.members if rank in ranks and rank not in there and not _is_past(ranks[rank], op.entry)
        ]
    return sorted(found.values(), key=lambda op: -max(op.ages.values(), default=0.0))


def entries(one: WorkerFacts) -> list[Collective]:
    """Return a rank's open collectives, of Paceline and of torch's flight recorder."""
    return [*one.get("board", ()), *one.get("torch", {}).get("entries", ())]


def where(one: ProcessFacts, told: WorkersReport) -> str | None:
    """Return the main thread's line of code, such as "data.py:41, `load`", or None."""
    frames = _main(one)
    if not frames:
        return None
    own = next((frame for frame in frames if is_own(frame["file"], told)), None)
    own = own or next((frame for frame in frames if not _INSTALLED.search(frame["file"])), frames[0])
    place = f"{short(own['file'], told)}:{own['line']}, `{own['function']}`"
    inner = frames[0]
    if own is not inner:
        place += f" (in {short(inner['file'], told)}:{inner['line']}, `{inner['function']}`)"
    return place


def trouble(one: WorkerFacts, told: WorkersReport) -> str | None:
    """Return why a process outside collectives is stuck, such as a full pipe, or None."""
    place = where(one, told)
    at = f" in {place}" if place else ""
    if one.get("exit_code") is not None:
        return f"it has ended with exit code {one['exit_code']}"
    if one.get("gone"):
        return "its process is gone"
    if one.get("state") == _STOPPED:
        return f"it is stopped, by SIGSTOP or Ctrl-Z{at}; `kill -CONT {one['pid']}` on {one.get('node')} lets it go on"
    if (debugger := in_debugger(one)) is not None:
        return f"it is in a debugger ({debugger}){at}"
    for process in (one, *one.get("children", ())):
        whose = "it" if process is one else f"its process {process['pid']} ({os.path.basename(process['command'])})"
        if "call" in process and str(process["call"]).startswith("write"):
            readers = [pid for pid in process.get("readers", ()) if pid != process["pid"]]
            who = "the worker" if readers[:1] == [one["pid"]] else f"process {readers[0]}" if readers else ""
            by = f"which {who} does not read" if who else "which nobody reads"
            return f"{whose} waits for room in a full pipe, {by}{_at(place)}"
        if process.get("state") == "D":
            wait = process.get("wchan") or "unknown"
            what = "a file server" if wait.startswith(_FILE_SERVERS) else "a disk, a device or a file server"
            return f"{whose} waits in the kernel ({wait}) for {what} that does not answer{at}"
    stopped = (child for child in one.get("children", ()) if child.get("state") == _STOPPED)
    names = (f"{child['pid']} ({os.path.basename(child['command'])})" for child in stopped)
    return next((f"its process {name} is stopped; it waits{at}" for name in names), None)


def in_debugger(one: WorkerFacts) -> str | None:
    """Return the debugger that has stopped a worker, or None.

    Return "process 123" for a program such as gdb, or the name of a debugger's Python module, such as "pdb".
    """
    if one.get("tracer"):
        return f"process {one['tracer']}"
    for thread in one.get("threads") or ():
        if thread["name"] != "main":
            continue
        for frame in thread["frames"]:
            if any(name in frame["file"] for name in _DEBUGGERS):
                return os.path.basename(str(frame["file"])).removesuffix(".py")
    return None


def stands(rank: int, told: WorkersReport) -> str:
    """Return what a rank does, such as "is in train.py:41, `step`"."""
    one = told["ranks"][str(rank)]
    if (text := trouble(one, told)) is not None:
        return text.removeprefix("it ") if text.startswith("it ") else text
    place = where(one, told)
    loaders = [child for child in one.get("children", ()) if child.get("threads")]
    text = f"is in {place}" if place else f"gives no stack: {one.get('silent', 'the reason is unknown')}"
    # If the rank waits for its data loader, describe the loader's process.
    if loaders and place and any("multiprocessing" in f["file"] or "/dataloader.py" in f["file"] for f in _main(one)):
        text += f"; its data loader's process {loaders[0]['pid']} is in {where(loaders[0], told)}"
    return text


def op_text(entry: Collective) -> str:
    """Return a collective in words: "all_reduce 512 (bucket 3, [3, 4] float, 1.2 MB)"."""
    number = f" {entry['number']}" if entry["number"] else ""
    # Horovod's interface puts the kind in front of the name that the script gave.
    given = str(entry["name"]).removeprefix(f"{entry['kind']}.")
    name = f" {given!r}" if given else ""
    size = size_text(entry["bytes"]) if entry["bytes"] else ""
    more = ", ".join(part for part in (entry["shape"], size) if part)
    return f"{entry['kind']}{number}{name}" + (f" ({more})" if more else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return sorted ranks as text, such as "0, 1, 2" or "0 to 31, 64"."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    them = set(ranks)
    first, last = ([rank for rank in ranks if rank + step not in them] for step in (-1, 1))
    spans = [f"{low} to {high}" if low < high else str(low) for low, high in zip(first, last, strict=True)]
    return ", ".join(spans[:8]) + (f" and {len(spans) - 8} more spans" if len(spans) > 8 else "")


def ranks_words(ranks: Sequence[int]) -> str:
    """Return ranks in words: "ranks 0, 1 and 3", or "10 ranks (0 to 9)"."""
    shown = sorted(ranks)
    if len(shown) == 1:
        return f"rank {shown[0]}"
    if len(shown) > 8:
        return f"{len(shown)} ranks ({ranks_text(shown)})"
    return f"ranks {', '.join(map(str, shown[:-1]))} and {shown[-1]}"


def _sentence(op: Op, told: WorkersReport, ranks: Mapping[int, WorkerFacts], inside: Mapping[int, Op]) -> str:
    age = max(op.ages.values(), default=0.0)
    group = "" if len(op.members) >= len(ranks) else f" of the group of {ranks_words(op.members)}"
    what = f"{op_text(op.entry)}{group}"
    waiting = ranks_words(list(op.ages))
    have, are = ("has", "is") if len(op.ages) == 1 else ("have", "are")
    if op.others:
        first = next(iter(op.others.values()))
        theirs = ranks_words(list(op.others))
        verb = "is" if len(op.others) == 1 else "are"
        return (
            f"{theirs.capitalize()} {verb} in {op_text(first)}, where {waiting} {are} in {op_text(op.entry)} for {age:.0f} s: "
            f"the ranks call their collectives in another order. {_whereabouts([*op.others, min(op.ages)], told, inside, op)}"
        )
    if not op.missing:
        return f"{waiting.capitalize()} {are} in {what} for {age:.0f} s; all have come to it, and it does not end."
    missing = ranks_words(op.missing)
    come = "has not come" if len(op.missing) == 1 else "have not come"
    return (
        f"{missing.capitalize()} {come} to {what}, for which {waiting} {have} been waiting for {age:.0f} s. "
        f"{_whereabouts(op.missing, told, inside, op)}"
    )


def _whereabouts(missing: Sequence[int], told: WorkersReport, inside: Mapping[int, Op], op: Op) -> str:
    places: dict[str, list[int]] = {}
    for rank in missing:
        other = inside.get(rank)
        if other is not None and other is not op and rank not in (*op.others, *op.ages):
            text = f"waits in {op_text(other.entry)} itself"
            if (place := where(told["ranks"][str(rank)], told)) is not None:
                text += f", {place}"
        else:
            text = stands(rank, told)
        places.setdefault(text, []).append(rank)
    parts = [
        (
            "It "
            if len(missing) == 1
            else f"{ranks_words(ranks).capitalize()}: " + ("it " if len(ranks) == 1 else "each ")
        )
        + text
        for text, ranks in places.items()
    ]
    return ". ".join(_no_double(part) for part in parts[:_MOST]) + "."


def _no_double(text: str) -> str:
    # A sentence may put "It" or "each" before a text that begins with "its": drop the first word, to avoid "It its".
    return text.replace("It its ", "Its ").replace("it its ", "its ").replace("each its ", "its ")


def _let_most_rule(op: Op, told: WorkersReport) -> None:
    kinds: dict[str, list[int]] = {}
    for rank, entry in op.others.items():
        kinds.setdefault(str(entry["kind"]), []).append(rank)
    kind, most = max(kinds.items(), key=lambda item: len(item[1]), default=("", []))
    if len(most) <= len(op.ages):
        return
    others = dict.fromkeys(op.ages, op.entry)
    entry = op.others[most[0]]
    ages = {rank: max(0.0, float(told["time"]) - float(op.others[rank]["began"])) for rank in most}
    op.others = {rank: one for rank, one in op.others.items() if str(one["kind"]) != kind} | others
    op.entry, op.ages = entry, ages


def _is_past(one: WorkerFacts, entry: Collective) -> bool:
    group = str(entry["channel"]).removeprefix("torch ")
    last = one.get("torch", {}).get("last", {}).get(group, 0) if str(entry["channel"]).startswith("torch ") else 0
    return bool(entry["number"] and last >= entry["number"])


def _main(one: ProcessFacts) -> list[Frame]:
    threads = one.get("threads")
    return threads[0]["frames"] if threads else []


def _at(place: str | None) -> str:
    return f", in {place}" if place else ""


def is_own(file: str, told: WorkersReport) -> bool:
    """Return whether a file belongs to the script's own folder."""
    return file.startswith(f"{told['work_dir']}/") or f"/{told['run_id']}/work/" in file


def short(file: str, told: WorkersReport) -> str:
    """Return a path relative to the script's folder or to an installed package."""
    for top in (f"{told['work_dir']}/", f"/{told['run_id']}/work/"):
        if top in file:
            return file.partition(top)[2]
    return (
        _INSTALLED.split(file)[-1]
        if _INSTALLED.search(file) and "/paceline/" not in file
        else "/".join(file.split("/")[-2:])
    )


def gets_on(first: WorkersReport, second: WorkersReport) -> str | None:
    """Return the progress between two dumps, such as "rank 0 computes", or None."""
    passed_s = max(0.1, float(second["time"]) - float(first["time"]))
    for rank, after in second["ranks"].items():
        before = first["ranks"].get(rank, {})
        if after.get("exit_code") is not None or after.get("gone"):
            continue
        if "pid" not in after or before.get("pid") != after["pid"]:
            # One of the dumps lacks this rank: its node has not reported it, or the rank has just started.
            return f"nothing is known of rank {rank}"
        if (text := _gets_on(before, after, passed_s, second)) is not None:
            return f"rank {rank} {text}"
    return None


def stuck_ranks(first: WorkersReport, second: WorkersReport, lost: Collection[int]) -> set[int]:
    """Return the ranks that can't end by themselves: in two dumps they stand still in collectives with `lost` ranks.

    A rank that handles a signal, or saves, does not stand still.
    """
    waiting = {rank for wait in waits(second) if not set(lost).isdisjoint(wait.for_ranks) for rank in wait.ranks}
    # The workers themselves write the dumps, which takes some of their time.
    passed_s = float(second["time"]) - float(first["time"]) + _DUMP_S / _CPU
    pairs = {rank: (first["ranks"].get(str(rank), {}), second["ranks"][str(rank)]) for rank in waiting}
    return {
        rank
        for rank, (before, after) in pairs.items()
        if "pid" in after and before.get("pid") == after["pid"] and _progress(before, after, passed_s, second) is None
    }


def _gets_on(before: WorkerFacts, after: WorkerFacts, passed_s: float, told: WorkersReport) -> str | None:
    is_still = _own_place(after, told) == _own_place(before, told) and _same_collective(before, after)
    return None if is_still and in_debugger(after) is None else _progress(before, after, passed_s, told)


def _progress(before: WorkerFacts, after: WorkerFacts, passed_s: float, told: WorkersReport) -> str | None:
    if (debugger := in_debugger(after)) is not None:
        return f"is in a debugger ({debugger})"
    if after.get("state") == "T":
        return None
    if _own_place(after, told) != _own_place(before, told):
        return "has come to another place"
    processes = {one["pid"]: one for one in (before, *before.get("children", ()))}
    cpu_s = io_bytes = 0.0
    for one in (after, *after.get("children", ())):
        known = processes.get(one["pid"])
        if known is None:
            return f"has started process {one['pid']}"
        cpu_s += one["cpu_s"] - known["cpu_s"]
        # Subtract the bytes that the worker wrote for the first dump.
        io_bytes += one["io_bytes"] - known["io_bytes"] - known.get("answer_bytes", 0)
        if _own_place(one, told) != _own_place(known, told):
            return f"has a process {one['pid']} that has come to another place"
    if cpu_s > _CPU * passed_s:
        return "computes"
    if io_bytes > _IO * passed_s:
        return "reads or writes"
    return None


def _same_collective(before: WorkerFacts, after: WorkerFacts) -> bool:
    def keys(one: WorkerFacts) -> set[tuple[object, ...]]:
        return {(e["channel"], e["kind"], e["name"], e["number"], e["began"]) for e in entries(one)}

    return bool(keys(before) & keys(after))


def _own_place(one: ProcessFacts, told: WorkersReport) -> list[tuple[str, int]]:
    return [(frame["file"], frame["line"]) for frame in _main(one) if is_own(frame["file"], told)]
