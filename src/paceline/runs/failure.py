"""The failure report: the first worker that failed and the reason, as stored, shown and raised."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from paceline.system.serialization import known_fields

#: Causes of failures, each with its meaning. `paceline show` prints the meaning, and retries depend on the cause.
CAUSES = {
    "exception": "the script raised an exception or left with an exit code of its own",
    "memory": "a worker was killed for memory, or could not get any",
    "killed": "a worker was ended by a signal that neither the script nor Paceline sent",
    "launcher": "the launcher ended before its workers did, or could not start them",
    "node_lost": "a node was lost: its machine, its network or the engine's process on it is gone",
    "preempted": "the engine took the nodes away for another job, or put the job back into the queue",
    "port": "a port that the run was to use was taken by another program",
    "engine": "the engine could not give the nodes, or took them back",
    "hang": "no worker got on any more for hang_seconds, and on_hang said to end the run",
    "time_limit": "the run took longer than max_run_duration_seconds",
    "supervisor": "the run's supervisor was killed",
    "reboot": "the machine was restarted",
    "restored": "it went on when its backup was made",
    "not_started": "the submitting program or the supervisor was killed before the run was queued",
    "not_completed": "the program that logged the run ended without complete()",
    "prepare": "the run could not be prepared",
    "environment": "the script's environment could not be built",
    "data": "data could not be fetched before the workers started, or stored after they ended",
    "disk": "the disk of the run's folder is full",
    "internal": "an error of Paceline's own",
    "user": "fail() was called",
    "step": "of a pipeline, a step failed or could not be submitted",
    "trials": "of a sweep, so many trials failed, one could not be submitted, or none logged the primary metric",
}

#: Causes after which a retry of the run needs other nodes.
NODES_GONE = frozenset({"node_lost", "preempted"})

#: The exit code of a run that reached its time limit. The command timeout(1) uses the same code.
EXIT_TIME_LIMIT = 124
#: The exit code of a preempted run: EX_TEMPFAIL of sysexits.h, by which a program says that a retry may succeed.
EXIT_PREEMPTED = 75
#: The exit code that a shell gives to a program which SIGTERM ended.
EXIT_CANCELED = 128 + signal.SIGTERM
_LAST_LINES = 20


#: Box-drawing characters of Unicode, and the ASCII characters that replace them.
_FRAME = "".join(map(chr, range(0x2500, 0x2580))) + " \t|+-"
_TOP, _BOTTOM = re.compile(r"^\s*(\[rank \d+\] )?[╭┌┏╔]"), re.compile(r"^\s*(\[rank \d+\] )?[╰└┗╚][─━═]")


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The reason why a run failed, with the first worker that failed.

    Args:
        cause: A key of `CAUSES`, such as "exception" or "node_lost".
        message: One sentence on the failure.
        rank, node: The first worker to fail; None if no worker is to blame.
        attempt: Number of the attempt that failed.
        exit_code: Exit code with which `paceline run` ends.
        signal: Name of the signal that ended the worker, such as "SIGKILL".
        exception: The last line of the exception, such as "ValueError: bad batch".
        traceback: The whole traceback of the exception.
        last_lines: At most 20 lines from the end of the worker's log.
        victims: (rank, description of its end) of each worker that ended because the first worker failed.
        see: A command or a log file that shows more.

    Examples:
        >>> experiment = pl.Experiment(pl.Workspace("my_runs"), "digits")
        >>> run = experiment.submit(pl.Estimator(entry_script="broken.py"))
        >>> failure = run.wait_for_completion(raise_on_error=False).failure
        >>> failure.rank, failure.exception
        (0, 'ValueError: bad batch')
    """

    cause: str
    message: str
    exit_code: int = 1
    attempt: int | None = None
    rank: int | None = None
    node: str | None = None
    signal: str | None = None
    exception: str | None = None
    traceback: str | None = None
    last_lines: tuple[str, ...] = ()
    victims: tuple[tuple[int, str], ...] = ()
    #: Types of fields that have another form in JSON.
    JSON_HINTS: ClassVar[Mapping[str, object]] = {"victims": tuple[Mapping[str, int | str], ...]}
    see: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, as in `state.json`."""
        data = asdict(self)
        data["last_lines"] = list(self.last_lines)
        data["victims"] = [{"rank": rank, "message": message} for rank, message in self.victims]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FailureReport:
        """Return the report that `to_json` wrote, without newer versions' fields."""
        values = known_fields(cls, data)
        values["last_lines"] = tuple(values.get("last_lines") or ())
        values["victims"] = tuple((v["rank"], v["message"]) for v in values.get("victims") or ())
        return cls(**values)

    def __str__(self) -> str:
        lines = [self.message]
        if self.traceback:
            # Show the end of the traceback: the line that raised the exception, and the exception itself.
            lines += ["", *_indented(self.traceback.rstrip().splitlines()[-_LAST_LINES:])]
        elif self.last_lines:
            lines += ["", "Its last lines:", *_indented(self.last_lines)]
        if self.victims:
            lines.append("")
            lines += [f"rank {rank} {message}" for rank, message in self.victims[:8]]
            if len(self.victims) > 8:
                lines.append(f"and {len(self.victims) - 8} ranks more")
        if self.see:
            lines += ["", f"More: {self.see}"]
        return "\n".join(lines)


def last_words(lines: Sequence[str]) -> str:
    """Return a log's last non-empty line; if it ends a box-drawing frame, the text inside."""
    found = [line for line in lines if line.strip()]
    if not found:
        return ""
    if not _BOTTOM.search(found[-1]):
        return found[-1].strip()
    tops = [number for number, line in enumerate(found[:-1]) if _TOP.search(line)]
    words = [text for line in found[(tops or [0])[-1] : -1] if (text := line.strip(_FRAME))]
    title = tops and found[tops[-1]].strip(_FRAME)
    return ": ".join(words[:2]) if title else (words or [""])[0]


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGKILL", or "signal 42"."""
    try:
        return signal.Signals(number).name
    # Most real-time signals have no name, nor have signals of other systems.
    except ValueError:
        return f"signal {number}"


def signal_words(number: int) -> str:
    """Return what a signal means for a worker, such as "interrupted", or ""."""
    words: dict[int, str] = {
        signal.SIGKILL: "killed from outside",
        signal.SIGSEGV: "a segmentation fault: an access to memory that is not its own",
        signal.SIGBUS: "a bus error; often /dev/shm or a disk that is full",
        signal.SIGABRT: "abort() was called in native code",
        signal.SIGFPE: "an arithmetic error in native code",
        signal.SIGILL: "an instruction that this processor does not have",
        signal.SIGTERM: "asked to end",
        signal.SIGINT: "interrupted",
        signal.SIGHUP: "its terminal was closed",
        signal.SIGPIPE: "wrote to a closed pipe",
        signal.SIGXCPU: "its limit of processor time was reached",
        signal.SIGXFSZ: "its limit of file size was reached",
    }
    return words.get(number, "")


def logs_command(run_id: str, rank: int | None = None) -> str:
    """Return the command that shows a run's log, or only one rank's log."""
    words = ["paceline", "logs", run_id]
    if rank is not None:
        words += ["--rank", str(rank)]
    return shlex.join(words)


def _indented(lines: list[str] | tuple[str, ...]) -> list[str]:
    return [f"    {line}" for line in lines]
