"""The lane on which the collectives of one process group run: one after the other, in the order of their calls.

    all_reduce(async_op=True)  ->  the lane's thread, while the caller computes
    all_reduce()               ->  the caller's own thread where the lane is free: no change of threads, which
                                   would take longer than a small message

Each collective has two parts. First the ranks meet: a non-blocking reduction of a few bytes, looked at between short
sleeps. It shows that all of them are there, and that they have called the same thing. Only then comes the blocking
MPI call, which now moves data and hardly waits: a thread that waits inside of MPI takes a core away from the
backward pass for as long as the slowest rank needs. Because nothing waits inside of MPI, time limits and Ctrl-C work.
"""

from __future__ import annotations

import functools
import threading
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.collectives import mpi, recorder
from paceline.collectives.errors import CollectivesError, MismatchError
from paceline.system import step_clock
from paceline.system.collective_state import entry_text
from paceline.torch_mpi.work import wait_until

#: How often a thread looks for the other ranks before it sleeps between two looks: a caller that can do nothing else
#: looks longer than the thread beside a backward pass. Both are guesses.
_LOOKS_INLINE = 2000
_LOOKS_ASIDE = 100


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective, ready to run.

    text: what has to be the same on every rank, as a sentence for the error message.
    run: is given the communicator once all ranks are there; None for a barrier.
    outputs: what `Work.result` and the future's value hold.
    """

    text: str
    run: Callable[[Any], None] | None
    outputs: Any


class Lane:
    """Runs the collectives of a group; every rank of `comm` has to make its own, in the same order.

    timeout_s: how long a collective waits for the other ranks, unless the call says otherwise. name, ranks: the group's, for
    whoever asks what a rank waits for; ranks in the world, as `ranks_text` writes them.
    """

    def __init__(self, comm: Any, timeout_s: float, name: str = "mpi", ranks: str = "") -> None:
        self.timeout_s = timeout_s
        self.name, self.ranks = name, ranks
        #: How many collectives it has run. Whoever has the turn changes it.
        self._count = 0
        self.size: int = comm.size
        self._thread = mpi.CommThread(comm, "paceline-torch")
        self.comm = self._thread.comm
        #: The lane's thread, once it has run a call.
        self._worker: int | None = None
        #: Held while a call runs, by the lane's thread or a caller's.
        self._turn = threading.Lock()
        #: Guards `_waiting`: how many calls are queued for the lane's thread or run there. Whoever holds it only tries
        #: `_turn`, and never waits for it.
        self._count_lock = threading.Lock()
        self._waiting = 0
        self._broken: str | None = None

    @property
    def is_busy(self) -> bool:
        return self._waiting > 0 or self._turn.locked()

    def start(self, call: Call, timeout_s: float | None = None) -> Future[Any]:
        """The future of the call's outputs; the call is run by the lane's thread."""
        if threading.get_ident() == self._worker:
            # A callback of a future has called it, as PowerSGD's hook does: waiting for this thread would never end.
            future: Future[Any] = Future()
            try:
                future.set_result(self.finish(call, timeout_s))
            except BaseException as error:
                future.set_exception(error)
            return future
        # Under the lock, so that the count can't go down before it has gone up; after `submit`, which refuses a closed lane.
        with self._count_lock:
            future = self._thread.submit(lambda _: self._run_aside(call, timeout_s))
            self._waiting += 1
        return future

    def finish(self, call: Call, timeout_s: float | None = None) -> Any:
        """The call's outputs; it is run here and now if nothing is before it."""
        if threading.get_ident() == self._worker:
            # A callback again. Its call has given the turn back, but a caller's thread may have it by now.
            with self._turn:
                return self._run(call, timeout_s, _LOOKS_ASIDE)
        # Here and now only if nothing is queued: a call that overtook a queued one would meet another one on other ranks.
        with self._count_lock:
            free = self._waiting == 0 and self._turn.acquire(blocking=False)
        if not free:
            return self.start(call, timeout_s).result()
        try:
            return self._run(call, timeout_s, _LOOKS_INLINE)
        finally:
            self._turn.release()

    def check(self) -> None:
        """Raise if the lane can't be used any more."""
        if self._broken:
            raise CollectivesError(self._broken)

    def break_off(self, why: str) -> None:
        """Let every further call fail, and MPI be left as it is when the process ends."""
        if not self._broken:
            self._broken = why
        mpi.abandon()

    def close(self) -> None:
        """Run what was started, then end the thread and free the communicator."""
        self._thread.close()

    def _run_aside(self, call: Call, timeout_s: float | None) -> Any:
        self._worker = threading.get_ident()
        try:
            with self._turn:
                return self._run(call, timeout_s, _LOOKS_ASIDE)
        finally:
            # Before the future is done: a caller that has waited for it finds the lane free.
            with self._count_lock:
                self._waiting -= 1

    def _run(self, call: Call, timeout_s: float | None, looks: int) -> Any:
        self.check()
        self._count += 1
        place = recorder.begin(_told(self.name, self.ranks, call.text), self._count) if self.size > 1 else -1
        clock = step_clock.clock()
        since = 0.0 if clock is None else clock.begin(step_clock.WAIT)
        try:
            if self.size > 1:
                self._meet(call.text, self.timeout_s if timeout_s is None else timeout_s, looks)
            if call.run is not None:
                self._move(call)
        finally:
            recorder.end(place)
            if clock is not None:
                clock.end(step_clock.WAIT, since)
        return call.outputs

    def _move(self, call: Call) -> None:
        from mpi4py import MPI

        assert call.run is not None
        try:
            call.run(self.comm)
        except MPI.Exception as error:
            self.break_off(f"this process group can't be used any more: MPI failed in {call.text}: {error}.")
            raise CollectivesError(f"MPI failed in {call.text}: {error}.") from error

    def _meet(self, text: str, timeout_s: float, looks: int) -> None:
        from mpi4py import MPI

        # The same on every rank exactly if the largest code is also the smallest.
        code = zlib.crc32(text.encode())
        extremes = array("q", (code, -code))
        request = self.comm.Iallreduce(MPI.IN_PLACE, [extremes, 2, MPI.INT64_T], op=MPI.MAX)
        try:
            wait_until(
                request.Test,
                timeout_s,
                f"for the other ranks in {text}. A rank has not called it, or is still busy. "
                "Look at the other ranks' logs, or give init_process_group a longer timeout.",
                looks=looks,
            )
        except BaseException:
            # The request stays open, so the ranks no longer agree on what comes next.
            self.break_off(f"this process group can't be used any more: a rank stopped waiting in {text}.")
            _ABANDONED.append((request, extremes))
            raise
        if extremes[0] != -extremes[1]:
            texts = self.comm.allgather(text)
            said = "\n".join(f"  rank {rank} of the group: {what}" for rank, what in enumerate(texts))
            raise MismatchError(
                f"the ranks have called different collectives, or with different tensors:\n{said}\n"
                "Every rank has to make the same calls in the same order."
            )


#: Requests that were given up, kept to the end of the process: MPI may still write to their memory.
_ABANDONED: list[Any] = []


@functools.lru_cache(maxsize=1024)
def _told(name: str, ranks: str, text: str) -> str:
    """A call's text as a board has it: "all_reduce SUM(12 of float32)" is its kind and its shape."""
    kind, _, shape = text.partition("(")
    return entry_text(name, kind, "", shape.removesuffix(")"), 0, ranks)
