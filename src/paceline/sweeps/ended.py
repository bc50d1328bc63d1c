"""What was read of trials that have ended, kept beside the sweep's record: 10,000 of them are read again within a second.

A help and no storage: a line counts only while the child's record is the file that it was made from. One that is torn, missing,
or written by another version costs the time to read the child.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from paceline.runs.folder import RunFolder
from paceline.sweeps.trial import Trial
from paceline.system.files import append_line

_FILE = "ended.jsonl"
_DEFAULTS = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(Trial)
}


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
