"""The process sets of an engine: creation, background loops, removal and shutdown."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.collectives import world
from paceline.collectives.background_loop import BackgroundLoop
from paceline.collectives.errors import ArgumentError, ShutDownError
from paceline.collectives.liveness import PeerWatch
from paceline.collectives.request import Arrivals, Request
from paceline.collectives.transport import Alone

if TYPE_CHECKING:
    import torch

    from paceline.collectives.device import DeviceGroup
    from paceline.collectives.settings import EngineSettings
    from paceline.collectives.transport import Transport

_DYING_S, _LET_GO_S = 0.3, 3.0


class ProcessSets:
    """The process sets (groups of ranks) of this rank. Set 0 has all ranks."""

    def __init__(self, joined: world.RankedWorld, settings: EngineSettings) -> None:
        self._world, self._settings = joined, settings
        self._rank, self._size = joined.transport.rank, joined.transport.size
        #: Id of a process set -> the set's ranks.
        self.ranks: dict[int, tuple[int, ...]] = {0: tuple(range(self._size))}
        #: Id of a process set that includes this rank -> the background loop of the set.
        self.loops: dict[int, BackgroundLoop] = {}
        self._numbers = itertools.count(1)
        #: Functions that are called after each operation, each with a flag: whether it needs arrival times.
        self._observers: list[tuple[Callable[..., object], bool]] = []
        self._device_groups: dict[int, DeviceGroup] = {}
        #: Whether this rank has begun any operation.
        self.is_used = False
        #: Reason of the engine's failure, or None.
        self._failure: str | None = None
        self._start_loop(joined.transport, 0)
        watched = joined.transport.watched()
        self._peer_watch = PeerWatch(joined.places, self._rank, self._peer_lost, self._end_overdue, watched)

    def members(self, number: int) -> tuple[int, ...]:
        """Return the world ranks of the process set with this number."""
        if number not in self.ranks:
            raise ArgumentError(f"there is no process set {number}; there are {sorted(self.ranks)}.")
        return self.ranks[number]

    def loop(self, number: int) -> BackgroundLoop:
        """Return the background loop that runs a process set's collectives."""
        loop = self.loops.get(number)
        self.is_used = True
        if loop is None:
            raise ArgumentError(
                f"rank {self._rank} is not a member of process set {number}: {list(self.members(number))}."
            )
        return loop

    def device_group(self, number: int, place: torch.device) -> DeviceGroup:
        """Return the process set's NCCL group on the device `place`."""
        from paceline.collectives import device

        if number not in self._device_groups:
            # Create the NCCL group at the set's first operation on GPUs, which all ranks of the set begin together.
            made = device.join(os.environ, self._world.generation, number, self.ranks[number], self._rank, place)
            self._device_groups[number] = made
        return self._device_groups[number]

    # --- creation and removal of sets, by the thread of set 0's loop, in the same order on all ranks

    def make(self, members: tuple[int, ...]) -> int:
        """Create a process set of these sorted ranks. Return its number."""
        if not members or len(set(members)) < len(members) or members[0] < 0 or members[-1] >= self._size:
            raise ArgumentError(
                f"a process set of ranks {list(members)}: name each rank once, from 0 to {self._size - 1}, and at least one."
            )
        same = [number for number, others in self.ranks.items() if others == members]
        if same:
            raise ArgumentError(f"ranks {list(members)} are process set {same[0]} already. Use that one.")
        # All ranks change process sets in the same order, so they get the same number. The loop of all ranks holds
        # _turn during this call, so no other thread uses its transport, which this call splits.
        number = next(self._numbers)
        transport = self.loops[0].transport.split(members, number) if len(members) > 1 else Alone()
        self.ranks[number] = members
        if self._rank in members and transport is not None:
            loop = self._start_loop(transport, number)
            # `lost` may run in another thread. It sets `_failure`, and then fails all loops that it finds. If it has not found
            # this new loop, `_failure` is already set here.
            if self._failure is not None:
                _fail(loop, self._failure)
        return number

    def drop(self, number: int) -> bool:
        """Remove a process set (a group of ranks). Return whether it existed."""
        if self.ranks.pop(number, None) is None:
            return False
        loop = self.loops.pop(number, None)
        if loop is not None:
            loop.leave()
            loop.join()
        if (group := self._device_groups.pop(number, None)) is not None:
            group.close(broken=False)
        return True

    def _start_loop(self, transport: Transport, number: int) -> BackgroundLoop:
        loop = BackgroundLoop(transport, self.ranks[number], number, self._settings, self.lost)
        self.loops[number] = loop
        self._let_observe(loop)
        return loop

    def observe(self, callback: Callable[..., object], *, arrivals: bool) -> None:
        self._change_observers([*self._observers, (callback, arrivals)])

    def ignore(self, callback: Callable[..., object]) -> None:
        self._change_observers([known for known in self._observers if known[0] != callback])

    def _change_observers(self, observers: list[tuple[Callable[..., object], bool]]) -> None:
        self._observers = observers
        for loop in list(self.loops.values()):
            self._let_observe(loop)

    def _let_observe(self, loop: BackgroundLoop) -> None:
        observers = self._observers

        def observed(
            request: Request, submitted_s: float, agreed_s: float | None, done_s: float, arrivals: Arrivals
        ) -> None:
            for callback, wants_arrivals in observers:
                callback(request, submitted_s, agreed_s, done_s, *((arrivals,) if wants_arrivals else ()))

        # Without observers set None, so that the loop need not call a function after each operation.
        loop.negotiation.observer = observed if observers else None
        if any(wants_arrivals for _, wants_arrivals in observers):
            loop.negotiation.note_arrivals()

    def lost(self, reason: str, lost_rank: int = -1) -> None:
        """Make all collectives of all process sets fail, now and later."""
        # Any thread may call this method, but only without holding a lock other than a loop's _claim.
        self._failure = self._failure or reason
        if lost_rank >= 0 and not self._world.lost_ranks:
            self._world.lost_ranks.add(lost_rank)
        for loop in list(self.loops.values()):
            _fail(loop, reason)

    def forsake(self) -> None:
        """Make all collectives fail in a forked child process."""
        error = ShutDownError(
            f"process {os.getpid()} was forked from rank {self._rank}, which alone can take part in its operations. "
            "Let a DataLoader's workers, and what multiprocessing starts, leave them to the process that started it."
        )
        for loop in self.loops.values():
            loop.forsake(error)

    def stop(self) -> None:
        """Leave all process sets, and wait until the other ranks know it."""
        if self._failure is not None and not self._world.lost_ranks:
            # A dying process closes its connections before the kernel reports its death. Wait for such a report.
            time.sleep(_DYING_S)
        # Stop watching the other ranks: their processes may now end without a failure.
        self._peer_watch.close()
        loops = [self.loops[number] for number in sorted(self.loops, reverse=True)]
        if self._failure is not None:
            if self._world.name == world.GLOO:
                # The running operations end when the other ranks close their connections. Wait for the threads of these
                # operations, because a Gloo thread that frees a tensor after the interpreter's end would abort the process.
                for loop in loops:
                    loop.join(_LET_GO_S)
            # With MPI, a thread may be stuck in a call forever. Daemon threads don't prevent the exit, and MPI is not finalized.
            self._close_device_groups(broken=True)
            return
        # Let all loops leave before waiting for the first, so that all process sets end at the same time.
        for loop in loops:
            loop.leave()
        ended = [loop.join() for loop in loops]
        for loop, has_ended in zip(loops, ended, strict=True):
            if not has_ended:
                loop.transport.abandon("another rank has not heard that this one shuts down")
        self._close_device_groups(broken=not all(ended))

    def _peer_lost(self, rank: int, reason: str) -> None:
        # After all ranks have learned that the engine ends, a rank's process may exit at any time without a failure.
        if not self.loops[0].negotiation.has_heard_end:
            self.lost(reason, rank)

    def _end_overdue(self) -> None:
        limit_s = self._settings.stall_shutdown_s
        if not limit_s or self._failure is not None:
            return
        for loop in list(self.loops.values()):
            overdue = loop.overdue(limit_s)
            if overdue is not None:
                self.lost(f"{overdue} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={limit_s:g})")
                return

    def _close_device_groups(self, *, broken: bool) -> None:
        for group in self._device_groups.values():
            group.close(broken=broken)
        self._device_groups.clear()


def _fail(loop: BackgroundLoop, reason: str) -> None:
    loop.fail(ShutDownError(f"{reason}. Nothing in flight can be completed; see that rank's log for the cause."))
    # Close the transport after `fail`. Otherwise a waiting caller would get an error of the transport instead of the reason.
    loop.transport.abandon(reason)
