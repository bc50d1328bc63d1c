"""A run shown as it goes: each change of state, and the workers' lines, until its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO

from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.logs import Line, follow
from paceline.runs.record import RunRecord

#: How often the record is looked at beside its own changes, to see that somebody still looks after the run.
_LOOK_S = 0.5


class Watch:
    """The record of a run, read again only when it has changed or a while has passed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = store.read(folder)
        self._seen = self._stamp()
        self._looked = time.monotonic()

    def look(self) -> RunRecord:
        stamp, now = self._stamp(), time.monotonic()
        if not self.record.is_terminal and (stamp != self._seen or now - self._looked > _LOOK_S):
            self.record = store.read(self.folder)
            self._seen, self._looked = stamp, now
        return self.record

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self.folder.record.stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_ino


def show(
    folder: RunFolder,
    *,
    line: Callable[[Line], None],
    state: Callable[[RunRecord], None],
    ranks: list[int] | None = None,
) -> RunRecord:
    """Call `line` for each line of the workers and `state` for each change of state or of what the run waits for,
    from the start of the run to its end; the final record.

    ranks: these alone.
    """
    watch = Watch(folder)
    shown: tuple[str, str | None] | None = None

    def told() -> RunRecord:
        nonlocal shown
        record = watch.look()
        if (record.status, record.waiting_for) != shown and not record.is_terminal:
            shown = (record.status, record.waiting_for)
            state(record)
        return record

    record = told()
    size = record.job.world_size if record.job else 1
    for found in follow(
        folder,
        attempts=lambda: max(1, len(watch.look().attempts)),
        is_over=lambda: told().is_terminal,
        ranks=list(range(size)) if ranks is None else ranks,
    ):
        if found is not None:
            line(found)
    return watch.look()


def prefix(line: Line, world_size: int, attempts: int = 1) -> str:
    """What stands before a line in a merged view: nothing for one worker, else its rank (and attempt, if several)."""
    if world_size == 1:
        return ""
    return f"[rank {line.rank}] " if attempts <= 1 else f"[{line.attempt}: rank {line.rank}] "


def stream(folder: RunFolder, out: IO[str]) -> RunRecord:
    """Print the run to `out` as plain text until its end; the final record."""
    record = store.read(folder)
    size = record.job.world_size if record.job else 1
    print(f"RunId: {folder.run_id}\nFolder: {folder.path}", file=out, flush=True)

    def line(found: Line) -> None:
        print(prefix(found, size) + found.text, file=out, flush=True)

    def state(now: RunRecord) -> None:
        if now.waiting_for or now.status != states.NOT_STARTED:
            print(f"-- {state_text(now)}", file=out, flush=True)

    record = show(folder, line=line, state=state)
    print(f"-- {end_text(record)}", file=out, flush=True)
    return record


def state_text(record: RunRecord) -> str:
    """A state in words: "Queued: 1 run ahead"."""
    return f"{record.status}: {record.waiting_for}" if record.waiting_for else record.status


def end_text(record: RunRecord) -> str:
    """A run's end in words: "Completed in 3.2 s"."""
    took = record.duration_s
    text = record.status + (f" in {duration_text(took)}" if took is not None else "")
    return f"{text}, by {record.canceled_by}" if record.canceled_by else text


def duration_text(seconds: float) -> str:
    """A duration as people read it: "3.2 s", "2 min 5 s", "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
