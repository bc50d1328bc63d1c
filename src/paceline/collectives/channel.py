"""A process set at work: one thread, one communicator, one coordinator.

The thread tells the set's first rank what was submitted, hears what all ranks have asked for, and does it. A rank that
has nothing in flight sleeps: nothing can be ready without it. The first rank alone looks up a few times a second, to
notice ranks that wait for it in vain.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.collectives.coordinator import Coordinator, Message, Response
from paceline.collectives.errors import ArgumentError, CollectivesError, MismatchError, ShutDownError
from paceline.collectives.handle import Handle
from paceline.collectives.perform import Performer
from paceline.collectives.request import JOIN, Agreement, Request
from paceline.collectives.settings import Settings

_log = logging.getLogger(__name__)

#: Looking for news without a pause: as long as a caller waits for a result, and while the process computes.
_SPIN_WAITING_S = 0.002
_SPIN_COMPUTING_S = 0.00005
_FIRST_PAUSE_S = 0.00005
#: The pause of a rank that has waited for a second or more, and of an idle coordinator.
_LONG_PAUSE_S = 0.005
_IDLE_PAUSE_S = 0.25
_LEAVE_S = 30.0
_ENDED = (
    "The engine has been shut down: {reason}. Operations in flight, and later ones, fail on every rank; "
    "see the log of that rank for the cause."
)


@dataclass
class Task:
    """An operation that this rank has submitted. arrays, outs: contiguous; an out of None is made when it is filled."""

    request: Request
    arrays: Sequence[Any]
    outs: Sequence[Any]
    handle: Handle
    finish: Callable[[Any], Any] | None = None
    submitted_s: float = 0.0


class Channel:
    """The engine's part for one process set.

    comm: of the set's ranks alone, or None for a set of one; tag: tells its messages from those of an engine that was
    shut down. perform: is called with a task's agreement for what changes the engine itself.
    """

    def __init__(self, comm: Any, ranks: Sequence[int], tag: int, settings: Settings, observer: Any = None) -> None:
        self.comm = comm
        self.ranks = tuple(ranks)
        self.rank = 0 if comm is None else comm.rank
        self.size = len(ranks)
        self.waiting: list[int] = []
        self.ended: ShutDownError | None = None
        self._tag = tag
        self._settings = settings
        self._coordinator = Coordinator(self.size, settings.cache_capacity) if self.rank == 0 else None
        self._performer = Performer(comm, settings.fusion_bytes)
        self._observer = observer
        self._wake = threading.Condition(threading.Lock())
        self._asleep = False
        self._news: list[Task] = []
        self._pending: dict[tuple[str, str], Task] = {}
        self._leaving = False
        self._left = False
        self._epoch = 0
        self._numbers: dict[tuple[str, str], tuple[int, Request]] = {}
        self._agreements: dict[int, Agreement] = {}
        self._sends: list[tuple[Any, bytes]] = []
        self._doing: tuple[float, str] | None = None
        self._warned_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"paceline-set-{tag}", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> Handle:
        """The task's handle, once it is queued.

        Raises:
            ArgumentError: an operation of this kind and name is in flight.
        """
        key = task.request.key
        task.submitted_s = time.monotonic()
        with self._wake:
            if self.ended is not None:
                task.handle._finish(error=self.ended)
                return task.handle
            if key in self._pending:
                raise ArgumentError(
                    f"{key[0]} {key[1]!r} is in flight already. Wait for it before the name is used again, "
                    "or give each operation a name of its own."
                )
            self._pending[key] = task
            self._news.append(task)
            if self._asleep:
                self._wake.notify()
        return task.handle

    def leave(self) -> None:
        """Tell the others that this rank shuts down; `join` waits until they have heard."""
        with self._wake:
            self._leaving = True
            self._wake.notify()

    def join(self, timeout_s: float = _LEAVE_S) -> bool:
        """Whether the thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail(self, error: ShutDownError) -> None:
        """End everything in flight with this error, and refuse what comes later. From any thread; the first one wins."""
        with self._wake:
            if self.ended is None:
                self.ended = error
            tasks = list(self._pending.values())
            self._pending.clear()
            self._news.clear()
            self._wake.notify()
        for task in tasks:
            task.handle._finish(error=self.ended)

    def overdue(self, limit_s: float) -> str | None:
        """What has been in flight, or in the middle of being done, for longer than this."""
        now_s = time.monotonic()
        doing = self._doing
        if doing is not None and now_s - doing[0] > limit_s:
            return f"{doing[1]} has not ended within {limit_s:g} s: another rank has stopped in the middle of it"
        with self._wake:
            tasks = [task for task in self._pending.values() if task.request.kind != JOIN]
        for task in tasks:
            if now_s - task.submitted_s > limit_s:
                return f"{task.request.kind} {task.request.name!r} has waited for other ranks for {limit_s:g} s"
        return None

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            _log.debug("the engine's thread has failed", exc_info=True)
            self.fail(ShutDownError(_ENDED.format(reason=f"communication has failed ({error!r})")))

    def _serve(self) -> None:
        quiet_since_s = 0.0
        pause_s = _FIRST_PAUSE_S
        while self.ended is None:
            news: list[Task] = []
            if self._news or (self._leaving and not self._left):
                with self._wake:
                    news, self._news = self._news, []
                self._announce(news)
            if self._exchange() or news:
                quiet_since_s, pause_s = 0.0, _FIRST_PAUSE_S
                continue
            now_s = time.monotonic()
            quiet_since_s = quiet_since_s or now_s
            quiet_s = now_s - quiet_since_s
            busy = bool(self._pending) or self._leaving
            if busy and self.size > 1 and quiet_s < (_SPIN_WAITING_S if self.waiting else _SPIN_COMPUTING_S):
                os.sched_yield()
                continue
            if self._coordinator is not None:
                self._look_for_stalls(now_s)
            if busy and self.size > 1:
                pause_s = min(pause_s * 1.5, self._settings.cycle_s if quiet_s < 1.0 else _LONG_PAUSE_S)
                self._sleep(pause_s)
            else:
                self._sleep(_IDLE_PAUSE_S if self._coordinator is not None and self.size > 1 else None)
        self._drain()

    def _sleep(self, pause_s: float | None) -> None:
        with self._wake:
            if not self._news and self.ended is None and not (self._leaving and not self._left):
                self._asleep = True
                self._wake.wait(pause_s)
                self._asleep = False

    def _announce(self, news: Sequence[Task]) -> None:
        slots, requests = [], []
        for task in news:
            request = task.request
            known = self._numbers.get(request.key)
            if known is not None and known[1] == request:
                slots.append(known[0])
            else:
                requests.append(request)
        message = Message(self._epoch, tuple(slots), tuple(requests), self._leaving)
        self._left = self._leaving
        if self._coordinator is not None:
            self._coordinator.receive(0, message)
        else:
            self._send(tuple(message), 0)

    def _exchange(self) -> bool:
        """Whether there was anything to hear."""
        if self._coordinator is None:
            content = self._receive()
            if content is None:
                return False
            epoch, slots, agreements, end = content[1]
            self._work_off(Response(epoch, slots, agreements, end))
            return True
        while self.size > 1 and (content := self._receive()) is not None:
            self._coordinator.receive(content[0], Message(*content[1]))
        response = self._coordinator.respond()
        if response is None:
            return False
        if self.size > 1:
            data = pickle.dumps(tuple(response), pickle.HIGHEST_PROTOCOL)
            for rank in range(1, self.size):
                self._send_bytes(data, rank)
        self._work_off(response)
        return True

    def _work_off(self, response: Response) -> None:
        todo = [self._agreements[slot] for slot in response.slots]
        if response.epoch != self._epoch:
            self._numbers, self._agreements, self._epoch = {}, {}, response.epoch
        todo += response.agreements
        ready: list[tuple[Task, Agreement]] = []
        for agreement in todo:
            key = agreement.request.key
            with self._wake:
                task = self._pending.get(key)
            if task is None:
                # This rank has joined (or failed: then nothing that it does matters any more).
                if agreement.error is None and self.ended is None:
                    ready.append((self._stand_in(agreement.request), agreement))
                continue
            if agreement.error is not None:
                self._complete(task, error=MismatchError(agreement.error))
                continue
            if agreement.slot >= 0:
                self._agreements[agreement.slot] = agreement
                self._numbers[key] = (agreement.slot, task.request)
            ready.append((task, agreement))
        if ready:
            self._doing = (time.monotonic(), f"{ready[0][1].request.kind} {ready[0][1].request.name!r}")
            self._performer.perform(ready, self._complete)
            self._doing = None
        if response.end is not None:
            self.fail(ShutDownError(_ENDED.format(reason=response.end)))

    def _stand_in(self, request: Request) -> Task:
        """Zeros, for an operation that this rank takes part in after it has joined."""
        import numpy

        dtypes = ["uint16" if dtype == "bfloat16" else dtype for dtype in request.dtypes]
        zeros = [numpy.zeros(shape, dtype) for shape, dtype in zip(request.shapes, dtypes, strict=True)]
        return Task(request, zeros, zeros, Handle(request.name, self.waiting))

    def _complete(self, task: Task, result: Any = None, error: BaseException | None = None) -> None:
        with self._wake:
            if self._pending.get(task.request.key) is task:
                del self._pending[task.request.key]
        if error is None and task.finish is not None:
            try:
                result = task.finish(result)
            except CollectivesError as failure:
                error = failure
        task.handle._finish(result, error)
        if self._observer is not None:
            self._observer(task.request, task.submitted_s, self._doing[0] if self._doing else None, time.monotonic())

    def _look_for_stalls(self, now_s: float) -> None:
        limit_s = self._settings.stall_warning_s
        if not limit_s or now_s - self._warned_s < limit_s or self._coordinator is None:
            return
        late = self._coordinator.waiting(limit_s)
        if late:
            self._warned_s = now_s
            lines = [
                f"{name}: for {age_s:.0f} s, missing on rank{'s' if len(missing) > 1 else ''} "
                f"{', '.join(str(self.ranks[rank]) for rank in missing)}"
                for name, age_s, missing in late
            ]
            _log.warning(
                "Some ranks wait for tensors that others have not submitted; a rank may have stopped, or the ranks "
                "may take different paths through the script.\n  %s",
                "\n  ".join(lines),
            )

    # Messages.

    def _send(self, content: Any, rank: int) -> None:
        self._send_bytes(pickle.dumps(content, pickle.HIGHEST_PROTOCOL), rank)

    def _send_bytes(self, data: bytes, rank: int) -> None:
        from mpi4py import MPI

        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        self._sends.append((self.comm.Isend([data, len(data), MPI.BYTE], rank, self._tag), data))

    def _receive(self) -> tuple[int, Any] | None:
        """The rank and the content of the next message, if one is there."""
        if self.comm is None:
            return None
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, len(data), MPI.BYTE])
        # Comes from the other ranks of this very job, which run the same script.
        return status.Get_source(), pickle.loads(data)

    def _drain(self) -> None:
        """Let what was sent last get away."""
        deadline_s = time.monotonic() + 1.0
        while self._sends and time.monotonic() < deadline_s:
            self._sends = [(request, data) for request, data in self._sends if not request.Test()]
