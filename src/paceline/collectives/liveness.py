"""Detect ranks that died, report stalled operations, and find each rank's machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.collectives.coordinator import Coordinator, Late
from paceline.collectives.transport import Transport

_LOCAL = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

_log = logging.getLogger(__name__)
#: Environment variable with the path of the file to which `report` appends. The launcher of the ranks sets the variable.
FILE_VARIABLE = "PACELINE_STALL_FILE"
#: Least and greatest interval in seconds between two checks. The interval is a fraction of the time limit.
_SHORTEST_S, _LONGEST_S = 0.02, 1.0


@dataclass(frozen=True, kw_only=True)
class PeerPlace:
    """The machine and the process of a rank.

    Processes with the same `namespace` see each other's process ids.
    """

    host: str
    pid: int
    namespace: str
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1

    @classmethod
    def of_all(cls, transport: Transport, environ: Mapping[str, str]) -> list[PeerPlace]:
        """Return the machine and process of each rank. Every rank must call this."""
        namespace = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        launcher = None
        if environ.get("HOROVOD_SIZE") == str(transport.size) and environ.get("HOROVOD_RANK") == str(transport.rank):
            texts = [environ.get(f"HOROVOD_{name}", "") for name in _LOCAL]
            launcher = [int(text) for text in texts] if all(text.isdecimal() for text in texts) else None
        processes = transport.gather_objects((socket.gethostname(), os.getpid(), namespace, launcher))
        hosts = [host for host, *_ in processes]
        places = []
        for rank, (host, pid, where, launcher) in enumerate(processes):
            local_rank = hosts[:rank].count(host)
            # A rank's cross rank is its machine's position among the machines that have this local rank.
            peers = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
            counts = launcher or [local_rank, hosts.count(host), peers.index(host), len(peers)]
            place = cls(host=host, pid=pid, namespace=where)
            places.append(replace(place, **{name.lower(): count for name, count in zip(_LOCAL, counts, strict=True)}))
        return places


def are_equally_many(places: Sequence[PeerPlace]) -> bool:
    """Return whether every machine has the same number of ranks."""
    return len({place.local_size for place in places}) == 1


class PeerWatch:
    """A thread that calls `lost(rank, reason)` when another rank's process ends.

    For ranks on this machine, the kernel reports the end of the process (pidfd, Linux 5.3). `watched` maps descriptors
    of connections to ranks on other machines; a hang-up means that the rank has ended. The thread never reads from
    these connections. The thread calls `tick` about once a second.
    """

    def __init__(
        self,
        places: Sequence[PeerPlace],
        rank: int,
        lost: Callable[[int, str], object],
        tick: Callable[[], object],
        watched: Mapping[int, int] | None = None,
    ) -> None:
        self._lost, self._tick = lost, tick
        self._ranks: dict[int, tuple[int, PeerPlace]] = {}
        # Duplicate the descriptors of the connections. The transport may close its own descriptors at any time, and the kernel
        # would reuse their numbers. For ranks on this machine, a pidfd is used instead.
        self._links: dict[int, tuple[int, PeerPlace]] = {}
        self._end, self._stop = os.pipe()
        here = places[rank]
        for other, place in enumerate(places):
            if other != rank and here.namespace and place.namespace == here.namespace:
                with contextlib.suppress(OSError, AttributeError):
                    self._ranks[os.pidfd_open(place.pid)] = (other, place)
        local = {other for other, _ in self._ranks.values()}
        for fd, other in (watched or {}).items():
            if other not in local:
                self._links[os.dup(fd)] = (other, places[other])
        self._thread = threading.Thread(target=self._run, name="paceline-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._end, *self._ranks):
            poll.register(fd, select.POLLIN)
        for fd in self._links:
            poll.register(fd, _HANG_UP)
        try:
            while True:
                events = poll.poll(1000)
                for fd, _ in events:
                    if fd == self._end:
                        continue
                    # Stop polling this descriptor. Otherwise each later poll would report the same event again.
                    poll.unregister(fd)
                    if fd in self._ranks:
                        rank, place = self._ranks[fd]
                        self._lost(rank, f"rank {rank} (process {place.pid} on {place.host}) has died")
                    else:
                        rank, place = self._links[fd]
                        self._lost(rank, f"rank {rank} on {place.host} has died, or can't be reached any more")
                if any(fd == self._end for fd, _ in events):
                    return
                self._tick()
        finally:
            for fd in (self._end, *self._ranks, *self._links):
                os.close(fd)


class StallWatch:
    """A watch for collectives that some ranks have not submitted for long.

    `ranks` has the ranks of its process set. `warning_s=0` disables the warning, `shutdown_s=0` the shutdown.
    """

    def __init__(self, number: int, ranks: Sequence[int], warning_s: float, shutdown_s: float) -> None:
        self._number = number
        self._ranks = tuple(ranks)
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        limits = [limit for limit in (warning_s, shutdown_s) if limit]
        self._pause_s = min(max(min(limits) / 4, _SHORTEST_S), _LONGEST_S) if limits else float("inf")
        self._next_s = time.monotonic() + self._pause_s if limits else float("inf")
        self._warned_s = 0.0
        self._reported: dict[tuple[str, str], tuple[Late, float]] = {}

    def look(self, coordinator: Coordinator) -> None:
        """Warn of overdue collectives. At the shutdown limit, make all collectives fail."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._pause_s
        if self._warning_s:
            self._warn(coordinator.waiting(self._warning_s), now_s)
        if self._shutdown_s:
            late = coordinator.waiting(self._shutdown_s)
            if late:
                coordinator.end(
                    f"{self._described(late[0])} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._shutdown_s:g}), "
                    "so the ranks have stopped waiting for each other"
                )

    def _warn(self, late: Sequence[Late], now_s: float) -> None:
        keys = {operation.key for operation in late}
        for key in [key for key in self._reported if key not in keys]:
            operation, reported_s = self._reported.pop(key)
            age_s = operation.age_s + now_s - reported_s
            report(operation._replace(age_s=age_s), self._number, self._ranks, resolved=True)
        new = [operation for operation in late if operation.key not in self._reported]
        for operation in new:
            self._reported[operation.key] = (operation, now_s)
            report(operation, self._number, self._ranks)
        if new or (late and now_s - self._warned_s >= self._warning_s):
            self._warned_s = now_s
            _log.warning(
                "Some ranks wait for tensors that others have not submitted; a rank may have stopped, or the ranks "
                "may take different paths through the script.\n  %s",
                "\n  ".join(self._described(operation) for operation in late),
            )

    def _described(self, late: Late) -> str:
        missing = [str(self._ranks[rank]) for rank in late.missing]
        return (
            f"{late.key[0]} {late.key[1]!r} has waited for {late.age_s:.{0 if late.age_s > 10 else 1}f} s, "
            f"missing on rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        )


def report(
    late: Late,
    process_set: int,
    ranks: Sequence[int],
    *,
    resolved: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Append a JSON line on a stalled or `resolved` operation to the file $PACELINE_STALL_FILE."""
    # A late operation gets a line when it is late, and another line, with `"resolved": true`, when it ends.
    path = environ.get(FILE_VARIABLE, "")
    if not path:
        return
    line = json.dumps(
        {
            "time_s": time.time(),
            "operation": late.key[0],
            "name": late.key[1],
            "process_set": process_set,
            "waited_s": round(late.age_s, 3),
            "missing_ranks": [ranks[rank] for rank in late.missing],
            "submitted_ranks": [ranks[rank] for rank in late.submitted],
            "resolved": resolved,
        }
    )
    try:
        # Write the line with a single call, because other processes may append to the same file.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, line.encode() + b"\n")
        finally:
            os.close(file)
    except OSError as error:
        _log.warning("a stalled operation can't be written to %s=%r: %s", FILE_VARIABLE, path, error)
