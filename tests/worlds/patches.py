"""Put simulated threads, clocks, processes, sockets and files in the place of the standard library's.

`install` runs in a process of its own before Paceline is imported, because modules bind some of these names at their import.
"""

from __future__ import annotations

import builtins
import datetime
import io
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.worlds import descriptors, disks
from tests.worlds import kernel as k
from tests.worlds.kernel import Kernel, Process, Task

_real = {
    name: getattr(time, name) for name in ("time", "monotonic", "perf_counter", "sleep", "time_ns", "monotonic_ns")
}
_get_ident, _current_thread, _Thread = threading.get_ident, threading.current_thread, threading.Thread
_getpid, _kill, _urandom = os.getpid, os.kill, os.urandom


def _task() -> Task | None:
    return None if k.current is None else k.current.task


class Lock:
    """A lock of `threading`, for tasks."""

    __slots__ = ("__weakref__", "_holder", "_waiting", "is_held")

    def __init__(self) -> None:
        self.is_held, self._holder = False, None
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = k.current
        task = None if kernel is None else kernel.task
        if task is None:
            self.is_held = True
            return True
        # In reality, each process has its own copy of a module's lock. So a lock is free if its holder's process has
        # ended.
        if self.is_held and self._holder is not None and self._holder.process.status is not None:
            self.is_held = False
        if not blocking:
            if self.is_held:
                return False
        else:
            if not self.is_held:
                kernel.point()
            until = kernel.now + timeout if timeout >= 0 else None
            while self.is_held:
                if until is not None and kernel.now >= until:
                    return False
                self._waiting.append(task)
                kernel.park(None if until is None else until - kernel.now)
                if task in self._waiting:
                    self._waiting.remove(task)
        self.is_held, self._holder = True, task
        return True

    def release(self) -> None:
        if not self.is_held:
            raise RuntimeError("release unlocked lock")
        self.is_held, self._holder = False, None
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.process.kernel.wake(task)

    def locked(self) -> bool:
        return self.is_held

    def _at_fork_reinit(self) -> None:
        self.__init__()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """A thread of `threading`, as a task."""

    _initialized = True

    def __init__(self, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._number = next(k.current.count) if k.current is not None else 0
        self.name, self.daemon = name or f"Thread-{self._number}", bool(daemon)
        self._task: Task | None = None
        self._is_done = False
        self._joining: list[Task] = []

    def __hash__(self) -> int:
        return self._number  # executors keep their threads in a set, whose order must not depend on addresses

    def start(self) -> None:
        kernel = k.current
        assert kernel is not None
        self._task = kernel.spawn(kernel.process, self._bootstrap, self.name)
        self._task.thread = self
        kernel.point()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        kernel = k.current
        assert kernel is not None
        assert kernel.task is not None
        until = None if timeout is None else kernel.now + timeout
        while not self._is_done and (until is None or kernel.now < until):
            self._joining.append(kernel.task)
            kernel.park(None if until is None else until - kernel.now)

    def is_alive(self) -> bool:
        return self._task is not None and not self._is_done

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    native_id = ident

    def _bootstrap(self) -> None:
        try:
            self.run()
        finally:
            self._is_done = True
            for task in self._joining:
                task.process.kernel.wake(task)


class DateTime(datetime.datetime):
    """`datetime.datetime`, with the simulated time."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.fromtimestamp(time.time(), datetime.timezone.utc).replace(tzinfo=None)


class Output:
    """Standard output: the file of the process that writes."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        task = _task()
        if task is None:
            return sys.__stdout__.write(text)
        process = task.process
        if isinstance(process.stdout, int):
            data = text.encode()
            while data:
                data = data[os.write(process.stdout, data) :]
        elif k.current is not None and k.current.kept is not None and text.strip():
            k.current.note(f"{process.name} prints {text.rstrip()}")
        return len(text)

    def flush(self) -> None:
        if _task() is None:
            sys.__stdout__.flush()


def _clock(name: str, simulated: Callable[[Kernel], float]) -> Callable[[], float]:
    real = _real[name]

    def read() -> float:
        kernel = k.current
        return real() if kernel is None else simulated(kernel)

    return read


def _sleep(seconds: float) -> None:
    if (task := _task()) is None:
        _real["sleep"](seconds)
    else:
        task.process.kernel.sleep(seconds)


def _gmtime(real: Callable[..., time.struct_time]) -> Callable[..., time.struct_time]:
    return lambda seconds=None: real(time.time() if seconds is None else seconds)


# --- processes


def _process() -> Process | None:
    task = _task()
    return None if task is None else task.process


def _parent_pid(process: Process | None) -> int:
    return process.parent.pid if process is not None and process.parent is not None else 1


def _kill_process(pid: int, number: int) -> None:
    kernel = k.current
    if kernel is None:
        return _kill(pid, number)
    kernel.point()
    process = kernel.processes.get(pid)
    if process is None or not (process.is_alive or _is_zombie(process)):
        raise ProcessLookupError(3, "No such process")
    if number:
        process.deliver(number)
    return None


def _is_zombie(process: Process) -> bool:
    return process.parent is not None and any(pid == process.pid for pid, _ in process.parent.zombies)


def _wait_for_child(pid: int, options: int) -> tuple[int, int]:
    process = _process()
    assert process is not None
    while True:
        for one in process.zombies:
            if pid in (-1, one[0]):
                process.zombies.remove(one)
                return one
        if not process.children:
            raise ChildProcessError(10, "No child processes")
        if options & os.WNOHANG:
            return 0, 0
        assert process.kernel.task is not None
        process.waiters.append(process.kernel.task)
        process.kernel.park()
        process.waiters.remove(process.kernel.task)


class _Usage:
    ru_maxrss = 0


def _waitid(kind: int, pid: int, options: int) -> Any:
    process = _process()
    assert process is not None
    if not process.children and not process.zombies:
        raise ChildProcessError(10, "No child processes")
    return type("Found", (), {"si_pid": process.zombies[0][0]}) if process.zombies else None


def _signal(number: int, handler: Any) -> Any:
    process = _process()
    assert process is not None
    old = process.handlers.get(number, signal.SIG_DFL)
    process.handlers[number] = handler
    return old


def _set_wakeup_fd(fd: int, *, warn_on_full_buffer: bool = True) -> int:
    process = _process()
    assert process is not None
    old, process.wakeup_fd = process.wakeup_fd, fd
    return old


def _no_program(*args: Any, **_: Any) -> Any:
    raise FileNotFoundError(2, "simulated machines have no programs", str(args[0] if args else ""))


def table(kernel: Kernel) -> list[tuple[int, int, str]]:
    """Return (pid, parent's pid, state) of the processes on this task's machine."""
    host = kernel.process.host
    return [
        (one.pid, one.parent.pid if one.parent else 1, "S" if one.is_alive else "Z")
        for one in kernel.processes.values()
        if one.host is host and (one.is_alive or _is_zombie(one))
    ]


def install(kernel: Kernel, folder: str) -> disks.Disks:
    """Replace the standard library's functions, in all modules that are loaded. Return the disks of the world."""
    k.current = kernel
    if "paceline" in sys.modules:
        raise RuntimeError("Paceline was imported before its clocks and files were replaced")
    found = disks.Disks(kernel, folder)
    changes: dict[tuple[Any, str], Any] = _replacements(kernel, found)
    swapped = {id(getattr(owner, name)): new for (owner, name), new in changes.items() if hasattr(owner, name)}
    # Keep the old objects alive, so that no new object gets the same id.
    keep = [getattr(owner, name) for owner, name in changes if hasattr(owner, name)]
    for (owner, name), new in changes.items():
        setattr(owner, name, new)
    for name, module in list(sys.modules.items()):
        if name.startswith(("tests.worlds", "greenlet", "importlib", "_", "zipimport")) or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if not attribute.startswith("__") and (new := swapped.get(id(value))) is not None:
                setattr(module, attribute, new)
    threading._allocate_lock = Lock  # type: ignore[attr-defined]
    threading._CRLock = None  # type: ignore[attr-defined]
    keep.clear()
    return found


def _replacements(kernel: Kernel, files: disks.Disks) -> dict[tuple[Any, str], Any]:
    def read(fd: int, size: int) -> bytes:
        if (end := kernel.fds.get(fd)) is not None:
            kernel.point()
            return end.read(size)
        return disks._os["read"](fd, size)

    def pipe() -> tuple[int, int]:
        reading, writing = descriptors.pipe_ends(kernel)
        return reading.open(), writing.open()

    def dup(fd: int) -> int:
        return kernel.fds[fd].open() if fd in kernel.fds else disks._os["dup"](fd)

    def set_blocking(fd: int, is_blocking: bool) -> None:
        if fd in kernel.fds:
            kernel.fds[fd].is_nonblocking = not is_blocking
        else:
            disks._os["set_blocking"](fd, is_blocking)

    def make_socket(family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> descriptors.Socket:
        return descriptors.Socket(family, type, proto, fileno)

    clocks = {
        "time": _clock("time", Kernel.time),
        "monotonic": _clock("monotonic", Kernel.monotonic),
        "perf_counter": _clock("perf_counter", Kernel.monotonic),
        "time_ns": _clock("time_ns", lambda found: int(found.time() * 1e9)),
        "monotonic_ns": _clock("monotonic_ns", lambda found: int(found.monotonic() * 1e9)),
        "thread_time": lambda: 0.0,
        "process_time": lambda: 0.0,
        "sleep": _sleep,
        "gmtime": _gmtime(time.gmtime),
        "localtime": _gmtime(time.gmtime),
    }
    of_files = disks.patches(files)
    names = iter(lambda: f"{kernel.chance.getrandbits(32):08x}", None)
    return {
        **of_files,
        (builtins, "open"): of_files[io, "open"],
        **{(time, name): new for name, new in clocks.items()},
        (datetime, "datetime"): DateTime,
        (threading, "Lock"): Lock,
        (threading, "_allocate_lock"): Lock,
        (threading, "Thread"): Thread,
        (threading, "get_ident"): lambda: _task().ident if _task() else _get_ident(),
        (threading, "current_thread"): lambda: _task().thread if _task() else _current_thread(),
        (queue, "SimpleQueue"): queue._PySimpleQueue,  # type: ignore[attr-defined]
        (os, "read"): read,
        (os, "pipe"): pipe,
        (os, "dup"): dup,
        (os, "set_blocking"): set_blocking,
        (os, "getpid"): lambda: _process().pid if _process() else _getpid(),
        (os, "getppid"): lambda: _parent_pid(_process()),
        (os, "kill"): _kill_process,
        (os, "killpg"): _kill_process,
        (os, "waitpid"): _wait_for_child,
        (os, "wait4"): lambda pid, options: (*_wait_for_child(pid, options), _Usage),
        (os, "waitid"): _waitid,
        (os, "fork"): _no_program,
        (os, "urandom"): kernel.chance.randbytes,
        (subprocess, "Popen"): _no_program,
        (subprocess, "run"): _no_program,
        (select, "select"): descriptors.select,
        (select, "poll"): descriptors.Poll,
        (select, "epoll"): descriptors.Epoll,
        (socket, "socket"): make_socket,
        (socket, "socketpair"): descriptors.socketpair,
        (socket, "gethostname"): lambda: _process().host.name if _process() else "here",
        (signal, "signal"): _signal,
        (signal, "set_wakeup_fd"): _set_wakeup_fd,
        (tempfile, "_get_candidate_names"): lambda: names,
        (random, "_urandom"): kernel.chance.randbytes,
    }
