"""The places of the ranks, and a watch over the processes of those that can be seen from here."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.collectives.transport import Transport

_LOCAL = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


@dataclass(frozen=True, kw_only=True)
class PeerPlace:
    """A rank's process. namespace: processes see each other's ids if it is the same."""

    host: str
    pid: int
    namespace: str
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1

    @classmethod
    def of_all(cls, transport: Transport | None, environ: Mapping[str, str]) -> list[PeerPlace]:
        """The place of each rank. The launcher's word counts where it has one for this world, else the host names."""
        namespace = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        told = None
        rank, size = (0, 1) if transport is None else (transport.rank, transport.size)
        if environ.get("HOROVOD_SIZE") == str(size) and environ.get("HOROVOD_RANK") == str(rank):
            texts = [environ.get(f"HOROVOD_{name}", "") for name in _LOCAL]
            told = [int(text) for text in texts] if all(text.isdigit() for text in texts) else None
        own = (socket.gethostname(), os.getpid(), namespace, told)
        all_told = [own] if transport is None else transport.gather_objects(own)
        hosts = [host for host, *_ in all_told]
        places = []
        for rank, (host, pid, where, told) in enumerate(all_told):
            local_rank = hosts[:rank].count(host)
            # The hosts that have as many ranks, in the order of their first ranks.
            peers = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
            counts = told or [local_rank, hosts.count(host), peers.index(host), len(peers)]
            places.append(
                cls(
                    host=host,
                    pid=pid,
                    namespace=where,
                    local_rank=counts[0],
                    local_size=counts[1],
                    cross_rank=counts[2],
                    cross_size=counts[3],
                )
            )
        return places


def are_equally_many(places: Sequence[PeerPlace]) -> bool:
    """True if every machine has as many ranks as each other one."""
    return len({place.local_size for place in places}) == 1


class PeerWatch:
    """Watches the processes of the ranks on this machine; calls `lost(rank, reason)` when one is gone, however it ended.

    The kernel tells (pidfd, Linux 5.3): nothing is polled. `tick` is called about once a second.
    watched: file descriptor -> rank, of connections that hang up when that rank is gone; they are only looked at.
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
        # Copies, which stay open until this thread is done with them: the transport closes its own at any time, and the kernel
        # gives their numbers to other files. Processes of this machine are watched by their pidfd, which is surer.
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
        """Stop watching."""
        # Hangs up the other end of the pipe, for which the thread polls.
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
                    # It would be ready at each poll from now on.
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
