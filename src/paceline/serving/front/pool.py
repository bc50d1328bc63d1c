"""The model processes of a service, and the queue of requests.

A request goes to an idle process, or into the queue if no process is idle. A process that has answered gets the next
queued request. If its model takes several requests, the process gets up to `max_batch` queued requests. It never waits
for more requests to arrive.

The processes of one configuration are called a generation. A new generation loads while the present generation serves.
The new generation takes over once all its processes are ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import ServingError
from paceline.serving import wire
from paceline.serving.config import ServerConfig
from paceline.serving.front import process
from paceline.serving.front.models import verify
from paceline.serving.front.process import ModelProcess, StartedModel
from paceline.serving.model.answers import error

_log = logging.getLogger("paceline.serving")

#: Status that is logged if the client disconnected before the response, as in nginx.
GONE = 499

#: Seconds until a process that failed to load is started again: the first pause, doubled each time up to the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0
_TICK_S = 0.05
#: Number of ticks of `watch` between two checks of memory.
_MEMORY_TICKS = 10


class Waiting:
    """A queued request. Its `future` gets the response, or None after a timeout."""

    __slots__ = ("call", "future", "number", "since")

    def __init__(self, number: int, call: bytes, future: asyncio.Future[wire.Reply | None]) -> None:
        self.number, self.call, self.future = number, call, future
        self.since = time.monotonic()

    def answer(self, reply: wire.Reply | None) -> None:
        if not self.future.done():  # a disconnect of the client has ended the future already
            self.future.set_result(reply)


class Generation:
    """The processes that serve one configuration.

    loaded: A future that is done when all processes are ready. If a process can't load, the future has an exception.
    """

    def __init__(self, config: ServerConfig, model_dir: str | None) -> None:
        self.config, self.model_dir = config, model_dir
        self.processes: list[ModelProcess] = []
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the exception, so that asyncio does not report it as never retrieved.
        self.loaded.add_done_callback(lambda future: future.cancelled() or future.exception())


class LoadError(Exception):
    """An error because a model process failed to load, with the reason."""


class Pool:
    """All model processes of a service, and the queue of its requests.

    changed: Called whenever a process starts, is ready or ends.
    """

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        self.current: Generation | None = None
        self.next: Generation | None = None
        self.queue: deque[Waiting] = deque()
        #: Reason of a replacement -> number of processes that were replaced for this reason.
        self.restarts: Counter[str] = Counter()
        self.batches = 0
        self.is_closing = False
        #: All live processes, including processes that still answer requests but get no new requests.
        self._alive: set[ModelProcess] = set()
        self._folder, self._changed = folder, changed
        self._in_hand: dict[int, Waiting] = {}
        self._numbers = 0
        self._pause_s = _FIRST_PAUSE_S
        self._ticks = 0
        #: Process that is loading -> the process over the memory limit that it will replace.
        self._successor_of: dict[ModelProcess, ModelProcess] = {}
        self._starting: set[asyncio.Task[None]] = set()

    @property
    def processes(self) -> list[ModelProcess]:
        return self.current.processes if self.current else []

    @property
    def config(self) -> ServerConfig:
        assert self.current is not None
        return self.current.config

    @property
    def ready(self) -> ModelProcess | None:
        """A model process that is ready for requests, or None."""
        return next((each for each in self.processes if each.state == process.READY), None)

    def submit(self, operation: int, head: bytes, body: bytes) -> Waiting | None:
        """Queue a request for a model process. Return None if the queue is full."""
        queue = self.queue
        if len(queue) >= self.config.max_queue:
            return None
        self._numbers = number = self._numbers + 1
        future: asyncio.Future[wire.Reply | None] = asyncio.get_running_loop().create_future()
        queue.append(waiting := Waiting(number, wire.pack_call(number, operation, head, body), future))
        if len(queue) == 1:
            for each in self.processes:
                if each.is_idle:
                    self._feed(each)
                    break
        return waiting

    def forget(self, waiting: Waiting) -> None:
        """Drop the request of a disconnected client from the queue or its process."""
        if waiting.future.done():
            return
        waiting.answer(error(GONE, "the client has disconnected."))
        if waiting.number in self._in_hand:
            for each in self._alive:
                if waiting.number in each.in_hand:
                    each.forget(waiting.number)
        else:
            self.queue.remove(waiting)

    @property
    def in_hand(self) -> int:
        return len(self._in_hand)

    def is_empty(self) -> bool:
        return not self.queue and not self._in_hand

    def _feed(self, to: ModelProcess) -> None:
        calls: list[tuple[int, bytes]] = []
        while self.queue and len(calls) < to.batch:
            waiting = self.queue.popleft()
            self._in_hand[waiting.number] = waiting
            calls.append((waiting.number, waiting.call))
        if calls:
            self.batches += 1
            to.give(calls)

    def _answered(self, number: int, reply: wire.Reply) -> None:
        waiting = self._in_hand.pop(number, None)
        if waiting is not None:
            waiting.answer(reply)

    def begin(self, config: ServerConfig, model_dir: str | None, started: Sequence[StartedModel] = ()) -> Generation:
        """Start the model processes of a configuration, except those already `started`."""
        generation = Generation(config, model_dir)
        if self.current is None:
            self.current = generation
        else:
            self.next = generation
        for each in started:
            self._adopt(generation, each)
        for _ in range(config.workers - len(started)):
            self._start(generation)
        return generation

    def switch(self) -> None:
        """Let the new configuration's processes serve. The old processes end after their requests."""
        assert self.current is not None
        assert self.next is not None
        old, self.current, self.next = self.current, self.next, None
        for each in old.processes:
            each.retire("replaced by a new revision")
        self._feed_all()
        self._changed()

    def give_up(self) -> None:
        """Kill the new configuration's processes, and keep the present processes."""
        generation, self.next = self.next, None
        for each in generation.processes if generation else ():
            each.kill("given up")

    def adjust(self, config: ServerConfig) -> None:
        """Apply a configuration with other limits or another number of model processes."""
        assert self.current is not None
        generation = self.current
        generation.config = config
        for each in generation.processes:
            each.config = config
        extra = len(generation.processes) - config.workers
        # If there are too many processes, retire the idle processes first.
        for each in sorted(generation.processes, key=lambda each: bool(each.in_hand))[: max(0, extra)]:
            each.retire("fewer processes were asked for")
            generation.processes.remove(each)
        for _ in range(-extra):
            self._start(generation)

    def cut_off(self) -> None:
        """End without delay: answer queued requests with status 503, and kill busy processes."""
        self.is_closing = True
        for waiting in self.queue:
            waiting.answer(error(503, "the server ends."))
        self.queue.clear()
        for each in self._alive:
            if each.in_hand:
                each.kill("the server ends")

    async def close(self) -> None:
        """Kill all processes, and wait for their end."""
        self.is_closing = True
        for task in self._starting:
            task.cancel()
        for each in self._alive:
            each.kill("the server ends")
        while self._alive:
            await asyncio.sleep(0.005)

    async def watch(self) -> None:
        """Check time limits and memory periodically, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._ticks += 1
            self._expire()
            if self._ticks % _MEMORY_TICKS == 0:
                self._weigh()

    def _start(self, generation: Generation) -> ModelProcess:
        return self._adopt(generation, StartedModel(generation.config, self._folder, generation.model_dir))

    def _adopt(self, generation: Generation, started: StartedModel) -> ModelProcess:
        process = ModelProcess(started, lambda each: self._told(generation, each), self._answered)
        generation.processes.append(process)
        self._alive.add(process)
        task = asyncio.ensure_future(process.listen(started.link))
        task.add_done_callback(lambda done: done.result())
        self._changed()
        return process

    def _told(self, generation: Generation, one: ModelProcess) -> None:
        if one.state == process.READY:
            if one.is_idle and self.queue and generation is self.current:
                self._feed(one)
            if one.is_new:
                one.is_new = False
                self._became_ready(generation, one)
        elif one.state == process.ENDED:
            self._ended(generation, one)

    def _became_ready(self, generation: Generation, one: ModelProcess) -> None:
        _log.info("model process %d is ready after %.1f s (%s)", one.pid, one.load_s, one.kind)
        self._pause_s = _FIRST_PAUSE_S
        if (old := self._successor_of.pop(one, None)) is not None:
            old.retire("memory")
        if not generation.loaded.done() and all(each.state == process.READY for each in generation.processes):
            generation.loaded.set_result(None)
        self._changed()

    def _ended(self, generation: Generation, one: ModelProcess) -> None:
        lost = [waiting for number in one.in_hand if (waiting := self._in_hand.pop(number, None)) is not None]
        for waiting in lost:
            waiting.answer(_lost(one))
        one.in_hand = ()
        self._alive.discard(one)
        if one in generation.processes:
            generation.processes.remove(one)
        self._successor_of.pop(one, None)
        # Don't replace this process if its replacement is already loading.
        is_followed = one in self._successor_of.values() or one.is_retired
        if not is_followed and not self.is_closing and generation in (self.current, self.next):
            self._replace(generation, one)
        self._changed()

    def _replace(self, generation: Generation, one: ModelProcess) -> None:
        if one.error is not None:
            _log.error("model process %d could not load: %s", one.pid, one.error)
            if not generation.loaded.done():
                generation.loaded.set_exception(LoadError(one.error))
                return
        else:
            _log.warning("model process %d is replaced: %s", one.pid, one.reason)
        self.restarts[one.cause] += 1
        pause_s = 0.0
        if one.error is not None:
            pause_s, self._pause_s = self._pause_s, min(_LAST_PAUSE_S, self._pause_s * 2)
        task = asyncio.ensure_future(self._again(generation, pause_s))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _again(self, generation: Generation, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s)
            # Start no process if, during the pause, the configuration was replaced or the number of workers was reduced.
            if (
                self.is_closing
                or generation not in (self.current, self.next)
                or len(generation.processes) >= generation.config.workers
            ):
                return
            try:
                await loop.run_in_executor(None, verify, generation.config)
                if len(generation.processes) < generation.config.workers and not self.is_closing:
                    self._start(generation)
                return
            except (ServingError, OSError) as error:
                _log.error("a model process could not load: %s", error)
                pause_s, self._pause_s = self._pause_s, min(_LAST_PAUSE_S, self._pause_s * 2)

    def _feed_all(self) -> None:
        for each in self.processes:
            if self.queue and each.is_idle:
                self._feed(each)

    def _expire(self) -> None:
        now = time.monotonic()
        limit = self.config.timeout_s
        for each in self._alive:
            # A thread that runs the model can't be stopped, so kill its process.
            if each.in_hand and now - each.since > limit:
                each.kill_for("time-out", f"it had no answer after {limit:g} s")
            elif each.state == process.LOADING and now - each.started_at > each.config.load_timeout_s:
                each.error = f"loading took more than load_timeout_s={each.config.load_timeout_s:g} seconds."
                each.kill("it did not load in time")
        while self.queue and now - self.queue[0].since > limit:
            self.queue.popleft().answer(None)

    def _weigh(self) -> None:
        limit = self.config.memory_limit_bytes
        if limit is None or self.current is None:
            return
        for each in list(self.processes):
            size = each.resident_bytes() if each.state == process.READY else 0
            if size <= limit:
                continue
            text = f"it has {size >> 20} MiB in memory, more than memory_limit_bytes={limit} ({limit >> 20} MiB)"
            if size > 2 * limit:
                each.kill_for("memory", text)
            elif each not in self._successor_of.values():
                # Start the replacement now; the old process serves until the replacement is ready.
                each.cause = "memory"
                _log.warning("model process %d is replaced: %s", each.pid, text)
                self.restarts["memory"] += 1
                self._successor_of[self._start(self.current)] = each


def _lost(one: ModelProcess) -> wire.Reply:
    if one.cause == "time-out":
        # Azure's server sends the same text, but with status 500.
        return error(504, f"Scoring timeout after {one.config.timeout_s * 1000:g} ms", in_script=True)
    return error(502, f"the model process ended while it had this request: {one.reason}.")
