"""Find the worker that failed first, and the reason: pure functions from facts to the failure report.

The first worker to exit is often not the first to fail. When a worker dies, the collectives of the other workers fail
with "connection closed by peer", and these workers exit immediately. The failed worker may still be printing its
traceback. So workers are compared by the time of their exception, or without an exception by the end of the process.
Workers whose error says that they lost a peer come last.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from paceline.runs.failure import FailureReport, last_words, logs_command, signal_name, signal_words
from paceline.system.serialization import fits

#: Messages in which frameworks report the loss of another worker.
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|broken pipe|connection refused"
    r"|application timeout caused pair closure|socket closed|read error .*(connection|peer)"
    r"|connectFullMesh failed|gloo.*(timed out|timeout)|timed out (after )?waiting .*(recv|send|operation)|wait timeout after"
    r"|DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|failed to recv, got 0 bytes|recvValue failed|sendBytes failed|TCPStore.*(closed|reset|timed? ?out)"
    r"|Horovod(Internal|Unknown)Error|LostRankError|UnavailableError|MPI_ERR_PROC_FAILED|MPI_ERR_REVOKED|coordination service"
    r"|Connection(Reset|Aborted)Error|BrokenPipeError",
    re.IGNORECASE,
)


#: Message of the engine for collective operations about a rank whose script ended while other ranks waited for the rank.
_SHUT_DOWN = re.compile(r"\brank (\d+) has shut down")

_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class ErrorMessage(TypedDict, total=False):
    """The message of a worker's exception. Its traceback is `extraInfo["py_callstack"]`."""

    message: str
    extraInfo: Mapping[str, str]


class ErrorFile(TypedDict, total=False):
    """The error file of a worker, in torchelastic's format, with Paceline's additions."""

    message: ErrorMessage | None
    exception: str
    type: str
    time: int | float
    exit_code: int
    is_memory: bool


def error_of(content: object, exit_code: int) -> ErrorFile | None:
    """Return a worker's error, or None if its error file does not explain the worker's end.

    Only the worker itself writes `exception`. Torch writes errors of programs below the worker into the same file. The script
    may handle such an error. So it explains only an exit code of the script's own.

    exit_code: The worker's exit code; 0 before its end.
    """
    has_failed = exit_code != 0 and exit_code - 128 not in range(1, 65)
    if not isinstance(content, dict) or not (has_failed or "exception" in content):
        return None
    message = content.get("message")
    error: Any = {**content, "message": {"message": message}} if isinstance(message, str) else {**content}
    if not fits(error, ErrorFile):
        return None
    if "exception" not in error:
        line = ((error.get("message") or {}).get("message") or "").strip().partition("\n")[0]
        kind = line.partition(":")[0]
        error.update(exception=line, type=kind, is_memory=kind.endswith(("MemoryError", "OutOfMemoryError")))
    return cast(ErrorFile, error) if error["exception"] else None


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """The end of one worker: exit code, error, time.

    exit_code: The exit code as in a shell; None if the worker has not ended.
    error: The content of the worker's error file, or None.
    ended_at: Unix time of the process's end; None if the worker has not ended.
    stopped: Whether Paceline ended the worker.
    stack: The call stack of a worker that a signal such as SIGSEGV ended.
    printed: Exception line and traceback at the end of the log, for programs that write no error file.
    """

    rank: int
    node: str
    exit_code: int | None = None
    error: ErrorFile | None = None
    ended_at: float | None = None
    stopped: bool = False
    stack: str | None = None
    printed: tuple[str, str] | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the worker failed before Paceline stopped it."""
        return self.error is not None or (self.exit_code not in (0, None) and not self.stopped)

    @property
    def failed_at(self) -> float:
        error_at = self.error.get("time") if self.error else None
        return error_at if isinstance(error_at, (int, float)) else self.ended_at or float("inf")

    @property
    def said(self) -> str:
        """The text of the worker's exception, or the last lines of its log."""
        if self.error is None:
            return "\n".join(self.last_lines)
        return f"{self.error.get('exception', '')}\n{(self.error.get('message') or {}).get('message', '')}"

    @property
    def is_victim(self) -> bool:
        """Whether the worker's error says that it lost its connection to another worker."""
        if self.error is not None:
            return bool(LOST_PEER.search(self.said))
        # Exit codes 137 (SIGKILL) and 139 (SIGSEGV) are causes by themselves, even if the log reports a lost worker.
        return bool(LOST_PEER.search("\n".join(self.last_lines[-10:]))) and self.exit_code not in (137, 139)

    @property
    def signal(self) -> int | None:
        """The number of the signal that ended the worker, or None."""
        # Signal numbers end at 64: an exit code such as 255 is the script's own.
        if self.error is None and self.exit_code is not None and 128 < self.exit_code < 128 + 65:
            return self.exit_code - 128
        return None


def script_exit_code(exit_code: int | None, error: ErrorFile | None) -> int | None:
    """Return a worker's exit code, or its exception's if the code is 0 or a signal's."""
    return error.get("exit_code", 1) if error is not None and (not exit_code or exit_code > 128) else exit_code


def first_failure(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the worker that caused the failure, or None if no worker failed."""
    left = _left_early(ends)
    # If a worker's script has ended early, it waits for the other workers. A SIGTERM in this wait is not its own failure.
    failed = [end for end in ends if end.failed and not (end.rank in left and end.signal == signal.SIGTERM)]
    # False sorts before True, so workers that failed only because another worker failed are blamed last.
    return min(failed, key=lambda end: (end.is_victim, end.failed_at, end.rank), default=None)


def worker_report(
    run_id: str,
    attempt: int,
    ends: Sequence[WorkerEnd],
    *,
    oom_killed: bool,
    disk_full: bool = False,
    clash: tuple[WorkerEnd, str] | None = None,
) -> FailureReport | None:
    """Return the failure report of an attempt; None if no worker failed.

    oom_killed: Whether the kernel killed a process because memory ran out.
    disk_full: Whether the disk of the run's folder is full.
    clash: A worker whose port was in use, with a sentence about the port; this worker then counts as the first failure.
        None without such a worker.
    """
    first = clash[0] if clash else first_failure(ends)
    if first is None:
        return None
    cause, what = ("port", clash[1]) if clash else _cause(first, oom_killed)
    if cause == "exception" and (_DISK_FULL.search(what) or (disk_full and first.error is None)):
        cause = "disk"
        what = f"{what.rstrip('.')}. The disk of the run's folder is full: free some space and submit again."
    exit_code = first.exit_code or 1
    exception, trace = _exception(first)
    where = f"rank {first.rank} on node {first.node}" if len(ends) > 1 else "the worker"
    message = f"{where[0].upper()}{where[1:]} failed{' first' if _others_failed(ends, first) else ''}: {what}"
    if clash is None:
        message += gone_before(first, ends)
    return FailureReport(
        cause=cause,
        message=message,
        exit_code=exit_code,
        attempt=attempt,
        rank=first.rank,
        node=first.node,
        signal=signal_name(first.signal) if first.signal else None,
        exception=exception,
        traceback=trace or (first.stack if first.signal else None),
        last_lines=first.last_lines,
        victims=tuple((end.rank, _victim_text(end, exception)) for end in ends if end is not first and _suffered(end)),
        see=logs_command(run_id, first.rank if len(ends) > 1 else None),
    )


def gone_before(first: WorkerEnd, ends: Sequence[WorkerEnd]) -> str:
    """Return a sentence about workers that ended too early and made `first` fail, or ""."""
    if not first.is_victim:
        return ""
    if gone := [end.rank for end in ends if end.exit_code == 0 and not end.stopped]:
        return f" Before that, rank {', '.join(map(str, gone[:5]))} had ended with exit code 0."
    if left := _left_early(ends):
        return f" Before that, rank {', '.join(map(str, sorted(left)[:5]))} had ended its script."
    return ""


def _cause(end: WorkerEnd, oom_killed: bool) -> tuple[str, str]:
    """Return the cause of a worker's failure, such as "memory", and a sentence about it."""
    exception, _ = _exception(end)
    has_own = end.error is not None and end.error.get("type") != "SystemExit"
    if not has_own and exception is not None:
        # Without an error file, judge by the name of the exception that a program printed.
        is_memory = exception.partition(":")[0].endswith(("MemoryError", "OutOfMemoryError"))
        return ("memory", f"out of memory: {exception}") if is_memory else ("exception", exception)
    if end.error is not None and not has_own:
        return "exception", f"the script left with exit code {end.exit_code if end.exit_code is not None else '?'}."
    if end.error is not None and exception is not None:
        if end.error.get("is_memory"):
            return "memory", f"out of memory: {exception}"
        return "exception", exception
    if end.signal is None:
        return "exception", f"its process ended with exit code {end.exit_code} and without an exception."
    name, words = signal_name(end.signal), signal_words(end.signal)
    if name == "SIGKILL" and oom_killed:
        return "memory", (
            "killed by SIGKILL, by the kernel for memory (out of memory). "
            "Use a smaller batch or model, fewer workers on the node, or a node with more memory."
        )
    return "killed", f"killed by {name}{f' ({words})' if words else ''}."


def _exception(end: WorkerEnd) -> tuple[str | None, str | None]:
    if end.error is None or end.error.get("type") == "SystemExit":
        return end.printed if end.printed is not None and end.signal is None else (None, None)
    extra = (end.error.get("message") or {}).get("extraInfo") or {}
    return str(end.error.get("exception")), extra.get("py_callstack")


def _left_early(ends: Sequence[WorkerEnd]) -> set[int]:
    """Return the ranks that had left their script while other ranks waited for them."""
    said = (str((end.error.get("message") or {}).get("message", "")) for end in ends if end.error and end.is_victim)
    return {int(rank) for text in said for rank in _SHUT_DOWN.findall(text)}


def _others_failed(ends: Sequence[WorkerEnd], first: WorkerEnd) -> bool:
    return any(end is not first and _suffered(end) for end in ends)


def _suffered(end: WorkerEnd) -> bool:
    return end.failed or end.stopped


def _victim_text(end: WorkerEnd, of_first: str | None) -> str:
    """Return what happened to a worker after the first failure.

    of_first: The exception of the worker that failed first.
    """
    exception, _ = _exception(end)
    if end.stopped and not end.failed:
        return "was ended by Paceline because of it."
    if end.is_victim:
        return f"lost its connection to a worker that was gone: {exception or _last(end)}"
    if exception is not None and exception == of_first:
        return "failed after it with the same error."
    return f"failed after it: {exception or f'exit code {end.exit_code}'}"


def _last(end: WorkerEnd) -> str:
    return last_words(end.last_lines) or f"exit code {end.exit_code}"
