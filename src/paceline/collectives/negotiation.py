"""The work of one process set: send requests, receive agreements, perform the agreed operations.

Only the thread that holds the lock `_turn` of the set's loop (`background_loop`) calls this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.collectives.coordinator import (
    Coordinator,
    Message,
    Response,
    ResponseCache,
    inline_payload,
    inline_result,
)
from paceline.collectives.errors import ArgumentError, CollectivesError, MismatchError, ShutDownError
from paceline.collectives.handle import Handle
from paceline.collectives.liveness import StallWatch
from paceline.collectives.perform import Performer, Ready
from paceline.collectives.request import Arrivals, CollectiveTask, Key, Request, pack_message, unpack_message
from paceline.collectives.settings import EngineSettings
from paceline.collectives.transport import Transport

#: Function that is called after each operation with the arguments (request, submitted_s, agreed_s, done_s, arrivals).
Observer = Callable[[Request, float, "float | None", float, Arrivals], object]

FIRST_PAUSE_S = 0.00005
_GOODBYE_S = 1.0
_ENDED = (
    "The engine has been shut down: {reason}. Operations in flight, and later ones, fail on every rank; "
    "see the log of that rank for the cause."
)


class Negotiation:
    """The exchange by which a process set's ranks agree on their next collectives.

    `pending` has this rank's submitted tasks. Once a rank has shut down, the negotiation calls `fail(error)`, which
    makes all pending tasks fail. `has_failed` returns whether `fail` was called.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...],
        number: int,
        settings: EngineSettings,
        pending: dict[Key, CollectiveTask],
        *,
        fail: Callable[[ShutDownError], object],
        has_failed: Callable[[], bool],
    ) -> None:
        #: Operations on which the ranks have agreed, but which this rank has not performed yet.
        self.todo: list[Ready] = []
        self.has_left = False
        self.has_heard_end = False
        self.observer: Observer | None = None
        #: Start time and name of the running operation. Other threads read this tuple without a lock.
        self.doing: tuple[float, str] | None = None
        self.cache = ResponseCache()
        self.performer = Performer(transport, settings.fusion_bytes)
        self._transport = transport
        self._size = len(ranks)
        self._number = number
        self._pending = pending
        self._fail, self._has_failed = fail, has_failed
        self._coordinator: Coordinator | None = None
        if transport.rank == 0:
            self._coordinator = Coordinator(self._size, settings.cache_capacity)
        self._stalls = StallWatch(number, ranks, settings.stall_warning_s, settings.stall_shutdown_s)
        self._end: str | None = None

    def note_arrivals(self) -> None:
        """Make the set's first rank record when each rank's requests arrive."""
        if self._coordinator is not None:
            self._coordinator.notes_arrivals = True

    def announce(self, news: Sequence[CollectiveTask], leaving: bool) -> None:
        """Request these collectives from the first rank. `leaving`: this rank shuts down."""
        payload = inline_payload(news[0]) if len(news) == 1 and self._size > 1 else None
        self.has_left = leaving
        message = self.cache.message([task.request for task in news], leaving, payload)
        if self._coordinator is not None:
            self._coordinator.receive(0, message)
        else:
            self._transport.send(pack_message(tuple(message)), 0)

    def hear(self) -> bool:
        """Receive collectives on which all ranks agree, and queue them. Return whether any came."""
        if self._coordinator is not None:
            self._stalls.look(self._coordinator)
        response = self._response()
        if response is None:
            return False
        self._take(response)
        return True

    def perform(self) -> None:
        """Perform the queued collectives. After the last response, fail all other tasks."""
        todo = self.todo
        if todo:
            self.doing = (time.monotonic(), f"{todo[0][1].request.kind} {todo[0][1].request.name!r}")
            self.performer.perform(todo, self._complete)
            self.doing = None
            self.todo = []
        if self._end is not None:
            self.has_heard_end = True
            self._fail(ShutDownError(_ENDED.format(reason=self._end)))

    def close(self) -> None:
        """Release shared memory, and close the transport if no message is in flight."""
        self.performer.close()
        if self.has_heard_end and self._is_quiet():
            self._transport.close()

    def _response(self) -> Response | None:
        coordinator, transport = self._coordinator, self._transport
        if coordinator is None:
            content = self._receive()
            return None if content is None else Response(*content[1])
        while (content := self._receive()) is not None:
            coordinator.receive(content[0], Message(*content[1]))
        response = coordinator.respond()
        if response is not None and self._size > 1:
            data = pack_message(tuple(response))
            for rank in range(1, self._size):
                transport.send(data, rank)
        return response

    def _receive(self) -> tuple[int, Any] | None:
        message = self._transport.receive()
        return None if message is None else (message[0], unpack_message(message[1]))

    def _take(self, response: Response) -> None:
        """Queue the collectives of a response, and complete those whose result it contains."""
        results = dict(response.results)
        arrivals = {} if self._coordinator is None else self._coordinator.arrivals
        for place, agreement in enumerate(self.cache.agreed(response, self._own_request)):
            key = agreement.request.key
            task = self._pending.get(key)
            arrived = arrivals.pop(key, ())
            if task is None:
                # Without a task, this rank has called `join` and contributes zeros, unless the engine has failed.
                if agreement.error is None and not self._has_failed():
                    self.todo.append((_zeros(agreement.request), agreement))
                continue
            task.arrivals = arrived
            if agreement.error is not None:
                self._complete(task, error=MismatchError(agreement.error))
            elif place in results:
                self._complete(task, inline_result(task, results[place], self._size))
            else:
                self.todo.append((task, agreement))
        if response.end is not None:
            self._end = response.end
            if not self.todo:
                self.perform()

    def _own_request(self, key: Key) -> Request | None:
        task = self._pending.get(key)
        return None if task is None else task.request

    def _complete(self, task: CollectiveTask, result: object = None, error: BaseException | None = None) -> None:
        key = task.request.key
        # Save the time for the loop's lock _wake. If `fail` runs meanwhile, it empties `_pending` and finishes this
        # handle, too. Only the first call that finishes a handle has an effect.
        if self._pending.get(key) is task:
            self._pending.pop(key, None)
        if error is None and task.finish is not None:
            try:
                result = task.finish(result)
            except (CollectivesError, ArgumentError) as failure:
                error = failure
        # Call the observer before the operation's `wait` returns. A script that then stops observing has missed no operation.
        observer = self.observer
        if observer is not None:
            done_s = time.monotonic()
            # If the response contained the result, the operation was done as soon as the ranks had agreed on it.
            agreed_s = self.doing[0] if self.doing else None if error is not None else done_s
            observer(task.request, task.submitted_s, agreed_s, done_s, task.arrivals)
        task.handle._finish(result, error)

    def _is_quiet(self) -> bool:
        """Wait until no message to other ranks is in flight. Return False after a timeout.

        Without this, late messages could reach a new communicator: MPI reuses the numbers of freed communicators. Only
        a set's first rank waits; other ranks announce their end. The set of all ranks needs no wait.
        """
        if self._number == 0:
            return True
        if self._coordinator is None:
            # A rank announces only once that it leaves, and sends nothing after that.
            if not self.has_left:
                self.announce([], leaving=True)
            return True
        end_s = time.monotonic() + _GOODBYE_S
        while not self._coordinator.is_left_by_all and time.monotonic() < end_s:
            content = self._receive()
            if content is None:
                time.sleep(FIRST_PAUSE_S)
            else:
                self._coordinator.receive(content[0], Message(*content[1]))
        return self._coordinator.is_left_by_all


def _zeros(request: Request) -> CollectiveTask:
    import numpy

    dtypes = ["uint16" if dtype == "bfloat16" else dtype for dtype in request.dtypes]
    zeros = [numpy.zeros(shape, dtype) for shape, dtype in zip(request.shapes, dtypes, strict=True)]
    return CollectiveTask(request, zeros, zeros, Handle(request.key))
