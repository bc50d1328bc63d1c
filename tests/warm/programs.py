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
#: Variables of this process that are passed to a program from which scripts are forked. A script gets the variables of
#: its own request.
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
            self._hear(timeout_s)
        return self._code

    @property
    def pid(self) -> int:
        while self._pid is None:
            self._hear(60)
        return self._pid

    def send(self, number: int) -> None:
        """Send it this signal, if it has not ended."""
        pid = self.pid
        if not self.has_ended:
            os.kill(pid, number)

    def _hear(self, timeout_s: float | None) -> None:
        """Read its pid or its end, whichever comes next."""
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

    def kill(self) -> None:
        """End it, if it has not ended, and wait until it has. Harmless the second time."""
        if self._code is None:
            self._connection.shutdown(socket.SHUT_WR)
            self.wait(60)


class Program:
    """A Python that has libraries loaded, and runs scripts in processes that are forked from it."""

    def __init__(self, socket: str) -> None:
        self.socket = socket

    @property
    def has_ended(self) -> bool:
        raise NotImplementedError

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
        **options: Any,
    ) -> Process:
        """Run a script with these arguments. output: a descriptor, for all that it prints; errors: for its standard error.

        folder: in which it runs, this process's own by default. options: see `ask`.
        """
        with open(os.devnull) as nothing:
            fds = {0: nothing.fileno(), 1: output, 2: output if errors is None else errors}
            return Process(ask(self.path, words, environment, folder or Path.cwd(), fds, **options))


class OwnProgram(Program):
    """A program of this process only.

    kind: the libraries that it loads. also: modules that it loads besides.
    """

    def __init__(self, kind: str, *also: str) -> None:
        # Don't use the folder of a test, because the path of a socket may have at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="pl-warm-", dir="/tmp")
        super().__init__(os.path.join(self._folder.name, "socket"))
        command, options = _started_with(self.socket, kind, *also)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, **options)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> int:
        """Its exit code, once it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self._folder.cleanup()
        return self.process.returncode


class SharedProgram(Program):
    """One of all of pytest's processes. It is below none of them: a test may kill all that is below its own process."""

    def __init__(self, pid: int, socket: str) -> None:
        super().__init__(socket)
        self.pid = pid

    @property
    def has_ended(self) -> bool:
        return not processes.is_alive(self.pid)

    @classmethod
    def started(cls, at: Path, lifeline: int, kind: str, *also: str) -> SharedProgram:
        """Start a new one. at: its socket. lifeline: its standard input, with which it ends."""
        command, options = _started_with(str(at), kind, *also)
        pid = subprocess.run(
            [*command, "--apart"], stdin=lifeline, stdout=subprocess.PIPE, check=True, **options
        ).stdout
        return cls(int(pid), str(at))


def _started_with(socket: str, kind: str, *also: str) -> tuple[list[str], dict[str, Any]]:
    """The command of a program that listens there, and with which options of `subprocess` it is started."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment = kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **KINDS[kind].variables}
    return [sys.executable, str(_PROGRAM), socket, *KINDS[kind].loads, *also], {"env": environment, "cwd": "/"}


_started: dict[tuple[int, str, str | None], Program] = {}
#: Several threads may start programs at the same time.
_starting = threading.Lock()


def program(rank: int = 0, kind: str = TORCH, also: str | None = None) -> Program:
    """Return the program with these libraries for this rank, and with this module too. It gives its hash seed to its children."""
    with _starting:
        place = rank % KINDS[kind].programs, kind, also
        if place in _started and _started[place].has_ended:
            # A test that kills processes at random may kill this program. Later tests must not fail because of that.
            print(f"the program that has {kind} loaded has ended: {_closed(_started.pop(place))}", file=sys.stderr)
        if place not in _started:
            modules = [also] if also else []
            is_shared = sharing.folder and KINDS[kind].is_shared
            _started[place] = _of_all(place, *modules) if is_shared else OwnProgram(kind, *modules)
        return _started[place]


def _of_all(place: tuple[int, str, str | None], *also: str) -> SharedProgram:
    """The one that all of pytest's processes use, which this one starts if it is not there."""
    assert sharing.folder is not None
    link = sharing.folder / hashlib.sha256(repr(place).encode()).hexdigest()[:16]
    with locks.locked(sharing.folder / "lock"):
        if (there := sharing.found(link)) and processes.is_alive(there[0]):
            return SharedProgram(*there)
        with sharing.lifeline(sharing.folder) as fd:
            started = SharedProgram.started(sharing.unused(link), fd, place[1], *also)
        sharing.note(link, started.pid, started.socket)
        return started


def close_all() -> None:
    """End those that `program` has started for this process alone."""
    for place in [place for place, one in _started.items() if isinstance(one, OwnProgram)]:
        _closed(_started.pop(place))


def _closed(program: Program) -> str:
    """Return how it ended, as far as this process knows."""
    return f"exit code {program.close()}" if isinstance(program, OwnProgram) else "it was one of all processes"
