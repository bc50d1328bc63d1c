"""The loop of one process set: one thread, one transport, one coordinator.

The thread sends new requests to the set's first rank, receives the agreed operations and performs them. A rank with nothing in
flight sleeps, because nothing can become ready without it. Only the first rank wakes up once a second, to detect ranks that
wait for it.

A caller that waits for a result leads for a while: it does the thread's work itself, because a thread switch takes longer than
a small message.

    a caller's thread                                    the loop's thread
    submit  _wake: queue the task                        sleeps in _wake.wait()
            notify, unless a caller leads or will    ->  wakes up
    wait    _claim: one caller at a time leads           does nothing while _claim is held
            _turn: send, receive, perform                _turn: send, receive, perform
            release _turn, then _claim
            _wake: notify if work is left            ->  continues, also with blocking operations
            sleep on the handle                      <-  finishes the handle

    lock    guards                                                    may be taken while holding
    _claim  which waiting caller leads                                nothing; no thread waits for it
    _turn   transport, coordinator, cache, _todo, _end, _left         nothing or _claim
    _wake   _news, ended, _leaving, _asleep, new keys of _pending     nothing, _claim, _turn or both

The lock order is _claim, _turn, _wake; each loop has its own three. `fail` takes only _wake, so any thread may call it while
another is stuck in the transport with _turn. Removing a set waits, in the turn of the world's loop, for the thread of the set's
loop; nothing in a set's turn waits for the world's.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.collectives import recorder
from paceline.collectives.coordinator import (
    Coordinator,
    Key,
    Message,
    Response,
    ResponseCache,
    inline_payload,
    inline_result,
)
from paceline.collectives.errors import ArgumentError, CollectivesError, MismatchError, ShutDownError
from paceline.collectives.handle import Handle
from paceline.collectives.liveness import StallWatch
from paceline.collectives.perform import Performer
from paceline.collectives.request import JOIN, Agreement, CollectiveTask, Fields, Request, pack_message, unpack_message
from paceline.collectives.settings import EngineSettings
from paceline.system.collective_state import entry_text, ranks_text

if TYPE_CHECKING:
    from paceline.collectives.transport import Transport

_log = logging.getLogger(__name__)

#: While a caller waits for a result, the loop polls this long without a pause.
_SPIN_WAITING_S = 0.002
_FIRST_PAUSE_S = 0.00005
#: The longest pause while a caller waits.
_WAITED_PAUSE_S = 0.001
#: The pause of a rank that has waited for a second or more, and of an idle coordinator.
_LONG_PAUSE_S = 0.005
_IDLE_PAUSE_S = 1.0
_LEAVE_S = 30.0
_GOODBYE_S = 1.0
#: A caller that waits leads for so long at most, then sleeps.
_LEAD_S = 0.01
_GRACE_S = 3.0
_ENDED = (
    "The engine has been shut down: {reason}. Operations in flight, and later ones, fail on every rank; "
    "see the log of that rank for the cause."
)


class _Caller(threading.local):
    """A block whose operations this thread waits for at once, so the loop's thread stays asleep.

    The wait must follow: until then the other ranks do not learn of the operations.
    """

    waits_at_once = False

    def __enter__(self) -> None:
        self.waits_at_once = True

    def __exit__(self, *_: object) -> None:
        self.waits_at_once = False


waiting_at_once = _Caller()


class BackgroundLoop:
    """The engine's part for one process set.

    `transport` connects the set's ranks, and is None for a set of one. When communication has failed, `lost` is called with the
    reason and the rank that died, or -1.
    """

    def __init__(
        self,
        transport: Transport | None,
        ranks: Sequence[int],
        number: int,
        settings: EngineSettings,
        lost: Callable[..., object],
    ) -> None:
        self.transport = transport
        self.ranks = tuple(ranks)
        self.rank = 0 if transport is None else transport.rank
        self.size = len(ranks)
        #: One item for each caller that sleeps on its handle. A list, for append and pop need no lock, and += does.
        self.waiting: list[int] = []
        self.ended: ShutDownError | None = None
        self.has_heard_end = False
        #: Is called with (request, submitted_s, agreed_s, done_s, arrivals) after each operation.
        self.observer: Callable[..., object] | None = None
        self._number = number
        self._settings = settings
        self._coordinator = Coordinator(self.size, settings.cache_capacity) if self.rank == 0 else None
        self._performer = Performer(transport, settings.fusion_bytes)
        self._lost = lost
        self._stalls = StallWatch(number, self.ranks, settings.stall_warning_s, settings.stall_shutdown_s)
        self._wake = threading.Condition(threading.Lock())
        self._asleep = False
        # An idle first rank only has to notice in time what other ranks wait for in vain.
        self._idle_pause_s = min(_IDLE_PAUSE_S, settings.stall_warning_s / 4 or _IDLE_PAUSE_S)
        self._news: list[CollectiveTask] = []
        self._pending: dict[tuple[str, str], CollectiveTask] = {}
        #: Kind and name -> the last request of these, and its text for the board: as many as are agreed upon by number.
        self._texts: dict[tuple[str, str], tuple[Request, str]] = {}
        self._most_texts = max(1, settings.cache_capacity)
        self._leaving = False
        self._left = False
        self._cache = ResponseCache()
        #: `wait` as one object: each look at a method makes a new one, and a step makes hundreds of handles.
        self.waiter = self.wait
        self._claim = threading.Lock()
        self._turn = threading.Lock()
        self._todo: list[tuple[CollectiveTask, Agreement]] = []
        self._end: str | None = None
        #: When the operation that is being done began, and its name. `overdue` reads it without a lock: it is one object.
        self._doing: tuple[float, str] | None = None
        self._is_forked = False
        self._thread = threading.Thread(target=self._run, name=f"paceline-set-{number}", daemon=True)
        self._thread.start()

    def known(self, fields: Fields) -> Request:
        """Return the request with these fields, reusing an equal one that the ranks agreed on before."""
        return self._cache.known(fields)

    def submit(self, task: CollectiveTask) -> Handle:
        """Queue the task and return its handle.

        Raises:
            ArgumentError: An operation of this kind and name is in flight.
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
            task.handle._place = recorder.begin(self._told(task.request))
            self._pending[key] = task
            self._news.append(task)
            # A caller that leads looks at the news itself. It gives _claim back before it takes _wake and looks whether
            # work is left: so either it sees this task there, or _claim is free here.
            if self._asleep and not self._claim.locked() and not waiting_at_once.waits_at_once:
                self._wake.notify()
        return task.handle

    def _told(self, request: Request) -> str:
        """Return the board's text for the request."""
        # Most requests come again, as the same object (`known`).
        text = self._texts.get(request.key)
        if text is None or text[0] != request:
            text = (request, _entry_text(request, self._number, self.ranks))
            if request.key not in self._texts and len(self._texts) >= self._most_texts:
                # Evict the oldest entry for each new one, so that names used once do not fill the memory.
                self._texts.pop(next(iter(self._texts)))
            self._texts[request.key] = text
        return text[1]

    def leave(self) -> None:
        """Announce that this rank shuts down. `join` waits until the others have received it."""
        with self._wake:
            self._leaving = True
            self._wake.notify()

    def join(self, timeout_s: float = _LEAVE_S) -> bool:
        """Wait for the thread's end and return whether it has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def forsake(self, error: ShutDownError) -> None:
        """Refuse all operations in a forked child, which has no loop thread.

        At the fork another thread may have held any of the locks, and they stay held in the child. So _wake is replaced, and
        `wait` does not touch the other two.
        """
        self._wake = threading.Condition()
        self._is_forked, self.ended = True, error

    def fail(self, error: ShutDownError) -> None:
        """End everything in flight with this error and refuse new operations. Only the first call counts.

        Any thread may call it.
        """
        with self._wake:
            if self.ended is None:
                self.ended = error
            tasks = list(self._pending.values())
            self._pending.clear()
            self._news.clear()
            self._wake.notify()
        # Without the lock: a handle's callbacks may submit something.
        for task in tasks:
            task.handle._finish(error=self.ended)

    def note_arrivals(self) -> None:
        """Pass arrival times to the observer from now on, as far as this rank knows them."""
        if self._coordinator is not None and self._coordinator.arrivals is None:
            self._coordinator.arrivals = {}

    def overdue(self, limit_s: float) -> str | None:
        """Describe an operation that runs, or waits for other ranks, longer than the limit, or return None.

        The set's first rank ends waiting operations with a better reason, so it gets `_GRACE_S` more time.
        """
        now_s = time.monotonic()
        doing = self._doing
        if doing is not None and now_s - doing[0] > limit_s:
            return f"{doing[1]} has not ended within {limit_s:g} s: another rank has stopped in the middle of it"
        # list() copies in one call: the thread with the turn removes finished tasks at the same time, without _wake.
        for task in list(self._pending.values()):
            if task.request.kind != JOIN and now_s - task.submitted_s > limit_s + _GRACE_S:
                return f"{task.request.kind} {task.request.name!r} has waited for other ranks for {limit_s:g} s"
        return None

    def wait(self, handle: Handle, timeout_s: float | None) -> None:
        """Wait until the handle is done or the time is up, leading for up to `_LEAD_S`.

        Operations that block until other ranks come are left to the loop's thread, so that the caller notices when a rank dies.

        Raises:
            ShutDownError: This process was forked from the engine's process.
        """
        if self._is_forked and self.ended is not None:
            raise self.ended
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        if self._claim.acquire(blocking=False):
            try:
                with self._guarded():
                    self._lead(handle, end_s)
            finally:
                # In this order: a thread that holds _wake and finds _claim held relies on the check below.
                self._claim.release()
                with self._wake:
                    if self._pending or self._todo or self._leaving:
                        self._wake.notify()
        if not handle.done():
            self.waiting.append(1)
            try:
                handle.block(None if timeout_s is None else end_s - time.monotonic())
            finally:
                self.waiting.pop()

    def _lead(self, handle: Handle, end_s: float) -> None:
        """Work in the caller's thread until the handle is done, time is up, or an operation may block."""
        begin_s = time.monotonic()
        end_s = min(end_s, begin_s + _LEAD_S)
        # The thread may be in the middle of an operation that waits for other ranks: the caller sleeps on its handle then.
        if not self._turn.acquire(timeout=end_s - begin_s):
            return
        try:
            pause_s, looks = _FIRST_PAUSE_S, 0
            while not handle.done() and self.ended is None:
                if self._todo:
                    if self._performer.blocks(self._todo):
                        return
                    self._do()
                if self._step():
                    continue
                looks += 1
                if looks < self._settings.looks:
                    continue
                now_s = time.monotonic()
                if now_s > end_s:
                    return
                if now_s - begin_s < _SPIN_WAITING_S:
                    os.sched_yield()
                else:
                    pause_s = min(pause_s * 1.5, self._settings.gathering_s, _WAITED_PAUSE_S)
                    time.sleep(pause_s)
        finally:
            self._turn.release()

    def _run(self) -> None:
        with self._guarded():
            self._serve()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Fail the engine with any error of the block, so that every waiting caller gets it.

        KeyboardInterrupt is raised again: an operation may have stopped in the middle, and the other ranks cannot go on with this
        one.
        """
        try:
            yield
        except ShutDownError as error:
            self._lost(str(error), getattr(error, "lost_rank", -1))
        except BaseException as error:
            _log.debug("the engine's work has failed", exc_info=True)
            self._lost(f"communication has failed ({error!r})")
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                raise

    def _serve(self) -> None:
        quiet_since_s = time.monotonic()
        while self.ended is None:
            worked = False
            # Without a lock: `_sleep` checks again under _wake.
            if self._todo or not self._claim.locked():
                with self._turn:
                    if self._todo:
                        self._do()
                        worked = True
                    else:
                        worked = self._step()
            now_s = time.monotonic()
            if worked:
                quiet_since_s = now_s
            quiet_s = now_s - quiet_since_s
            if self._todo:
                continue
            if self.waiting and quiet_s < _SPIN_WAITING_S and self._is_busy():
                os.sched_yield()
            elif self._sleep(self._pause_s(quiet_s)):
                quiet_since_s = time.monotonic()
        # A caller that still leads sees `ended` and gives the turn back before anything is freed.
        with self._turn:
            self._performer.close()
            if self.transport is not None and self.has_heard_end and self._is_quiet():
                self.transport.close()

    def _is_quiet(self) -> bool:
        """Wait until no message is in flight. Return whether the transport can be freed.

        MPI reuses the number of a freed communicator for a new one, which would receive a late message. The set of all ranks
        keeps its communicator, so it does not wait.
        """
        assert self.transport is not None
        if self._number == 0:
            return True
        if self._coordinator is None:
            # A rank says once that it leaves, and nothing after that.
            if not self._left:
                self._announce([], leaving=True)
            return True
        end_s = time.monotonic() + _GOODBYE_S
        while not self._coordinator.is_left_by_all and time.monotonic() < end_s:
            content = self._receive()
            if content is None:
                time.sleep(_FIRST_PAUSE_S)
            else:
                self._coordinator.receive(content[0], Message(*content[1]))
        return self._coordinator.is_left_by_all

    def _pause_s(self, quiet_s: float) -> float:
        """Return the pause between two polls after `quiet_s` without a message."""
        if quiet_s >= 1.0:
            return _LONG_PAUSE_S
        gathering_s = self._settings.gathering_s
        return min(gathering_s, _WAITED_PAUSE_S) if self.waiting else gathering_s

    def _is_busy(self) -> bool:
        """Return whether the thread has to poll: operations are in flight, and no caller leads."""
        return bool(self._pending or self._leaving) and self.size > 1 and not self._claim.locked()

    def _sleep(self, pause_s: float) -> bool:
        """Sleep for `pause_s`, or until there is work. Return True if it was asleep without a time limit.

        Tasks submitted during the pause wait, so that many small arrays are negotiated and reduced together.
        """
        with self._wake:
            # No wake-up is lost: every thread that submits, stops leading, leaves or fails takes _wake too. Either it did so
            # before this point and its change is visible, or it does so after `wait` below has released the lock, and notifies.
            if self.ended is not None or self._todo:
                return False
            if self._is_busy():
                self._wake.wait(pause_s)
                return False
            if not self._claim.locked() and (self._news or (self._leaving and not self._left)):
                return True
            self._asleep = True
            self._wake.wait(self._idle_pause_s if self._coordinator is not None and self.size > 1 else None)
            self._asleep = False
            return True

    # Only the thread with the turn calls the methods below.

    def _step(self) -> bool:
        """Send new requests and receive agreements. Return whether there were any."""
        news: list[CollectiveTask] = []
        if self._news or (self._leaving and not self._left):
            with self._wake:
                news, self._news = self._news, []
            self._announce(news, self._leaving)
        if self._coordinator is not None:
            self._stalls.look(self._coordinator)
        response = self._hear()
        if response is not None:
            self._take(response)
        return response is not None or bool(news)

    def _announce(self, news: Sequence[CollectiveTask], leaving: bool) -> None:
        payload = None
        if len(news) == 1 and self.size > 1:
            payload = inline_payload(news[0])
        self._left = leaving
        message = self._cache.message([task.request for task in news], leaving, payload)
        if self._coordinator is not None:
            self._coordinator.receive(0, message)
        else:
            assert self.transport is not None
            self.transport.send(pack_message(tuple(message)), 0)

    def _hear(self) -> Response | None:
        if self._coordinator is None:
            content = self._receive()
            return None if content is None else Response(*content[1])
        while self.transport is not None and (content := self._receive()) is not None:
            self._coordinator.receive(content[0], Message(*content[1]))
        response = self._coordinator.respond()
        if response is not None and self.transport is not None:
            data = pack_message(tuple(response))
            for rank in range(1, self.size):
                self.transport.send(data, rank)
        return response

    def _take(self, response: Response) -> None:
        """Queue the agreed operations in `_todo`, and complete those whose result came along."""
        results = dict(response.results)
        for place, agreement in enumerate(self._cache.agreed(response, self._asked)):
            key = agreement.request.key
            task = self._pending.get(key)
            arrivals: Sequence[tuple[int, float]] = ()
            if self._coordinator is not None and self._coordinator.arrivals is not None:
                arrivals = self._coordinator.arrivals.pop(key, ())
            if task is None:
                # This rank has joined (or failed: then nothing that it does matters any more).
                if agreement.error is None and self.ended is None:
                    self._todo.append((self._stand_in(agreement.request), agreement))
                continue
            task.arrivals = arrivals
            if agreement.error is not None:
                self._complete(task, error=MismatchError(agreement.error))
            elif place in results:
                self._complete(task, inline_result(task, results[place], self.size))
            else:
                self._todo.append((task, agreement))
        if response.end is not None:
            self._end = response.end
            if not self._todo:
                self._do()

    def _asked(self, key: Key) -> Request | None:
        task = self._pending.get(key)
        return None if task is None else task.request

    def _do(self) -> None:
        todo = self._todo
        if todo:
            self._doing = (time.monotonic(), f"{todo[0][1].request.kind} {todo[0][1].request.name!r}")
            self._performer.perform(todo, self._complete)
            self._doing = None
            self._todo = []
        if self._end is not None:
            self.has_heard_end = True
            self.fail(ShutDownError(_ENDED.format(reason=self._end)))

    def _stand_in(self, request: Request) -> CollectiveTask:
        """Return a task of zeros, for an operation of the other ranks after this one has joined."""
        import numpy

        dtypes = ["uint16" if dtype == "bfloat16" else dtype for dtype in request.dtypes]
        zeros = [numpy.zeros(shape, dtype) for shape, dtype in zip(request.shapes, dtypes, strict=True)]
        return CollectiveTask(request, zeros, zeros, Handle(request.key))

    def _complete(self, task: CollectiveTask, result: Any = None, error: BaseException | None = None) -> None:
        key = task.request.key
        # Without _wake, which hundreds would take one after the other. `fail` may have emptied the table, and then finishes
        # the handle as well: the first of the two wins.
        if self._pending.get(key) is task:
            self._pending.pop(key, None)
        if error is None and task.finish is not None:
            try:
                result = task.finish(result)
            except (CollectivesError, ArgumentError) as failure:
                error = failure
        # Before the handle is done: an observer that stops after its last result has then missed no operation.
        observer = self.observer
        if observer is not None:
            done_s = time.monotonic()
            # An operation that came with its result was done when it was agreed upon.
            agreed_s = self._doing[0] if self._doing else None if error is not None else done_s
            observer(task.request, task.submitted_s, agreed_s, done_s, task.arrivals)
        task.handle._finish(result, error)

    def _receive(self) -> tuple[int, Any] | None:
        """Return the sender and content of the next message, or None if there is none."""
        if self.transport is None:
            return None
        message = self.transport.receive()
        return None if message is None else (message[0], unpack_message(message[1]))


def _entry_text(request: Request, number: int, ranks: Sequence[int]) -> str:
    sizes = [math.prod(shape) for shape in request.shapes]
    size = sum(count * _item_bytes(dtype) for count, dtype in zip(sizes, request.dtypes, strict=True))
    shape = f"{len(sizes)} tensors" if sizes else ""
    if len(sizes) == 1:
        shape = f"{list(request.shapes[0])} {request.dtypes[0]}"
    return entry_text(f"process set {number}", request.kind, request.name, shape, size, ranks_text(ranks))


def _item_bytes(dtype: str) -> int:
    """Return the size of an item of this dtype, whose name ends with its bits ("float32"), or 1 ("bool")."""
    bits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(bits) // 8 if bits.isdigit() else 1
