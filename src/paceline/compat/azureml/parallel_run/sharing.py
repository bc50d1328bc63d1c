"""The dispatch of mini-batches to ranks, and the limits for failures."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import IO, Literal, TypedDict

from paceline.compat.azureml.parallel_run.batches import Batch, BatchFields, ParallelRunSettings


class _Kind(TypedDict):
    kind: Literal["ready", "done", "failed", "give_up"]


class RankRequest(_Kind, total=False):
    """A rank's message: its last mini-batch's result, and a request for the next."""

    number: int
    rows: list[str]
    items: int
    why: str


class RankResponse(TypedDict):
    """The next mini-batch, or None if none is left."""

    batch: BatchFields | None


class Sharing:
    """A thread-safe dispatcher of mini-batches, which writes the results in order."""

    def __init__(self, batches: list[Batch], settings: ParallelRunSettings, output: Path | None) -> None:
        self._settings = settings
        self._count = len(batches)
        self._waiting = deque(batches)
        self._tries = dict.fromkeys(range(len(batches)), 0)
        self._at_work: dict[int, Batch] = {}
        self._rows: dict[int, list[str]] = {}
        self._written = 0
        self._file: IO[str] | None = output.open("w", encoding="utf-8") if output else None
        self.failed_items = self.failed_batches = 0
        #: Why the step has failed, or None.
        self.failure: str | None = None
        self._changed = threading.Condition()

    def next(self) -> Batch | None:
        """Return the next mini-batch, or None if none is left or the step failed.

        If all mini-batches have started, the call waits for their results, because a failed mini-batch is tried again.
        """
        with self._changed:
            while not self._waiting and self._at_work and self.failure is None:
                self._changed.wait()
            if self.failure is not None or not self._waiting:
                return None
            batch = self._waiting.popleft()
            self._at_work[batch.number] = batch
            self._tries[batch.number] += 1
            return batch

    def done(self, number: int, rows: list[str], items: int) -> None:
        """Record a mini-batch's result: its rows, and the number of good items."""
        with self._changed:
            batch = self._at_work.pop(number)
            self.failed_items += max(0, len(batch) - items)
            self._keep(number, rows)
            print(f"mini-batch {number + 1} of {self._count}: {items} of {len(batch)} items", flush=True)
            self._check(f"items of mini-batch {number + 1} without a result: {len(batch) - items}")

    def failed(self, number: int, why: str) -> None:
        """Record that run() has raised or timed out for a mini-batch."""
        with self._changed:
            batch = self._at_work.pop(number)
            print(f"mini-batch {number + 1} of {self._count}, try {self._tries[number]}: {why}", flush=True)
            if self._tries[number] < self._settings.tries:
                self._waiting.append(batch)
                self._changed.notify_all()
                return
            self.failed_items += len(batch)
            self.failed_batches += 1
            self._keep(number, [])
            self._check(f"the last was mini-batch {number + 1}: {why}")

    def lost(self, number: int) -> None:
        """Return a crashed rank's mini-batch to the queue."""
        with self._changed:
            if number in self._at_work:
                self._waiting.appendleft(self._at_work.pop(number))
                self._changed.notify_all()

    def give_up(self, why: str) -> None:
        """Fail the step: the script can't run any mini-batch."""
        with self._changed:
            self.failure = self.failure or why
            self._changed.notify_all()

    def close(self) -> None:
        """Close the output file and print a summary."""
        if self._file is not None:
            self._file.close()
        good = self._count - self.failed_batches
        print(f"{good} of {self._count} mini-batches done, {self.failed_items} items failed", flush=True)

    def _keep(self, number: int, rows: list[str]) -> None:
        self._rows[number] = rows
        while self._written in self._rows:
            for row in self._rows.pop(self._written):
                if self._file is not None:
                    self._file.write(f"{row}\n")
            self._written += 1

    def _check(self, last: str) -> None:
        limits, batches = self._settings, self.failed_batches
        percent = 100 * batches / self._count
        if 0 <= limits.error_threshold < self.failed_items:
            why = f"failed items: {self.failed_items}, more than error_threshold={limits.error_threshold}"
        elif 0 <= limits.failed_batches < batches:
            why = f"failed mini-batches: {batches}, more than allowed_failed_count={limits.failed_batches}"
        elif 0 <= limits.failed_percent < percent:
            why = f"failed mini-batches: {percent:.4g} %, more than allowed_failed_percent={limits.failed_percent:g}"
        else:
            why = ""
        if why:
            self.failure = f"{why}; {last}"
        self._changed.notify_all()

    def handle(self, question: RankRequest) -> RankResponse:
        """Handle a rank's message about mini-batches, and return the response."""
        kind = question["kind"]
        if kind == "done":
            self.done(question["number"], question["rows"], question["items"])
        elif kind == "failed":
            self.failed(question["number"], question["why"])
        elif kind == "give_up":
            self.give_up(question["why"])
            return {"batch": None}
        batch = self.next()
        return {"batch": None if batch is None else batch.fields()}
