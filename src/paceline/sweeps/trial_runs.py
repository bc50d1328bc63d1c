"""The trials of a sweep, read from its children.

A trial is a child run `<sweep>_<number>`. If the policy pauses trials, each continuation is another child run,
`<sweep>_<number>_2`, `_3` and so on. Its record has the reason, and the run whose checkpoints it got.

Trials that have ended are cached in a file, so that 10,000 trials are read within a second. A line of the file counts
only while the child's record is unchanged. If a line is missing, incomplete or of another version, the child is read.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from paceline.children.child import record_of
from paceline.children.retries import STOPPED
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, TrialEntry
from paceline.sweeps.curves import CurveReader, Series
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Leg, Trial
from paceline.system.files import append_line, json_lines, stamp_of

#: Tags of a run: why it was paused; to which rung (number of values) it was promoted while live; why it was promoted.
PAUSED, RUNG, PROMOTED = "paused", "rung", "promoted"

_FILE = "ended.jsonl"
_DEFAULTS = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(Trial)
}


def child_id(sweep_id: str, number: int, leg: int = 1) -> str:
    """Return the id of a trial's run: `<sweep>_0`, or `<sweep>_0_3` for its third."""
    return f"{sweep_id}_{number}" if leg == 1 else f"{sweep_id}_{number}_{leg}"


def child_folder(sweep: RunFolder, number: int, leg: int = 1) -> RunFolder:
    return RunFolder(sweep.path.parent / child_id(sweep.run_id, number, leg))


def count(sweep: RunFolder) -> int:
    """Return the number of the sweep's trials."""
    number = 0
    while child_folder(sweep, number).state.exists():
        number += 1
    return number


def children(sweep: RunFolder, first: int = 0) -> Iterator[RunRecord]:
    """Yield the record of each trial's first run, from number `first` on."""
    # Trial numbers have no gaps, so the first missing child ends the loop.
    while (record := record_of(child_folder(sweep, first))) is not None:
        yield record
        first += 1


def all_runs(sweep: RunFolder, spec: SweepSpec | None = None, first: int = 0) -> Iterator[list[RunRecord]]:
    """Yield the records of each trial's runs, from number `first` on.

    `spec`: The sweep's spec, or None if unknown. If its policy never pauses trials, each trial has one run.
    """
    may_be_several = spec is None or pausing(spec.stop) is not None
    for record in children(sweep, first):
        yield [record, *(_later(sweep, first) if may_be_several else ())]
        first += 1


def runs_of(sweep: RunFolder, number: int) -> list[RunRecord]:
    """Return the records of all runs of one trial."""
    first = record_of(child_folder(sweep, number))
    return [] if first is None else [first, *_later(sweep, number)]


def has_more(sweep: RunFolder, trial: Trial) -> bool:
    """Return whether a trial's next run exists on disk."""
    return child_folder(sweep, trial.number, len(trial.earlier) + 2).state.exists()


def _later(sweep: RunFolder, number: int) -> Iterator[RunRecord]:
    leg = 2
    while (record := record_of(child_folder(sweep, number, leg))) is not None:
        yield record
        leg += 1


def trial_of(records: Sequence[RunRecord], runs_dir: Path, spec: SweepSpec) -> Trial:
    """Build a trial from its runs' records."""
    earlier: list[Leg] = []
    series = Series()
    for record in records[:-1]:
        reader = CurveReader(RunFolder(runs_dir / record.run_id).metrics, spec.metric)
        series = series.then(reader)
        earlier.append(_leg(record, reader.look()))
    folder = RunFolder(runs_dir / records[-1].run_id)
    reader = CurveReader(folder.metrics, spec.metric)
    own = reader.look()
    head = series.before(reader.steps).values
    last = _leg(records[-1], own)
    entry = records[-1].trial or TrialEntry()
    tags = tags_and_properties.read(folder.notes).tags if pausing(spec.stop) is not None else {}
    return Trial(
        number=int(entry.get("number", -1)),
        run_id=last.run_id,
        chosen=last.chosen,
        values=last.values,
        status=last.status,
        curve=head + own,
        further=tuple(CurveReader(folder.metrics, metric).look() for metric in spec.metrics[1:]),
        notes=(records[0].trial or TrialEntry()).get("notes") or {},
        earlier=tuple(earlier),
        begin=len(head),
        source=last.source,
        why=last.why,
        paused=tags.get(PAUSED),
        stopped=tags.get(STOPPED),
        rung=max(int(entry.get("rung", 0)), _whole(tags.get(RUNG))),
        started_utc=records[0].started_utc,
        ended_utc=records[-1].ended_utc,
    )


def trials(sweep: RunFolder, spec: SweepSpec) -> list[Trial]:
    """Return all trials of a sweep, sorted by number."""
    return [trial for trial, _ in read_trials(sweep, spec)]


def read_trials(sweep: RunFolder, spec: SweepSpec) -> Iterator[tuple[Trial, list[RunRecord]]]:
    """Yield each trial and its runs' records, which are [] for a cached trial."""
    # Don't use the cache with a policy that pauses trials: an ended trial in the cache may since have continued in another run.
    ended = EndedTrials(sweep) if pausing(spec.stop) is None else None
    for number in itertools.count():
        if ended is not None and (trial := ended.get(number)) is not None:
            yield trial, []
        elif records := next(all_runs(sweep, spec, number), None):
            yield trial_of(records, sweep.path.parent, spec), records
        else:
            return


def _leg(record: RunRecord, curve: tuple[float, ...]) -> Leg:
    entry = record.trial or TrialEntry()
    return Leg(
        run_id=record.run_id,
        chosen=entry.get("chosen") or {},
        values=entry.get("values") or {},
        status=record.status,
        curve=curve,
        source=entry.get("from"),
        why=entry.get("why"),
    )


def _whole(tag: str | None) -> int:
    # Users may set this tag to any text, so check that it is a number.
    return int(tag) if tag is not None and tag.isdecimal() else 0


class EndedTrials:
    """The file that caches a sweep's ended trials."""

    def __init__(self, sweep: RunFolder) -> None:
        self._sweep = sweep
        self._lines: dict[int, dict[str, object]] = {}
        for kept in json_lines(sweep.path / _FILE):
            with contextlib.suppress(KeyError, TypeError):
                # Keep a trial's last line: the file has several lines for a trial whose run was removed and created again.
                self._lines[kept["number"]] = kept

    def get(self, number: int) -> Trial | None:
        """Return a cached trial, or None if its runs must be read."""
        kept = self._lines.get(number)
        if kept is None or kept.get("record") != stamp(self._sweep.path.parent, kept.get("run_id")):
            return None
        with contextlib.suppress(TypeError):
            return Trial(**{name: _read(name, value) for name, value in kept.items() if name != "record"})
        return None


def keep(sweep: RunFolder, trial: Trial) -> None:
    """Cache a trial that has ended. The caller holds the sweep's lock."""
    record_stamp = stamp(sweep.path.parent, trial.run_id)
    changed = {name: getattr(trial, name) for name, default in _DEFAULTS.items() if getattr(trial, name) != default}
    # The cache is optional: errors only cost time later.
    with contextlib.suppress(OSError, TypeError):
        if record_stamp is not None:
            append_line(sweep.path / _FILE, {**changed, "record": record_stamp})


def stamp(runs_dir: Path, run_id: object) -> list[int] | None:
    """Return a list that changes with a run's state file, or None without the file."""
    state_stamp = stamp_of(f"{runs_dir}/{run_id}/state.json")
    return None if state_stamp is None else list(state_stamp)


def _read(name: str, value: Any) -> Any:
    # Convert lists to tuples, which JSON lacks. `Trial` raises an error for fields of another version.
    if not isinstance(_DEFAULTS.get(name), tuple):
        return value
    return tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)
