"""The trials of a sweep, read from its children: they are its storage.

A trial is a child `<sweep>_<number>`. Where the sweep's policy pauses trials, what goes on with one is a child of its own,
`<sweep>_<number>_2`, `_3` and so on, whose record says from whose checkpoints it starts, and why.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from paceline.children.child import record_of
from paceline.children.retries import STOPPED
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.sweeps.curves import CurveReader, Series
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Leg, Trial
from paceline.system.files import append_line

#: Tags of a child: why it was paused; beyond how many values it was let while it ran, and why.
PAUSED, RUNG, PROMOTED = "paused", "rung", "promoted"

_FILE = "ended.jsonl"
_DEFAULTS = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(Trial)
}


def child_id(sweep_id: str, number: int, leg: int = 1) -> str:
    """The run id of a trial, as the Azure SDK numbers them: `<sweep>_<number from 0>`. leg: which of its runs, from 1."""
    return f"{sweep_id}_{number}" if leg == 1 else f"{sweep_id}_{number}_{leg}"


def child_folder(sweep: RunFolder, number: int, leg: int = 1) -> RunFolder:
    return RunFolder(sweep.path.parent / child_id(sweep.run_id, number, leg))


def count(sweep: RunFolder) -> int:
    """How many trials there are."""
    number = 0
    while child_folder(sweep, number).record.exists():
        number += 1
    return number


def children(sweep: RunFolder, first: int = 0) -> Iterator[RunRecord]:
    """The records of the trials' first runs, in order of their numbers from `first` on, as they are now."""
    # Numbers are given out in order, one after the other: the first that is not there is the end.
    while (record := record_of(child_folder(sweep, first))) is not None:
        yield record
        first += 1


def all_runs(sweep: RunFolder, spec: SweepSpec | None = None, first: int = 0) -> Iterator[list[RunRecord]]:
    """The records of each trial's runs, as `children`.

    spec: with it, further runs are looked for only where its policy makes any.
    """
    may_be_several = spec is None or pausing(spec.stop) is not None
    for record in children(sweep, first):
        yield [record, *(_later(sweep, first) if may_be_several else ())]
        first += 1


def runs_of(sweep: RunFolder, number: int) -> list[RunRecord]:
    """The records of one trial's runs; none where it was removed."""
    first = record_of(child_folder(sweep, number))
    return [] if first is None else [first, *_later(sweep, number)]


def has_more(sweep: RunFolder, trial: Trial) -> bool:
    """Whether a trial has a run after the one that is known as its last."""
    return child_folder(sweep, trial.number, len(trial.earlier) + 2).record.exists()


def _later(sweep: RunFolder, number: int) -> Iterator[RunRecord]:
    leg = 2
    while (record := record_of(child_folder(sweep, number, leg))) is not None:
        yield record
        leg += 1


def trial_of(records: Sequence[RunRecord], runs_dir: Path, spec: SweepSpec) -> Trial:
    """What samplers and policies are told of a trial. records: of its runs, in order."""
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
    told = records[-1].trial or {}
    tags = tags_and_properties.read(folder.notes).tags if pausing(spec.stop) is not None else {}
    return Trial(
        number=int(told.get("number", -1)),
        run_id=last.run_id,
        chosen=last.chosen,
        values=last.values,
        status=last.status,
        curve=head + own,
        further=tuple(CurveReader(folder.metrics, metric).look() for metric in spec.metrics[1:]),
        notes=(records[0].trial or {}).get("notes") or {},
        earlier=tuple(earlier),
        begin=len(head),
        source=last.source,
        why=last.why,
        paused=tags.get(PAUSED),
        stopped=tags.get(STOPPED),
        rung=max(int(told.get("rung", 0)), _whole(tags.get(RUNG))),
        started_utc=records[0].started_utc,
        ended_utc=records[-1].ended_utc,
    )


def trials(sweep: RunFolder, spec: SweepSpec) -> list[Trial]:
    """All trials of the sweep, in order of their numbers."""
    return [trial for trial, _ in read_trials(sweep, spec)]


def read_trials(sweep: RunFolder, spec: SweepSpec) -> Iterator[tuple[Trial, list[RunRecord]]]:
    """The same one by one, each with the records of its runs; with none where it was known to have ended."""
    # A trial that was paused may go on in another run, so it is read each time.
    ended = EndedTrials(sweep) if pausing(spec.stop) is None else None
    for number in itertools.count():
        if ended is not None and (trial := ended.get(number)) is not None:
            yield trial, []
        elif records := next(all_runs(sweep, spec, number), None):
            yield trial_of(records, sweep.path.parent, spec), records
        else:
            return


def _leg(record: RunRecord, curve: tuple[float, ...]) -> Leg:
    told = record.trial or {}
    return Leg(
        run_id=record.run_id,
        chosen=told.get("chosen") or {},
        values=told.get("values") or {},
        status=record.status,
        curve=curve,
        source=told.get("from"),
        why=told.get("why"),
    )


def _whole(tag: str | None) -> int:
    # People may write tags too.
    return int(tag) if tag is not None and tag.isdigit() else 0


class EndedTrials:
    """The trials of one sweep that had ended when somebody looked."""

    def __init__(self, sweep: RunFolder) -> None:
        self._sweep = sweep
        self._lines: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(OSError):
            for line in (sweep.path / _FILE).read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    kept = json.loads(line)
                    # A later line of a number is that of a child that was made again.
                    self._lines[kept["number"]] = kept

    def get(self, number: int) -> Trial | None:
        """A trial that has ended; None where it has to be read."""
        kept = self._lines.get(number)
        if kept is None or kept.get("record") != stamp(self._sweep.path.parent, kept.get("run_id")):
            return None
        with contextlib.suppress(TypeError):
            return Trial(**{name: _read(name, value) for name, value in kept.items() if name != "record"})
        return None


def keep(sweep: RunFolder, trial: Trial) -> None:
    """Note a trial that has ended. For the holder of the sweep's lock."""
    found = stamp(sweep.path.parent, trial.run_id)
    changed = {name: getattr(trial, name) for name, default in _DEFAULTS.items() if getattr(trial, name) != default}
    # A full disk costs time later, and nothing else; what is no JSON is read from the child.
    with contextlib.suppress(OSError, TypeError):
        if found is not None:
            append_line(sweep.path / _FILE, {**changed, "record": found})


def stamp(runs_dir: Path, run_id: object) -> list[int] | None:
    """By which the record of a run is known again; None where there is none."""
    try:
        found = os.stat(f"{runs_dir}/{run_id}/run.json")
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size, found.st_ino]


def _read(name: str, value: Any) -> Any:
    # JSON knows no tuples; a field of another version is no field, and Trial says so.
    if not isinstance(_DEFAULTS.get(name), tuple):
        return value
    return tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)
