"""Follow a run to its end: changes of state and the workers' lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import IO

from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.log_start import LogStart
from paceline.runs.logs import LogFollower, LogLine, PrepareFollower
from paceline.runs.record import Attempt, RunRecord, end_text, hang_status
from paceline.runs.visible import TerminalLines
from paceline.system.files import stamp_of

#: After this many seconds an unchanged record is read again, to detect that the run was abandoned.
_LOOK_S = 0.5
#: Pauses in seconds between two polls: _FAST_S after new lines, and up to _SLOW_S without new lines.
_FAST_S = 0.01
_SLOW_S = 0.15


class RunWatch:
    """A reader of a live run's record.

    The method `look` returns the record. It reads the file only if the file has changed, or some seconds have passed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = read.record(folder)
        self._seen = stamp_of(folder.state)
        self._looked = time.monotonic()

    def look(self) -> RunRecord:
        stamp, now = stamp_of(self.folder.state), time.monotonic()
        if not self.record.is_terminal and (stamp != self._seen or now - self._looked > _LOOK_S):
            self.record = read.record(self.folder)
            self._seen, self._looked = stamp, now
        return self.record


class Show:
    """A follower of a run that reports lines and state changes by callbacks.

    Args:
        folder: The run's folder.
        line: Called for each line of the workers' logs.
        state: Called for each change of state, or of the reason for waiting.
        note: Called for each line that nodes print during preparation.
        attempt: Called with an attempt and the next attempt, before the lines of the next attempt.
        ranks: Ranks whose lines are reported; None for all.
        start: Position in the log at which the reported lines begin.
        last: Number of existing lines to report, counted from the log's end; None for all.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        line: Callable[[LogLine], None],
        state: Callable[[RunRecord], None],
        note: Callable[[LogLine], None] | None = None,
        attempt: Callable[[Attempt, Attempt], None] | None = None,
        ranks: list[int] | None = None,
        start: LogStart | None = None,
        last: int | None = None,
    ) -> None:
        self._line, self._state, self._note, self._attempt = line, state, note, attempt
        self._attempts_told = 1
        self._watch = RunWatch(folder)
        self._told: tuple[str, str | None] | None = None
        self._lines: Iterator[LogLine] | None = None
        job = self._watch.record.job
        self._prepare = PrepareFollower(folder, job.node_count if job else 1)
        self._follower = LogFollower(folder, ranks, start, last)

    def to_the_end(self) -> RunRecord:
        """Follow the run to its end, and return its final record."""
        pause = _FAST_S
        while True:
            record = self._watch.look()
            if self._told is not None and self._told[0] != states.QUEUED:
                # Print notes before a change of the run's state that follows these notes.
                self._tell_notes()
            # Report the remaining lines of an attempt before the state changes of the next attempt.
            is_next_attempt = len(record.attempts) > self._attempts_told
            if not is_next_attempt:
                self._tell_state(record)
            if record.is_terminal:
                self._tell_notes()
            # The record was read before the log. So if the record is final, the log is complete.
            if self._lines is None:
                self._lines, is_last = (
                    self._follower.new(len(record.attempts), is_over=record.is_terminal),
                    record.is_terminal,
                )
            else:
                is_last = False  # an interrupted call has not reported all lines
            came = False
            for line in self._lines:
                came = True
                self._tell_attempts(record, line.attempt)
                self._line(line)
            self._lines = None
            if is_next_attempt:
                self._tell_attempts(record, len(record.attempts))
                self._tell_state(record)
            if is_last:
                self._follower.close()
                self._prepare.close()
                return record
            # Poll often while new lines come, and less and less often when no lines come.
            pause = _FAST_S if came else min(pause * 1.2, _SLOW_S)
            time.sleep(pause)

    def _tell_state(self, record: RunRecord) -> None:
        now = (hang_status(record), record.waiting_for)
        if now != self._told and not record.is_terminal:
            self._told = now
            self._state(record)

    def _tell_attempts(self, record: RunRecord, until: int) -> None:
        while self._attempts_told < min(until, len(record.attempts)):
            before, now = record.attempts[self._attempts_told - 1 : self._attempts_told + 1]
            self._attempts_told += 1
            if self._attempt is not None:
                self._attempt(before, now)

    def _tell_notes(self) -> None:
        if self._note is not None:
            for said in self._prepare.new():
                self._note(said)


def prefix(line: LogLine, world_size: int, attempts: int = 1) -> str:
    """Return a log line's prefix, such as "[rank 1] " or "[2: rank 1] "."""
    if world_size <= 1:
        return ""
    return f"[rank {line.rank}] " if attempts <= 1 else f"[{line.attempt}: rank {line.rank}] "


def node_prefix(said: LogLine, node_count: int) -> str:
    """Return the prefix of a node's line, such as "  [node 1] "."""
    return f"  [node {said.rank}] " if node_count > 1 else "  "


def stream(folder: RunFolder, out: IO[str], said: Collection[str] = ()) -> RunRecord:
    """Print the run to `out` until its end, and return its final record.

    said: Warnings that the user has already seen, which are not printed.
    """
    record = read.record(folder)
    size = record.world_size
    nodes = record.job.node_count if record.job else 1
    print(f"RunId: {folder.run_id}\nFolder: {folder.path}", file=out, flush=True)

    # A terminal interprets a script's control characters, but a file only stores them.
    terminal = TerminalLines() if out.isatty() else None

    def line(found: LogLine) -> None:
        nonlocal size
        size = max(size, found.rank + 1)  # the script may start more ranks than the record has
        text = found.text if terminal is None else terminal.line(found.rank, found.text)
        print(prefix(found, size) + text, file=out, flush=True)

    def state(now: RunRecord) -> None:
        if now.waiting_for or now.status != states.NOT_STARTED:
            print(f"-- {state_text(now)}", file=out, flush=True)

    def note(said: LogLine) -> None:
        # Plain text cannot be redrawn, so skip the intermediate states of progress bars.
        if said.complete:
            print(node_prefix(said, nodes) + said.text, file=out, flush=True)

    def attempt(before: Attempt, now: Attempt) -> None:
        print(f"-- {attempt_text(before, now)}", file=out, flush=True)

    record = Show(folder, line=line, state=state, note=note, attempt=attempt).to_the_end()
    print(f"-- {end_text(record)}", file=out, flush=True)
    for warning in [one for one in record.warnings if one not in said]:
        print(f"-- Warning: {warning}", file=out, flush=True)
    return record


def state_text(record: RunRecord) -> str:
    """Return a state with the reason to wait, such as "Queued: 1 run ahead"."""
    return f"{hang_status(record)}: {record.waiting_for}" if record.waiting_for else hang_status(record)


def attempt_text(before: Attempt, now: Attempt) -> str:
    """Return a sentence on why an attempt ended and the next one starts."""
    return f"Attempt {before.number} ended ({before.cause}); attempt {now.number} starts."
