"""A run's state, and the texts of its banners about failures, hangs and slow ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paceline.observe.stragglers import RunPace
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.search.facts import HANGS
from paceline.system.files import read_json, stamp_of

#: Cause of a run's failure -> the next step that the page suggests. docs/when-it-fails.md explains all causes.
_REMEDIES = {
    "exception": "Read the traceback, and try one process first.",
    "memory": "Use a smaller batch or model, fewer workers on a node, or a node with more memory.",
    "killed": "Look at the kernel's log (`dmesg`) on that node, and ask who sent the signal.",
    "launcher": "`paceline compute doctor TARGET` checks the machines and their network.",
    "port": "`paceline compute doctor TARGET` checks the machines and their network.",
    "node_lost": "Run again. With `--max-restarts 3` and checkpoints Paceline starts the next attempt.",
    "preempted": "Run again. With `--max-restarts 3` and checkpoints Paceline starts the next attempt.",
    "hang": "Look at the line of the rank for which the others wait: all ranks must call the same collectives in one order.",
    "time_limit": "Give the run a larger `--max-duration`, or look at each rank's position in the message.",
    "environment": "Change the packages that conflict. The resolver's reason is in the message.",
    "data": "Check the path and the store in the message.",
    "disk": "`paceline prune --dry-run` lists files that can go.",
    "internal": "Report it, with the output of `paceline bug-report`.",
}


@dataclass(frozen=True)
class SlowRanks:
    """A text about the ranks that slow down a run.

    since_utc: When Paceline first detected these ranks, or None if unknown.
    """

    text: str
    since_utc: str | None


def shown_state(record: RunRecord) -> str:
    """Return the state that pages show: the run's state, or "Hangs"."""
    return HANGS if record.status == states.RUNNING and record.hang else record.status


def remedy(record: RunRecord) -> str:
    """Return advice after a run's failure, or "" if the cause is unknown."""
    if record.failure is None:
        return ""
    return _REMEDIES.get(record.failure.cause, "").replace("TARGET", record.target or "TARGET")


def slow_ranks(folder: RunFolder, record: RunRecord) -> SlowRanks | None:
    """Return the ranks that slow down a run, as the supervisor last measured, or None."""
    if record.status != states.RUNNING or not record.attempts or record.world_size < 2:
        return None
    path = folder.load(len(record.attempts))
    return _slow_ranks(path, stamp_of(path))


@lru_cache(maxsize=64)
def _slow_ranks(path: Path, stamp: object) -> SlowRanks | None:
    sample = read_json(path) if stamp else None
    # Another program may have written the sample, because users may share the folder. Ignore a sample of unexpected structure.
    try:
        straggler = RunPace.from_json(sample["pace"]).straggler if sample else None
        return SlowRanks(straggler.text(), straggler.since_utc) if straggler else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
