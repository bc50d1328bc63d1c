"""The loop of one process set: one thread, one transport, one coordinator.

The thread sends new requests to the set's first rank, receives the agreed operations and performs them. While this rank
has no operation in flight, the thread sleeps, because no operation can become ready without this rank. Only the first
rank's thread wakes up once a second, to detect other ranks that wait for the first rank.

A caller that waits for a result first leads for a while: it does the thread's work itself, because a thread switch
takes longer than a small message.

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
    _turn   transport, negotiation                                    nothing or _claim
    _wake   _news, ended, _leaving, _asleep, new keys of _pending     nothing, _claim, _turn or both

The lock order is _claim, _turn, _wake; each loop has its own three locks. `fail` takes only _wake, so any thread may
call `fail` while another thread is stuck in the transport and holds _turn. To remove a set, the loop of all ranks holds
its own _turn and waits until the set's thread ends. No set's loop waits for the loop of all ranks.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from paceline.collectives import recorder
from paceline.collectives.errors import ArgumentError, ShutDownError
from paceline.collectives.handle import Handle
from paceline.collectives.negotiation import FIRST_PAUSE_S, Negotiation
from paceline.collectives.request import JOIN, CollectiveTask, Key, Request
from paceline.collectives.settings import EngineSettings
from paceline.collectives.transport import Transport
from paceline.system.collective_state import entry_text, ranks_text

_log = logging.getLogger(__name__)

#: If a caller waits for a result, the loop polls without a pause until it has had no work for this many seconds.
_SPIN_WAITING_S = 0.002
#: While a caller waits for a result, the loop pauses at most this many seconds between two polls.
_WAITED_PAUSE_S = 0.001
#: Seconds between two polls after a second without work.
_LONG_PAUSE_S = 0.005
_IDLE_PAUSE_S = 1.0  # maximum number of seconds for which an idle first rank sleeps
_LEAVE_S = 30.0
#: A waiting caller does the work of the loop itself for at most this many seconds. Then it sleeps.
_LEAD_S = 0.01
_GRACE_S = 3.0


class _Caller(threading.local):
    """A block whose caller runs the loop itself, so `submit` wakes no thread."""

    waits_at_once = False

    def __enter__(self) -> None:
        self.waits_at_once = True

    def __exit__(self, *_: object) -> None:
        self.waits_at_once = False


waiting_at_once = _Caller()


class BackgroundLoop:
    """The thread and the state that run the collective operations of one process set (a group of ranks).

    `transport` connects the set's ranks. After a communication failure the loop calls `lost(reason, rank)`; `rank` is
    the rank that died, or -1 if no rank died.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        number: int,
        settings: EngineSettings,
        lost: Callable[..., object],
    ) -> None:
        self.transport = transport
        self.ranks = tuple(ranks)
        self.rank = transport.rank
        self.size = len(ranks)
        #: An item for each caller that sleeps until its operation is done. append and pop are atomic without a lock.
        self.waiting: list[int] = []
        self.ended: ShutDownError | None = None
        self._settings = settings
        self._lost = lost
        self._wake = threading.Condition(threading.Lock())
        self._asleep = False
        self._news: list[CollectiveTask] = []
        self._pending: dict[Key, CollectiveTask] = {}
        self._texts = _BoardTexts(number, self.ranks, settings.cache_capacity)
        self._leaving = False
        self.negotiation = Negotiation(
            transport,
            self.ranks,
            number,
            settings,
            self._pending,
            fail=self.fail,
            has_failed=lambda: self.ended is not None,
        )
        # The first rank detects stalled operations of other ranks, so it must wake up often enough when it is idle.
        self._idle_pause_s: float | None = None
        if self.rank == 0 and self.size > 1:
            self._idle_pause_s = min(_IDLE_PAUSE_S, settings.stall_warning_s / 4 or _IDLE_PAUSE_S)
        # Store the bound method: every access to `self.wait` would create a new object, and a step creates hundreds of handles.
        self.waiter = self.wait
        #: Function that returns a request with the given fields, if possible the object that an earlier step has used.
        self.known = self.negotiation.cache.known
        self._claim = threading.Lock()
        self._turn = threading.Lock()
        self._is_forked = False
        self._thread = threading.Thread(target=self._run, name=f"paceline-set-{number}", daemon=True)
        self._thread.start()

    def submit(self, task: CollectiveTask) -> Handle:
        """Queue a collective operation and return its handle."""
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
            task.handle._place = recorder.begin(self._texts.of(task.request))
            self._pending[key] = task
            self._news.append(task)
            # Don't wake the loop while a waiting caller does its work: this caller holds _claim and polls `_news`.
            # After releasing _claim, the caller takes _wake and checks for work again. So no task is missed.
            if self._asleep and not self._claim.locked() and not waiting_at_once.waits_at_once:
                self._wake.notify()
        return task.handle

    def leave(self) -> None:
        """Announce to the other ranks that this rank shuts down."""
        with self._wake:
            self._leaving = True
            self._wake.notify()

    def join(self, timeout_s: float = _LEAVE_S) -> bool:
        """Wait for the loop's thread to end. Return whether it has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def forsake(self, error: ShutDownError) -> None:
        """Make all collectives fail in a forked child, which has no loop thread."""
        self._wake = threading.Condition()
        self._is_forked, self.ended = True, error

    def fail(self, error: ShutDownError) -> None:
        """Fail all collectives in flight and all later ones with this error."""
        # Any thread may call `fail`. Only the first call has an effect.
        with self._wake:
            if self.ended is None:
                self.ended = error
            tasks = list(self._pending.values())
            self._pending.clear()
            self._news.clear()
            self._wake.notify()
        # Release the lock before finishing the handles, because their callbacks may submit new operations.
        for task in tasks:
            task.handle._finish(error=self.ended)

    def overdue(self, limit_s: float) -> str | None:
        """Describe a collective in flight for more than `limit_s`, or return None."""
        # Wait `_GRACE_S` longer, because the first rank of the set can name the missing ranks in its own error.
        now_s = time.monotonic()
        doing = self.negotiation.doing
        if doing is not None and now_s - doing[0] > limit_s:
            return f"{doing[1]} has not ended within {limit_s:g} s: another rank has stopped in the middle of it"
        late = (task.request for task in list(self._pending.values()) if now_s - task.submitted_s > limit_s + _GRACE_S)
        waits = (f"{one.kind} {one.name!r} has waited for other ranks" for one in late if one.kind != JOIN)
        return next((f"{text} for {limit_s:g} s" for text in waits), None)

    def wait(self, handle: Handle, timeout_s: float | None) -> None:
        """Wait until the collective is done or `timeout_s` has passed.

        For up to `_LEAD_S` seconds the caller does the work of the loop's thread itself. But the caller never performs
        an operation that would hang if a rank died: the thread performs it. A timeout of None sets no time limit.
        """
        if self._is_forked and self.ended is not None:
            raise self.ended
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        if self._claim.acquire(blocking=False):
            try:
                with self._guarded():
                    self._lead(handle, end_s)
            finally:
                # Release _claim before the check below: a thread that submits wakes the loop only while it is free.
                self._claim.release()
                with self._wake:
                    if self._pending or self.negotiation.todo or self._leaving:
                        self._wake.notify()
        if not handle.done():
            self.waiting.append(1)
            try:
                handle.block(None if timeout_s is None else end_s - time.monotonic())
            finally:
                self.waiting.pop()

    def _lead(self, handle: Handle, end_s: float) -> None:
        begin_s = time.monotonic()
        end_s = min(end_s, begin_s + _LEAD_S)
        # If the loop's own thread is in an operation that waits for other ranks, return. The caller then sleeps on its handle.
        if not self._turn.acquire(timeout=end_s - begin_s):
            return
        try:
            negotiation, pause_s, looks = self.negotiation, FIRST_PAUSE_S, 0
            while not handle.done() and self.ended is None:
                if negotiation.todo:
                    if negotiation.performer.blocks(negotiation.todo):
                        return
                    negotiation.perform()
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
        """Make all collectives of the engine fail if the block raises an error.

        The error is not raised again, except KeyboardInterrupt in a caller's thread. KeyboardInterrupt fails the
        operations too, because the other ranks cannot complete the interrupted operation.
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
        negotiation, quiet_since_s = self.negotiation, time.monotonic()
        while self.ended is None:
            worked = False
            # This check without a lock may already be outdated. `_sleep` repeats it under the lock _wake.
            if negotiation.todo or not self._claim.locked():
                with self._turn:
                    if negotiation.todo:
                        negotiation.perform()
                        worked = True
                    else:
                        worked = self._step()
            now_s = time.monotonic()
            if worked:
                quiet_since_s = now_s
            quiet_s = now_s - quiet_since_s
            if negotiation.todo:
                continue
            if self.waiting and quiet_s < _SPIN_WAITING_S and self._is_busy():
                os.sched_yield()
            elif self._sleep(self._pause_s(quiet_s)):
                quiet_since_s = time.monotonic()
        # A thread that waits for a collective may run this loop's work meanwhile, and holds _turn. So wait for _turn first.
        with self._turn:
            negotiation.close()

    def _pause_s(self, quiet_s: float) -> float:
        if quiet_s >= 1.0:
            return _LONG_PAUSE_S
        gathering_s = self._settings.gathering_s
        return min(gathering_s, _WAITED_PAUSE_S) if self.waiting else gathering_s

    def _is_busy(self) -> bool:
        return bool(self._pending or self._leaving) and self.size > 1 and not self._claim.locked()

    def _sleep(self, pause_s: float) -> bool:
        """Sleep for `pause_s`, or until there is work.

        Return True if new work may have arrived, False if the loop must poll or end. While operations are in flight,
        new operations wait until the pause ends, so that many small arrays are negotiated and reduced together.
        """
        with self._wake:
            # No wake-up is lost, because each thread that changes this state takes _wake: an earlier change is visible
            # here, and a later change comes while `wait` below has released _wake, and ends that wait.
            if self.ended is not None or self.negotiation.todo:
                return False
            if self._is_busy():
                self._wake.wait(pause_s)
                return False
            if not self._claim.locked() and (self._news or (self._leaving and not self.negotiation.has_left)):
                return True
            self._asleep = True
            self._wake.wait(self._idle_pause_s)
            self._asleep = False
            return True

    def _step(self) -> bool:
        """Send this rank's new requests for collectives, and receive agreements on them.

        Return False if there were neither requests nor agreements. The caller holds the lock `_turn`.
        """
        news: list[CollectiveTask] = []
        if self._news or (self._leaving and not self.negotiation.has_left):
            with self._wake:
                news, self._news = self._news, []
            self.negotiation.announce(news, self._leaving)
        return self.negotiation.hear() or bool(news)


class _BoardTexts:
    """A cache of descriptions of recent collectives, which status reports show."""

    def __init__(self, number: int, ranks: Sequence[int], limit: int) -> None:
        self._set, self._ranks, self._limit = f"process set {number}", ranks_text(ranks), max(1, limit)
        self._texts: dict[Key, tuple[Request, str]] = {}

    def of(self, request: Request) -> str:
        # Keep the text of each request, because every step repeats the same requests.
        key = request.key
        known = self._texts.get(key)
        if known is None or known[0] != request:
            known = (request, self._text(request))
            if key not in self._texts and len(self._texts) >= self._limit:
                # Replace the oldest entry. Otherwise names that are used only once would fill the memory.
                self._texts.pop(next(iter(self._texts)))
            self._texts[key] = known
        return known[1]

    def _text(self, request: Request) -> str:
        counts = [math.prod(shape) for shape in request.shapes]
        size = sum(count * _item_bytes(dtype) for count, dtype in zip(counts, request.dtypes, strict=True))
        shape = f"{len(counts)} tensors" if counts else ""
        if len(counts) == 1:
            shape = f"{list(request.shapes[0])} {request.dtypes[0]}"
        return entry_text(self._set, request.kind, request.name, shape, size, self._ranks)


def _item_bytes(dtype: str) -> int:
    bits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(bits) // 8 if bits.isdecimal() else 1
