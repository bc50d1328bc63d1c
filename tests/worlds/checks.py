"""What must hold in every world."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import replace

from paceline.runs import states, store, tags_and_properties
from paceline.runs.record import RunRecord
from paceline.system.files import json_lines
from tests.worlds import disks
from tests.worlds.machines import Written
from tests.worlds.world import World

#: Faults after which Paceline no longer fetches files that are only on the nodes.
LOST_HERE = (
    "kill supervisor",
    "kill guardian",
    "kill both",
    "suspend supervisor",
    "interrupt",
    "lose supervisor's node",
    "cut off supervisor's node",
)


def broken_rules(world: World) -> list[str]:
    """Return a sentence for each rule that this world breaks."""
    return [
        *_errors(world),
        *_truth(world),
        *_end(world),
        *_files(world),
        *_followed(world),
        *_tags(world),
        *_left(world),
    ]


def _errors(world: World) -> Iterator[str]:
    for process, name, error in world.kernel.uncaught:
        yield f"{process}/{name} raised {type(error).__name__}: {error}"


def _happened(world: World, *kinds: str) -> bool:
    return any(text.startswith(kinds) for _, text in world.happened)


def _truth(world: World) -> Iterator[str]:
    """Yield broken rules: readers agree on the run's state, attempts only grow in number, and an end stays."""
    if world.unread and not _happened(world, "failing", "full"):
        yield f"a reader got an error in the place of the record: {world.unread[0]}"
    for number, seen in enumerate(world.seen):
        last: RunRecord | None = None
        for at_s, record in seen.records:
            if last is not None:
                if last.is_terminal and record != last:
                    changed = [name for name in vars(last) if getattr(last, name) != getattr(record, name)]
                    yield f"reader {number} saw the ended run change at {at_s:.3f}: {changed}"
                if len(record.attempts) < len(last.attempts):
                    yield f"reader {number} saw {len(record.attempts)} attempts at {at_s:.3f}, after {len(last.attempts)}"
                for before, after in zip(last.attempts, record.attempts, strict=False):
                    if before.number != after.number or before.started_utc != after.started_utc:
                        yield f"reader {number} saw attempt {before.number} change at {at_s:.3f}"
                    # A restart by the engine shows that it has preempted an interrupted attempt.
                    was_preempted = before.cause == "interrupted" and after.cause == "preempted"
                    known = replace(before, cause="preempted") if was_preempted else before
                    if known.ended_utc is not None and known != after:
                        yield f"reader {number} saw the ended attempt {before.number} change at {at_s:.3f}"
            last = record
    ends = [seen.records[-1][1] for seen in world.seen if seen.records]
    if any(record != ends[0] for record in ends):
        yield f"the readers see different ends: {[record.status for record in ends]}"


def _end(world: World) -> Iterator[str]:
    if not world.folder.state.exists():
        if world.supervisor is not None:
            yield "the run has no record"
        return
    record = store.stored(world.folder)
    if not record.is_terminal:
        yield f"the run is {record.status} at {world.kernel.now:.1f}"
        return
    if record.failure is not None and record.failure.cause == "internal":
        yield f"an internal error: {record.failure.message}"
    for attempt in record.attempts:
        if attempt.ended_utc is None:
            yield f"attempt {attempt.number} has no end"
    if [attempt.number for attempt in record.attempts] != list(range(1, len(record.attempts) + 1)):
        yield f"attempts {[attempt.number for attempt in record.attempts]}"
    if record.status == states.COMPLETED:
        # Take the last worker of each rank, because a later worker has replaced an earlier one.
        last = {key[1]: one for key, one in sorted(world.cluster.written.items()) if key[0] == len(record.attempts)}
        size = record.attempts[-1].world_size
        if set(last) != set(range(size or 0)):
            yield f"Completed with ranks {sorted(last)} of {size}"
        for rank, one in last.items():
            if one.code != 0:
                yield f"Completed although rank {rank} ended with {one.code}"
    for name, claim in world.cluster.releases:
        if claim and f" on {name} " not in claim:
            yield f"{name} released the run's nodes after the claim {claim!r}"
    if record.status == states.CANCELED and not world.is_asked:
        yield "Canceled, and nobody asked for it"
    if not world.happened and not world.plan.fails and not world.plan.exits and not world.plan.hangs:
        limit = world.job.max_run_duration_seconds
        if record.status != states.COMPLETED and not (
            record.failure and record.failure.cause == "time_limit" and limit
        ):
            yield f"{record.status} without a fault: {record.failure}"
    ends = [event["status"] for event in json_lines(world.folder.events) if event["status"] in states.TERMINAL]
    if ends != [record.status] and not _happened(world, "full", "failing"):
        yield f"the events have the ends {ends}, the record has {record.status}"


def _excuse(world: World, one: Written) -> bool:
    """Return whether files of this worker may be missing here."""
    if world.cluster.is_shared:
        return False
    host = one.host
    names = (host.name,)
    # After a lost node, a killed supervisor or a disk error, files may be missing, and the record has to report the
    # fault.
    lost = any(
        text.partition(":")[0]
        in (
            "kill agent",
            "kill node's guardian",
            "power off",
            "cut",
            "cut one way",
            "stall",
            "suspend node",
            "clock jump",
        )
        and any(name in text for name in names)
        for _, text in world.happened
    )
    return lost or _happened(world, *LOST_HERE, "full", "failing")


def _files(world: World) -> Iterator[str]:
    """Yield each loss of a line, metric or output although the call that wrote it has returned."""
    for (attempt, rank, generation), one in sorted(world.cluster.written.items()):
        if generation:
            continue
        later = [
            other for key, other in sorted(world.cluster.written.items()) if key[:2] == (attempt, rank) and key[2] > 0
        ]
        lines = [line for each in (one, *later) for line in each.lines]
        path = world.folder.rank_log(attempt, rank)
        found = path.read_text() if path.exists() else ""
        excused = any(_excuse(world, each) for each in (one, *later))
        if found != "".join(lines) and not (excused and "".join(lines).startswith(found)):
            missing = [line for line in lines if line not in found]
            yield (
                f"the log of rank {rank} in attempt {attempt} has {found.count(chr(10))} of {len(lines)} lines; "
                f"missing are {missing[:2]}, it ends with {found[-80:]!r}"
            )
        names = [entry["value"] for entry in _entries(world, rank, attempt)]
        values = [value for each in (one, *later) for _, value in each.metrics]
        if names != values and not (excused and names == values[: len(names)]):
            yield f"rank {rank} in attempt {attempt} logged {values}, and the run has {names}"
        for each in (one, *later):
            for name, data in each.files.items():
                path = world.folder.path / name
                here = path.read_bytes() if path.exists() else None
                if here is None and not excused:
                    yield f"{name} of attempt {attempt} is missing"
                elif here is not None and here != data:
                    yield f"{name} of attempt {attempt} has {len(here)} other bytes than its {len(data)}"


def _followed(world: World) -> Iterator[str]:
    """Yield each fault in what a follower of the run sees: each line once, in order, and the true end."""
    if world.followed_to is None:
        if world.is_followed and world.folder.state.exists() and not world.unread:
            yield "the follower has not come to an end"
        return
    record = store.stored(world.folder)
    if world.followed_to.status != record.status:
        yield f"the follower saw the end {world.followed_to.status} of a run that is {record.status}"
    found: dict[tuple[int, int], list[str]] = {}
    for line in world.followed:
        if line.complete:
            found.setdefault((line.attempt, line.rank), []).append(line.text)
    for attempt in range(1, len(record.attempts) + 1):
        for rank in world.folder.ranks_with_log(attempt):
            lines = world.folder.rank_log(attempt, rank).read_text().splitlines()
            seen = found.get((attempt, rank), [])
            # A later attempt may fetch the last lines of a node that was lost.
            writers = [one for key, one in sorted(world.cluster.written.items()) if key[:2] == (attempt, rank)]
            is_late = attempt < len(record.attempts) and any(_excuse(world, one) for one in writers)
            is_late = is_late or (world.cluster.is_shared and record.attempts[attempt - 1].cause == "node_lost")
            if lines != seen and not (is_late and lines[: len(seen)] == seen):
                yield f"the follower saw {seen} of rank {rank} in attempt {attempt}, of {lines}"


def _tags(world: World) -> Iterator[str]:
    if not world.folder.notes.exists():
        return
    found = set(tags_and_properties.read(world.folder.notes).tags)
    if missing := [tag for tag in world.tags if tag not in found]:
        yield f"the tags {missing} of a person are lost"
    for (attempt, rank, _), one in sorted(world.cluster.written.items()):
        if not _excuse(world, one) and (missing := [tag for tag in one.tags if tag not in found]):
            yield f"the tags {missing} of rank {rank} in attempt {attempt} are lost"


def _entries(world: World, rank: int, attempt: int) -> list[dict]:
    path = world.folder.metric_log(rank, attempt)
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("name") == "loss":
            found.append(entry)
    return found


def _left(world: World) -> Iterator[str]:
    """Yield each process, lock or temporary file that the world has left."""
    for process in world.kernel.processes.values():
        if process.is_alive and not process.host.is_off and process.name != "person":
            if process.name.startswith("reader") or process.name == "submitter":
                continue
            yield f"{process.name} on {process.host.name} still runs"
    if world.folder.lock.exists():
        fd = disks._os["open"](world.folder.lock, os.O_RDONLY)
        try:
            disks._flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield "the run's lock is held"
        finally:
            disks._os["close"](fd)
    if not world.folder.state.exists() or not store.stored(world.folder).is_terminal:
        return
    for path in sorted(world.folder.path.rglob("*")):
        name = str(path.relative_to(world.folder.path))
        if path.name.startswith(".") and not name.startswith(("outputs/", "checkpoints/", "work/")):
            yield f"the file {name} is left"
        if name in ("closing", "secrets.json", "ballast"):
            yield f"the file {name} is left"
    for path in sorted((world.root / "ws" / "leases").rglob("*")):
        if path.is_file() and world.folder.run_id in path.name + path.read_text():
            yield f"the lease {path.name} is left: {path.read_text()[:80]}"
    for name in os.listdir(world.root / "ws" / "tmp"):
        yield f"the temporary file {name} is left"
    for machine in world.machines:
        copy = os.path.join(machine.folder, "runs", world.folder.run_id)
        if os.path.isdir(copy) and not machine.is_off and not world.happened:
            yield f"{machine.name} keeps a copy of the run"
