"""The communication thread of a process group, which runs its collectives in the order of their calls.

    all_reduce(async_op=True)  ->  the communication thread, while the caller computes
    all_reduce()               ->  the caller's own thread if the communication thread is idle: a thread switch
                                   takes longer than a small message

Each collective has two parts. First the ranks meet in a non-blocking reduction of a few bytes, which each rank polls
with short sleeps. The reduction shows that all ranks have made the same call. Then a blocking MPI call moves the data.
It hardly waits, because all ranks have arrived. A thread that waited inside MPI for the slowest rank would take a core
from the backward pass, and ignore timeouts and Ctrl-C.
"""

from __future__ import annotations

import functools
import threading
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.collectives import mpi, recorder
from paceline.collectives.errors import CollectivesError, MismatchError
from paceline.system import step_clock
from paceline.system.collective_state import entry_text
from paceline.torch_mpi.work import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

#: Number of times that a thread polls MPI before it sleeps between polls. `_LOOKS_INLINE` is for a caller that waits for the
#: result, `_LOOKS_ASIDE` for the communication thread, which runs beside a backward pass. Both numbers are guesses.
_LOOKS_INLINE = 2000
_LOOKS_ASIDE = 100


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective call, ready to run.

    Attributes:
        text: A description that must be the same on every rank, also used in error messages.
        run: Called with the communicator once all ranks have made the same call. None for a barrier.
        outputs: The results of `Work.result` and of the future.
    """

    text: str
    run: Callable[[MPI.Comm], None] | None
    outputs: object


class Lane:
    """The queue of a group's collectives, with the thread that runs them.

    All ranks must create their queues in the same order. A collective waits up to `timeout_s` seconds for the other
    ranks, unless its call sets another limit. `name` and `ranks` identify the group in status reports. `ranks` is a
    text of world ranks, as `ranks_text` returns it.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float, name: str = "mpi", ranks: str = "") -> None:
        self.timeout_s = timeout_s
        self.name, self.ranks = name, ranks
        #: Number of collective calls that have run. Only the thread that holds the lock `_turn` changes it.
        self._count = 0
        self.size: int = comm.size
        self._thread = mpi.CommThread(comm, "paceline-torch")
        self.comm = self._thread.comm
        #: Identifier of the communication thread. It is None before that thread has run a call.
        self._worker: int | None = None
        #: Lock for running a call. The communication thread or a caller's thread holds it.
        self._turn = threading.Lock()
        #: Lock for `_waiting`, the number of calls that the communication thread has queued or runs. A thread that holds this
        #: lock may try to acquire `_turn`, but must never wait for it.
        self._count_lock = threading.Lock()
        self._waiting = 0
        self._broken: str | None = None

    @property
    def is_busy(self) -> bool:
        return self._waiting > 0 or self._turn.locked()

    def start(self, call: Call, timeout_s: float | None = None) -> Future[object]:
        """Queue the call. Return the future of its outputs."""
        if threading.get_ident() == self._worker:
            # This is the communication thread, in a future's callback that called `start`. It must not wait for itself.
            future: Future[object] = Future()
            try:
                future.set_result(self.finish(call, timeout_s))
            except BaseException as error:
                future.set_exception(error)
            return future
        # Hold the lock until the new call is counted: otherwise the call could end first. `submit` may refuse the call.
        with self._count_lock:
            future = self._thread.submit(lambda _: self._run_aside(call, timeout_s))
            self._waiting += 1
        return future

    def finish(self, call: Call, timeout_s: float | None = None) -> object:
        """Run the call, in this thread if the queue is empty. Return its outputs."""
        if threading.get_ident() == self._worker:
            # This is the communication thread, in a future's callback that called `finish`. Another may hold `_turn`.
            with self._turn:
                return self._run(call, timeout_s, _LOOKS_ASIDE)
        # Run the call here only if no call is queued. Otherwise this rank would make the calls in another order than other ranks.
        with self._count_lock:
            free = self._waiting == 0 and self._turn.acquire(blocking=False)
        if not free:
            return self.start(call, timeout_s).result()
        try:
            return self._run(call, timeout_s, _LOOKS_INLINE)
        finally:
            self._turn.release()

    def check(self) -> None:
        """Raise CollectivesError if an earlier failure made the queue unusable."""
        if self._broken:
            raise CollectivesError(self._broken)

    def break_off(self, why: str) -> None:
        """Make all later calls fail with this reason. Skip MPI's finalization at exit."""
        if not self._broken:
            self._broken = why
        mpi.abandon()

    def close(self) -> None:
        """Run the queued calls, end the thread and free the communicator."""
        self._thread.close()

    def _run_aside(self, call: Call, timeout_s: float | None) -> object:
        self._worker = threading.get_ident()
        try:
            with self._turn:
                return self._run(call, timeout_s, _LOOKS_ASIDE)
        finally:
            # Decrement before the future is done. A caller that has waited for the future may then run its next call itself.
            with self._count_lock:
                self._waiting -= 1

    def _run(self, call: Call, timeout_s: float | None, looks: int) -> object:
        self.check()
        self._count += 1
        place = recorder.begin(_board_text(self.name, self.ranks, call.text), self._count) if self.size > 1 else -1
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

        # Compare checksums: all ranks have an equal text if the largest checksum equals the smallest one.
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
            # MPI has not finished this reduction, so the ranks no longer agree on their next call.
            self.break_off(f"this process group can't be used any more: a rank stopped waiting in {text}.")
            _ABANDONED.append((request, extremes))
            raise
        if extremes[0] != -extremes[1]:
            texts = self.comm.allgather(text)
            lines = "\n".join(f"  rank {rank} of the group: {line}" for rank, line in enumerate(texts))
            raise MismatchError(
                f"the ranks have called different collectives, or with different tensors:\n{lines}\n"
                "Every rank has to make the same calls in the same order."
            )


#: Abandoned requests. Keep them until the process ends, because MPI may still write to their memory.
_ABANDONED: list[tuple[MPI.Request, array[int]]] = []


@functools.lru_cache(maxsize=1024)
def _board_text(name: str, ranks: str, text: str) -> str:
    kind, _, shape = text.partition("(")
    return entry_text(name, kind, "", shape.removesuffix(")"), 0, ranks)
