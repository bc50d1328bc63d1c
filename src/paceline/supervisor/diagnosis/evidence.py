"""Find signs of what ended an attempt: crashes, stalled collectives, workers that trained alone, ports in use.

After a crash, the log has text of the standard library's faulthandler. `paceline.collectives.liveness` writes a line
{time_s, operation, name, process_set, waited_s, missing_ranks, resolved} when a collective is late, and another line
when it completes. For a worker that trained alone, `paceline.worker.alone` writes `alone_<rank>.json`.

Another program may take a port after Paceline has leased it and before the worker listens there. torch 2.13 and
TensorFlow 2.21 then print these messages. JAX prints TensorFlow's messages:

    torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address.
        port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
    Failed to add port to server: No address added out of total 1 resolved for '0.0.0.0:29502'
    tensorflow...UnknownError: Could not start gRPC server                  (the port is only in the log)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.job.job import Job
from paceline.job.plan import Launch
from paceline.runs.folder import RunFolder
from paceline.supervisor.diagnosis.diagnose import LOST_PEER, WorkerEnd
from paceline.system.files import read_json

#: Number of innermost calls of a crash to report; faulthandler writes them first.
_FRAMES = 15
#: Path of Paceline's own code, whose calls start the script and are not reported.
_OURS = "/paceline/worker/"
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")
#: Prefixes that Paceline, torch and torchrun put before each log line of a rank.
_MARK = re.compile(r"^(?:\[rank \d+\] |\[rank\d+\]:\s?|\[\w+\d+\]:)+")
_FRAMES_OF_RICH = ("╭", "│", "╰", "┌", "└", "+", "|")
#: Exceptions that launchers raise to report a failed rank.
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException")
#: Maximum number of lines after an exception that ended the script: further lines of its message, or last output.
_MOST_BEHIND = 8
#: Maximum number of stalled collective operations that a report names. It only counts further operations.
_SHOWN = 3
#: Training library -> advice on what to call so that the workers train one model together.
_HOW = {
    "torch": "Call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel, or use "
    "paceline.parallel",
    "lightning": "Give the Trainer devices={per_node}, num_nodes={nodes}, strategy='ddp'",
    "tensorflow": "Make the model under tf.distribute.MultiWorkerMirroredStrategy (distributed_backend='tensorflow'), or use "
    "Horovod's calls",
    "jax": "Call jax.distributed.initialize() before the first computation",
}

_IN_USE = re.compile(
    r"EADDRINUSE|address (is )?already in use|could not start gRPC server|failed to add port to server"
    r"|no address added out of total",
    re.IGNORECASE,
)
_LISTEN = "0A"


def crash_stack(lines: Sequence[str]) -> str | None:
    """Return the fatal error and the crashed thread's calls, innermost first, or None.

    lines: The last lines of the worker's log.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not starts:
        return None
    after = iter(lines[starts[-1] :])
    found = [next(after)]
    for line in after:
        if line.startswith("Current thread "):
            found.append(line)
            break
    for line in after:
        if not line.startswith("  ") or _OURS in line or len(found) == _FRAMES + 2:
            break
        found.append(line)
    return "\n".join(found)


def printed_traceback(lines: Sequence[str]) -> tuple[str, str] | None:
    """Return (exception line, traceback) from the end of a log, or None.

    Return None if the program continued after its last exception. If a launcher such as torchrun failed, return the
    exception of the failed rank.
    """
    plain = [_MARK.sub("", line) for line in lines]
    found: list[tuple[str, int, int]] = []
    for start in (number for number, line in enumerate(plain) if _TRACEBACK in line):
        for number in range(start + 1, len(plain)):
            if plain[number] and not plain[number].startswith((" ", "\t", *_FRAMES_OF_RICH)):
                if (exception := _EXCEPTION.match(plain[number])) is not None:
                    found.append((exception[1], start, number))
                break
    if not found:
        return None
    is_launcher = found[-1][0].rpartition(".")[2] in _LAUNCHERS
    if not is_launcher and sum(bool(line.strip()) for line in plain[found[-1][2] + 1 :]) > _MOST_BEHIND:
        return None  # not the cause, because the program continued after this exception
    causes = [one for one in found if one[0].rpartition(".")[2] not in _LAUNCHERS]
    # An exception about a lost peer is a consequence, even if it comes before its cause in the log.
    causes = [one for one in causes if not LOST_PEER.search(plain[one[2]])] or causes
    _, start, end = causes[0 if is_launcher else -1] if causes else found[-1]
    return plain[end].strip(), "\n".join(plain[start : end + 1])


def stalled_text(path: Path) -> str | None:
    """Return a sentence on collectives that had not completed, or None.

    path: The file that `paceline.collectives.liveness` has written.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    late: dict[tuple[Any, ...], tuple[float, list[int]]] = {}
    for line in lines:
        try:
            told = json.loads(line)
            key = (told["operation"], told["name"], told["process_set"])
            entry = (float(told["time_s"]) - float(told["waited_s"]), sorted(map(int, told["missing_ranks"])))
            is_done = bool(told.get("resolved"))
        except (ValueError, TypeError, KeyError):
            continue  # skip an incomplete line, whose rank was killed while writing
        late.pop(key, None)
        if not is_done:
            late[key] = entry
    if not late:
        return None
    now = time.time()
    shown = [
        f"{operation} {name!r} has waited for rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} "
        f"for {max(0.0, now - since):.0f} s"
        for (operation, name, _), (since, missing) in list(late.items())[:_SHOWN]
    ]
    more = f"; and {len(late) - _SHOWN} more" if len(late) > _SHOWN else ""
    return f"At its end the ranks were stalled: {'; '.join(shown)}{more}."


def alone_text(job: Job, folder: RunFolder, attempt: int) -> str | None:
    """Return a warning if no worker of a completed attempt joined a process group."""
    if job.world_size < 2 or job.distributed_backend == "ps":
        return None
    found = [read_json(folder.worker_alone(attempt, rank)) for rank in range(job.world_size)]
    if not all(found):
        return None
    how = _HOW.get(str(found[0].get("library")), "")
    text = f"{job.world_size} workers, none joined a process group: each has trained alone."
    if how:
        text += " " + how.format(per_node=job.process_count_per_node, nodes=job.node_count) + "."
    return f"{text} Where it is meant, set PACELINE_SEPARATE_WORKERS=1."


def find_clash(
    launch: Launch,
    ends: Sequence[WorkerEnd],
    *,
    log_lines: Callable[[int], Sequence[str]],
    holder: Callable[[int], str | None],
) -> tuple[WorkerEnd, str] | None:
    """Return the first worker whose port was in use, and a sentence about it, or None.

    The result is also None if the script chose the port itself, or if the job has no launcher.

    log_lines: Returns the last few hundred lines of a rank's log.
    holder: Returns the program that listens on a port now, or None if no program is found.
    """
    if not launch.job.has_launcher:
        return None
    for end in sorted((end for end in ends if end.failed), key=lambda end: (end.failed_at, end.rank)):
        if not _IN_USE.search(end.said):
            continue
        port = _named(launch, end.said.splitlines())
        if port is None:
            port = _named(launch, [line for line in log_lines(end.rank) if _IN_USE.search(line)])
        if port is None:
            # Python's OSError does not name the port. So look for a port of this attempt on which another program listens.
            port = next((port for port in launch.ports if holder(port)), None)
        if port is not None:
            return end, _text(launch, port, holder(port))
    return None


def holder_here(port: int) -> str | None:
    """Return the process that listens on this port, such as "pid 41 (nginx: master)"."""
    inodes = {
        fields[9]
        for name in ("tcp", "tcp6")
        for fields in _connections(name)
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port
    }
    if not inodes:
        return None
    links = {f"socket:[{inode}]" for inode in inodes}
    holders = (pid for pid in filter(str.isdecimal, os.listdir("/proc")) if _has_open(pid, links))
    return next((f"pid {pid} ({_command(pid)})" for pid in holders), "a process of another user's")


def _named(launch: Launch, lines: Sequence[str]) -> int | None:
    numbers = {int(number) for line in lines for number in re.findall(r"(?<![\d.])\d{1,5}(?![\d.]*\d)", line)}
    return next((port for port in launch.ports if port in numbers), None)


def _text(launch: Launch, port: int, held_by: str | None) -> str:
    index = launch.ports.index(port)
    variable = "MASTER_PORT" if index == 0 else "JAX_COORDINATOR_ADDRESS" if index == 1 else "TF_CONFIG"
    if held_by is not None:
        return f"port {port} ({variable}) was taken by {held_by} before the worker could listen on it."
    return (
        f"port {port} ({variable}) was taken when the worker wanted to listen on it, by another program or by one of "
        "the run's own processes."
    )


def _connections(name: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    except OSError:
        return []


def _has_open(pid: str, links: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}") in links:
                    return True
    return False


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"
    return f"{words[:80]}..." if len(words) > 80 else words
