"""Handles on submitted functions: one call, and many."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

from paceline.errors import RunFailedError, RunStateError
from paceline.functions import calls
from paceline.functions.pool import ResultLine, read_lines
from paceline.runs import states
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.follow import RunWatch
from paceline.runs.record import RunRecord
from paceline.runs.remote_status import refresh
from paceline.runs.run import Run, check_numbers
from paceline.runs.work_dir import place
from paceline.system.files import stamp_of

_R = TypeVar("_R")

#: First and longest pause between two reads of a run's record, in seconds.
_PAUSE_S, _LONGEST_S = 0.01, 0.25
#: Pause before the record is checked again: this share of the time waited so far, but at least `_SHORTEST_S` seconds.
_PART, _SHORTEST_S = 0.02, 0.002


class FunctionRun(Run, Generic[_R]):
    """A run that makes one call of a function.

    `FunctionJob.submit` returns it. `FunctionRun.get(workspace, run_id)` opens an earlier run.

    Examples:
        >>> run = pl.FunctionRun.get(pl.Workspace("my_runs"), "train_1700000000_00000001")  # doctest: +SKIP
        >>> run.result()  # doctest: +SKIP
        0.2
    """

    def result(self, timeout: float | None = None, rank: int = 0) -> _R:
        """Wait for the call's end, and return its result.

        Args:
            timeout: Seconds to wait; None waits until the end.
            rank: Rank of the process whose result to return.

        Raises:
            RunFailedError: The function raised an exception, whose traceback is in the message, or the run failed.
            RunStateError: The run was canceled, or has no result.
            TimeoutError: The run has not ended in time.
        """
        check_numbers("rank", rank, range(self.record().world_size), self.id)
        if (error := self.exception(timeout)) is not None:
            raise error
        found: _R = calls.load(self.folder.outputs, calls.result_stem(rank), pickled=_is_pickled(self.record()))
        return found

    def exception(self, timeout: float | None = None) -> RunFailedError | RunStateError | None:
        """Wait for the call's end. Return the exception that `result` raises, or None.

        Args:
            timeout: Seconds to wait; None waits until the end.

        Raises:
            TimeoutError: The run has not ended in time.
        """
        record = _ended(self, _deadline(timeout))
        refresh(self.folder)
        if record.status == states.COMPLETED and not calls.is_stored(self.folder.outputs, calls.RESULT):
            return RunStateError(
                f"Run {self.id} is Completed without a result: it made the calls of a map(), whose results are in "
                "outputs/results, the function ended its process, such as by os._exit(), or the result's file was removed."
            )
        return _error(record)

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an error."""
        return self.record().is_terminal


class MappedCall(Generic[_R]):
    """One of several calls that one run makes.

    Attributes:
        run: The run that makes this call and other calls.
        number: The call's number in the run.
    """

    def __init__(self, run: FunctionRun[_R], number: int, results: _Results) -> None:
        self.run, self.number = run, number
        self._results = results

    def __repr__(self) -> str:
        return f"<call {self.number} of run {self.run.id}>"

    def result(self, timeout: float | None = None) -> _R:
        """Wait for the call's end. Return its result, or raise its error."""
        error, line = self._line(timeout)
        if error is not None:
            raise error
        if "file" not in line:
            return line["value"]  # type: ignore[return-value]
        pickled = _is_pickled(self.run.record())
        found: _R = calls.load(self.run.folder.outputs / calls.RESULTS, str(self.number), pickled=pickled)
        return found

    def exception(self, timeout: float | None = None) -> RunFailedError | RunStateError | None:
        """Wait for the call's end. Return the exception that `result` raises, or None."""
        return self._line(timeout)[0]

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an error."""
        return self.number in self._results.read() or self.run.record().is_terminal

    def _line(self, timeout: float | None) -> tuple[RunFailedError | RunStateError | None, ResultLine]:
        deadline, pause = _deadline(timeout), _PAUSE_S
        while (line := self._results.read().get(self.number)) is None:
            record = self.run.record()
            if record.is_terminal:
                # Read again: the worker may have written the line after the first read.
                line = self._results.read().get(self.number)
                if line is not None:
                    break
                why = _error(record) or RunStateError(f"Run {self.run.id} is Completed.")
                return type(why)(f"Call {self.number} of run {self.run.id} has no result. {why}"), {}
            pause = _wait(self.run, deadline, pause)
        if "error" not in line:
            return None, line
        error = {**line["error"]} if isinstance(line["error"], dict) else {}
        exception, traceback = str(error.get("exception")), self._with_own_paths(str(error.get("traceback") or ""))
        message = f"Call {self.number} of run {self.run.id} failed: {exception}"
        report = FailureReport(cause="exception", message=message, exception=exception, traceback=traceback or None)
        return RunFailedError(str(report), report), line

    def _with_own_paths(self, traceback: str) -> str:
        record, folder = self.run.record().to_json(), str(self.run.folder.path)
        # On another machine the worker has run in another folder.
        for run_dir in set(re.findall(rf'File "([^"\n]*/{self.run.id})/work/', traceback)):
            traceback = place(record, is_shared=run_dir == folder).with_own_paths(traceback, run_dir)
        return traceback


class FunctionRuns(Sequence["FunctionRun[_R] | MappedCall[_R]"], Generic[_R]):
    """The calls of one `FunctionJob.map`, in the order of the values.

    Each item has `result()`, `exception()` and `done()`.

    Args:
        runs: The runs that make the calls.
        count: Number of the calls.
        is_pool: Whether a run makes several calls.

    Examples:
        >>> from jobs import double  # doctest: +SKIP
        >>> double.map([1, 2, 3], at_once=2).results()  # doctest: +SKIP
        [2, 4, 6]
    """

    def __init__(self, runs: Sequence[FunctionRun[_R]], count: int, *, is_pool: bool) -> None:
        self.runs = tuple(runs)
        results = [_Results(run.folder) for run in runs]
        width = len(runs)
        self._items: list[FunctionRun[_R] | MappedCall[_R]] = [
            MappedCall(runs[number % width], number // width, results[number % width]) for number in range(count)
        ]
        if not is_pool:
            self._items = list(runs)

    def __repr__(self) -> str:
        return f"<{len(self)} calls in {', '.join(run.id for run in self.runs[:3])}{', ...' * (len(self.runs) > 3)}>"

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> FunctionRun[_R] | MappedCall[_R]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FunctionRun[_R] | MappedCall[_R]]: ...
    def __getitem__(self, index: int | slice) -> object:
        return self._items[index]

    def __iter__(self) -> Iterator[FunctionRun[_R] | MappedCall[_R]]:
        return iter(self._items)

    def results(self, timeout: float | None = None) -> list[_R]:
        """Wait for all calls, and return their results in order.

        Args:
            timeout: Seconds to wait for all calls; None waits until the end.

        Raises:
            RunFailedError: A call failed. The error is of the first failed call, in the order of the values.
            RunStateError: A run was canceled.
            TimeoutError: Some calls have not ended in time.
        """
        deadline = _deadline(timeout)
        return [item.result(None if deadline is None else max(0.0, deadline - time.monotonic())) for item in self]

    def cancel(self) -> None:
        """Request the end of all runs. Calls that have ended keep their results."""
        for run in self.runs:
            run.cancel()


class _Results:
    def __init__(self, folder: RunFolder) -> None:
        self._run = folder
        self._folder = folder.outputs / calls.RESULTS
        self._stamps: list[tuple[int, int, int] | None] = []
        self._lines: dict[int, ResultLine] = {}

    def read(self) -> dict[int, ResultLine]:
        refresh(self._run)
        stamps = [stamp_of(path) for path in sorted(self._folder.glob("*.jsonl"))]
        if stamps != self._stamps:
            self._stamps, self._lines = stamps, read_lines(self._folder)
        return self._lines


def _is_pickled(record: RunRecord) -> bool:
    # Load a pickle only if the job that this user submitted allows pickles: a worker could write a malicious pickle.
    return record.job is not None and record.job.arguments[:1] == ("--pickle",)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _ended(run: FunctionRun[_R], deadline: float | None) -> RunRecord:
    watch, began = RunWatch(run.folder), time.monotonic()
    while not (record := watch.look()).is_terminal:
        _wait(run, deadline, min(max(_SHORTEST_S, _PART * (time.monotonic() - began)), _LONGEST_S))
    return record


def _wait(run: FunctionRun[_R], deadline: float | None, pause: float) -> float:
    """Sleep for `pause` seconds, and return a longer pause for the next sleep.

    Raises:
        TimeoutError: The deadline has passed.
    """
    left = _LONGEST_S if deadline is None else deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"Run {run.id} has not ended in time. It goes on; `paceline logs -f {run.id}` shows it.")
    time.sleep(min(pause, left))
    return min(pause * 1.2, _LONGEST_S)


def _error(record: RunRecord) -> RunFailedError | RunStateError | None:
    if record.status == states.FAILED:
        return RunFailedError(f"Run {record.run_id} failed. {record.failure or ''}", record.failure)
    if record.status == states.CANCELED:
        return RunStateError(f"Run {record.run_id} was canceled by {record.canceled_by}.")
    return None
