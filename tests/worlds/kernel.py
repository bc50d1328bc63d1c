"""A scheduler of tasks in simulated time.

A task is a greenlet in the place of a thread. One task runs at a time, until it waits. The seed decides which of several tasks
that could run is the next. If all tasks wait, the clock jumps to the next timer, so a simulated minute takes milliseconds.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import signal
import zlib
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

#: Simulated seconds that pass with each reading of the clock, so that a loop that only polls it comes to its end.
_READING_S = 1e-6
#: The time of simulated clocks at the beginning of a world, in seconds since 1970.
EPOCH = 2_000_000_000.0
#: Number of switches between tasks after which a world counts as an endless loop, if the clock has not advanced
#: meanwhile.
_MOST_SWITCHES = 400_000


class StuckError(Exception):
    """The error of a world that does not end."""


class Host:
    """A machine. `offset_s` is the difference of its clock to the others."""

    def __init__(self, name: str) -> None:
        self.name, self.offset_s, self.boot_id = name, 0.0, name
        self.is_off = False
        #: Tasks do not run before this time, as on a machine that is overloaded or suspended.
        self.resumes_at = 0.0
        self.disk: Any = None


class Process:
    """A simulated process."""

    def __init__(self, kernel: Kernel, name: str, host: Host, parent: Process | None) -> None:
        self.kernel, self.name, self.host, self.parent = kernel, name, host, parent
        self.pid = next(kernel.pids)
        self.tasks: set[Task] = set()
        self.handlers: dict[int, Any] = {}
        self.wakeup_fd = -1
        self.children: set[Process] = set()
        self.zombies: list[tuple[int, int]] = []
        self.waiters: list[Task] = []
        self.env: dict[str, str] = {}
        self.fds: set[int] = set()
        self.locks: set[int] = set()
        self.status: int | None = None
        self.stdout: Any = None
        self.on_end: Callable[[], None] = lambda: None
        if parent is not None:
            parent.children.add(self)
        kernel.processes[self.pid] = self

    def __hash__(self) -> int:
        return self.pid  # a fixed number, because the order of sets must not depend on memory addresses

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def end(self, status: int) -> None:
        """End the process, with a wait status. Its tasks stop where they are."""
        if self.status is not None:
            return
        self.status = status
        self.kernel.note(f"{self.name} ends with {status}")
        for task in self.tasks:
            task.is_dead = True
        self.kernel.release(self)
        self.on_end()
        for child in list(self.children):
            # The guardian of a supervisor is a subreaper, and adopts the orphans.
            child.parent = self.parent
            if self.parent is not None and self.parent.is_alive:
                self.parent.children.add(child)
        if self.parent is not None and self.parent.is_alive:
            self.parent.children.discard(self)
            self.parent.zombies.append((self.pid, status))
            for task in self.parent.waiters:
                self.kernel.wake(task)
            self.parent.deliver(signal.SIGCHLD)
        if self.kernel.task is not None and self.kernel.task.process is self:
            self.kernel.switch()

    def deliver(self, number: int) -> bool:
        """Deliver a signal. Return False if the process has ended."""
        if not self.is_alive:
            return False
        handler = self.handlers.get(number, signal.SIG_DFL)
        if number == signal.SIGKILL or (
            handler is signal.SIG_DFL and number not in (0, signal.SIGCHLD, signal.SIGCONT)
        ):
            self.end(number)
        elif callable(handler):
            if self.wakeup_fd >= 0:
                with contextlib.suppress(BlockingIOError, KeyError):
                    self.kernel.fds[self.wakeup_fd].write(b"\0", is_nonblocking=True)
            self.kernel.spawn(self, lambda: handler(number, None), f"signal {number}")
        return True


class Task:
    """A simulated thread."""

    __slots__ = ("greenlet", "ident", "is_dead", "is_parked", "is_woken", "name", "process", "thread", "token")

    def __init__(self, process: Process, work: Callable[[], object], name: str, ident: int) -> None:
        self.process, self.name, self.ident = process, name, ident
        self.greenlet = greenlet(work, process.kernel.hub)
        self.token = 0
        self.is_dead = self.is_parked = self.is_woken = False
        self.thread: Any = None


class Kernel:
    """The state of one world.

    Args:
        seed: Decides the order of the tasks, and everything that is drawn at random.
        preempts: The share of the points of a task at which another task may run instead.
    """

    #: Function that releases the lock of an open file when the file's last process has ended.
    unlock: Callable[[int], None]
    #: Whether to keep each switch between tasks as an event.
    is_detailed = False

    def __init__(self, seed: int, preempts: float = 0.1, *, keeps_events: bool = False) -> None:
        self.chance = random.Random(f"world {seed}")
        self.random = self.chance.random
        self.preempts, self.now = preempts, 0.0
        self.hub = getcurrent()
        self.task: Task | None = None
        self.ready: list[Task] = []
        self.timers: list[tuple[float, int, Task | None, Any]] = []
        self.count = itertools.count()
        self.pids = itertools.count(2001)
        self.processes: dict[int, Process] = {}
        self.fds: dict[int, Any] = {}
        self.fd_numbers = itertools.count(1 << 20)
        #: Open file with a lock (flock) -> the processes that have it open.
        self.lock_holders: dict[int, set[Process]] = {}
        self.trace, self.events = 0, 0
        self.kept: list[str] | None = [] if keeps_events else None
        #: Exceptions that no task has caught: (process, thread, exception).
        self.uncaught: list[tuple[str, str, BaseException]] = []
        #: (number of a switch between tasks, function to call before it), the next one last.
        self.at_switches: list[tuple[int, Callable[[], object]]] = []
        self.switches = 0
        self.is_over = False
        self.cluster: Any = None
        #: Tasks of ended processes. Without a reference, greenlets would run their `finally` blocks, as no killed process does.
        self.graveyard: list[Task] = []

    # --- tasks

    def spawn(self, process: Process, work: Callable[[], object], name: str = "main") -> Task:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self.note(f"{process.name}/{name} raised {error!r}")
                # A disk error may end the main thread of a program.
                if name != "main" or not isinstance(error, OSError):
                    self.uncaught.append((process.name, name, error))
                if name == "main":
                    process.end(1 << 8)
            process.tasks.discard(task)
            task.is_dead = True

        task = Task(process, run, name, next(self.count) + 1)
        process.tasks.add(task)
        self.graveyard.append(task)
        if process.is_alive:
            self.ready.append(task)
        return task

    def switch(self) -> None:
        """Let other tasks run until this task is ready."""
        self.hub.switch()

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait until another task calls `wake`. Return False after the timeout."""
        task = self.task
        assert task is not None
        task.token += 1
        task.is_parked, task.is_woken = True, False
        if timeout_s is not None:
            heapq.heappush(self.timers, (self.now + max(timeout_s, 0.0), next(self.count), task, task.token))
        self.hub.switch()
        return task.is_woken

    def wake(self, task: Task) -> None:
        if task.is_parked and not task.is_dead:
            task.is_parked, task.is_woken = False, True
            self.ready.append(task)

    def point(self) -> None:
        """Let another task run here, if the seed says so."""
        task = self.task
        if task is not None and self.random() < self.preempts and self.ready:
            self.ready.append(task)
            self.hub.switch()

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            self.park(until - self.now)
            if self.now >= until:
                return

    def after(self, delay_s: float, work: Callable[[], object]) -> None:
        """Call a function later, outside all tasks. It must not wait."""
        heapq.heappush(self.timers, (self.now + max(delay_s, 0.0), next(self.count), None, work))

    def monotonic(self) -> float:
        self.now += _READING_S
        return self.now

    def time(self) -> float:
        task = self.task
        return EPOCH + self.monotonic() + (task.process.host.offset_s if task is not None else 0.0)

    def run(self, until_s: float) -> None:
        """Run the tasks until this time, until all are done, or until the world is over."""
        switches, last = 0, self.now
        while not self.is_over:
            timers, ready = self.timers, self.ready
            while timers and (timers[0][0] <= self.now or not ready):
                at_s, _, task, what = heapq.heappop(timers)
                if at_s > until_s:
                    return
                if task is None:
                    self.now = max(self.now, at_s)
                    what()
                elif task.token == what and task.is_parked and not task.is_dead:
                    self.now = max(self.now, at_s)
                    task.is_parked = False
                    ready.append(task)
            if not ready:
                return
            index = int(self.random() * len(ready)) if len(ready) > 1 else 0
            task = ready[index]
            ready[index] = ready[-1]
            ready.pop()
            if task.is_dead:
                continue
            host = task.process.host
            if host.is_off:
                continue
            if host.resumes_at > self.now:
                self.after(host.resumes_at - self.now, lambda task=task: self.ready.append(task))
                continue
            switches += 1
            if self.now > last + 0.001:
                switches, last = 0, self.now
            if switches > _MOST_SWITCHES:
                raise StuckError(f"{task.process.name}/{task.name} runs without end at {self.now:.3f}")
            self.events += 1
            self.switches += 1
            if self.at_switches and self.switches >= self.at_switches[-1][0]:
                self.at_switches.pop()[1]()
                if task.is_dead:
                    continue
            self.trace = zlib.crc32(b"%d %.5f" % (task.ident, self.now), self.trace)
            if self.kept is not None and self.is_detailed:
                self.kept.append(f"{self.now:12.6f}  {task.process.name}/{task.name}")
            self.task = task
            task.greenlet.switch()
            self.task = None

    # --- processes

    def release(self, process: Process) -> None:
        """Close what an ended process had open."""
        for fd in list(process.fds):
            end = self.fds.pop(fd, None)
            if end is not None:
                end.drop()
        for fd in list(process.locks):
            holders = self.lock_holders.get(fd, set())
            holders.discard(process)
            if not holders:
                self.lock_holders.pop(fd, None)
                self.unlock(fd)
        process.locks.clear()

    @property
    def process(self) -> Process:
        assert self.task is not None
        return self.task.process

    def note(self, text: str) -> None:
        """Add an event to the world's trace."""
        self.events += 1
        self.trace = zlib.crc32(f"{self.now:.5f} {text}".encode(), self.trace)
        if self.kept is not None:
            self.kept.append(f"{self.now:10.4f}  {text}")


#: The kernel of the world that this process simulates now.
current: Kernel | None = None
