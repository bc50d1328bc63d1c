"""Starts the programs that have libraries loaded, each when it is first needed, and has scripts run by them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.system import locks, processes
from tests.warm import sharing
from tests.warm.hand_over import ask
from tests.warm.kinds import KINDS, TORCH

_PROGRAM = Path(__file__).with_name("program.py")
#: Of this process's variables, those that a program is loaded with; a script has those that it is given.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "OMP_WAIT_POLICY")


class Process:
    """A script under way. It ends with this object, or with this process, at the latest."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._code: int | None = None
        self._pid: int | None = None

    @property
    def has_ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code is not None

    def wait(self, timeout_s: float | None) -> int:
        """Its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        while self._code is None:
            self._connection.settimeout(timeout_s)
            try:
                told = self._connection.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked script", timeout_s or 0.0) from None
            assert told, "the program that started it has ended"
            if self._pid is None:
                self._pid = int(told)
            else:
                self._code = int(told)
                self._connection.close()
        return self._code

    def kill(self) -> None:
        """End it, if it has not ended, and wait until it has. Harmless the second time."""
        if self._code is None:
            self._connection.shutdown(socket.SHUT_WR)
            self.wait(60)


class Program:
    """A Python that has loaded what its kind says. also: modules that it loads besides.

    at: where it listens; a folder of its own by default. lifeline: what it reads, and ends with; by default a pipe of its
    own, which `close` closes.
    """

    def __init__(self, kind: str = TORCH, *also: str, at: Path | None = None, lifeline: int = subprocess.PIPE) -> None:
        # Not in a test's folder: the path of a socket may have 107 bytes.
        self._folder = None if at else tempfile.TemporaryDirectory(prefix="pl-warm-", dir="/tmp")
        self.socket = str(at) if self._folder is None else os.path.join(self._folder.name, "socket")
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), self.socket, *KINDS[kind].loads, *also],
            stdin=lifeline,
            env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | KINDS[kind].variables,
            cwd="/",
        )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def path(self) -> str:
        """Of its socket, once it takes scripts."""
        while not os.path.exists(self.socket):
            assert not self.has_ended, "the program that loads it has ended"
            time.sleep(0.02)
        return self.socket

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        folder: Path | None = None,
        errors: int | None = None,
        **options: bool,
    ) -> Process:
        """Run a script with these arguments. output: a descriptor, for all that it prints; errors: for its standard error.

        folder: in which it runs, this process's own by default. options: see `ask`.
        """
        with open(os.devnull) as nothing:
            fds = {0: nothing.fileno(), 1: output, 2: output if errors is None else errors}
            return Process(ask(self.path, words, environment, folder or Path.cwd(), fds, **options))

    @property
    def is_own(self) -> bool:
        """False of one that ends with its lifeline."""
        return self.process.stdin is not None

    def close(self) -> int | None:
        """Its exit code, once it has ended; None of one that ends later."""
        if self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        return self.process.poll()


class SharedProgram(Program):
    """One that another of pytest's processes has started."""

    def __init__(self, pid: int, socket: str) -> None:
        self.socket, self._pid = socket, pid

    @property
    def has_ended(self) -> bool:
        return not processes.is_alive(self._pid)

    @property
    def is_own(self) -> bool:
        return False

    def close(self) -> int | None:
        return None


_started: dict[tuple[int, str, str | None], Program] = {}
#: Worlds may be started in several threads at once.
_starting = threading.Lock()


def program(rank: int = 0, kind: str = TORCH, also: str | None = None) -> Program:
    """The program that has this loaded for this rank, and this module too. It gives its hash seed to what it starts."""
    with _starting:
        place = rank % KINDS[kind].programs, kind, also
        if place in _started and _started[place].has_ended:
            # A test that kills at random may hit it; those after it are not to fail for that.
            print(f"the program that has {kind} loaded ended with {_started.pop(place).close()}", file=sys.stderr)
        if place not in _started:
            _started[place] = _of_all(place) if sharing.folder and KINDS[kind].is_shared else _new(place)
        return _started[place]


def _new(place: tuple[int, str, str | None], **options: Any) -> Program:
    _, kind, also = place
    return Program(kind, *([also] if also else []), **options)


def _of_all(place: tuple[int, str, str | None]) -> Program:
    """The one that all of pytest's processes use, which this one starts if it is not there."""
    assert sharing.folder is not None
    link = sharing.folder / hashlib.sha256(repr(place).encode()).hexdigest()[:16]
    with locks.locked(sharing.folder / "lock"):
        if (there := sharing.found(link)) and processes.is_alive(there[0]):
            return SharedProgram(*there)
        with sharing.lifeline(sharing.folder) as fd:
            started = _new(place, at=sharing.unused(link), lifeline=fd)
        sharing.note(link, started.process.pid, started.socket)
        return started


def close_all() -> None:
    """End those that `program` has started and that are not shared."""
    for place in [place for place, one in _started.items() if one.is_own]:
        _started.pop(place).close()
