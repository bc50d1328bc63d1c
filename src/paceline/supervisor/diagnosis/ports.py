"""Workers that failed because a port of theirs was another program's.

A port is free when it is leased, and may be taken before a worker listens on it: nobody can hold a port for another
process. What frameworks say then, with torch 2.13 and TensorFlow 2.21 (whose gRPC JAX has too):

    torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address.
        port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
    Failed to add port to server: No address added out of total 1 resolved for '0.0.0.0:29502'
    tensorflow...UnknownError: Could not start gRPC server                  (the port is in the log alone)
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.job.plan import Launch
from paceline.supervisor.diagnosis.diagnose import WorkerEnd

_IN_USE = re.compile(
    r"EADDRINUSE|address (is )?already in use|could not start gRPC server|failed to add port to server"
    r"|no address added out of total",
    re.IGNORECASE,
)
_LISTEN = "0A"


def find_clash(
    launch: Launch,
    ends: Sequence[WorkerEnd],
    *,
    log_lines: Callable[[int], Sequence[str]],
    holder: Callable[[int], str | None],
) -> tuple[WorkerEnd, str] | None:
    """The first worker that failed because one of the launch's ports was taken, and a sentence on it; None where none did.

    log_lines: the last lines of a rank's log, some hundred. holder: who listens on a port now that the run's workers
        have ended, where that can be seen.
    A script that fails with ports of its own, which a next attempt would ask for again, is not meant; nor one without a
    launcher, which was told none of these.
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
            # An OSError of Python's names no port: it was one of ours if somebody else is there.
            port = next((port for port in launch.ports if holder(port)), None)
        if port is not None:
            return end, _text(launch, port, holder(port))
    return None


def holder_here(port: int) -> str | None:
    """The process that listens on this port here, such as "pid 41 (nginx: master)"; None where none does, or none can be seen."""
    inodes = {
        fields[9]
        for name in ("tcp", "tcp6")
        for fields in _connections(name)
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port
    }
    if not inodes:
        return None
    links = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if _has_open(pid, links):
            return f"pid {pid} ({_command(pid)})"
    return "a process of another user's"


def _named(launch: Launch, lines: Sequence[str]) -> int | None:
    """The first port of the launch's that these lines name."""
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
    with contextlib.suppress(OSError):  # of another user's, or gone
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
