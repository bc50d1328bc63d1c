"""Starts the programs that have libraries loaded, each when it is first needed, and has scripts run by them."""

from __future__ import annotations

import contextlib
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
    """A Python that has loaded what its kind says. also: modules that it loads besides."""

    def __init__(self, kind: str = TORCH, *also: str) -> None:
        # Not in a test's folder: the path of a socket may have 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="pl-warm-", dir="/tmp")
        self._path = os.path.join(self._folder.name, "socket")
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), self._path, *KINDS[kind].loads, *also],
            stdin=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | KINDS[kind].variables,
            cwd="/",
        )

    @property
    def path(self) -> str:
        """Of its socket, once it takes scripts."""
        while not os.path.exists(self._path):
            assert self.process.poll() is None, "the program that loads it has ended"
            time.sleep(0.02)
        return self._path

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

    def close(self) -> int:
        """Its exit code, once it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait()
        self._folder.cleanup()
        return code


_started: dict[tuple[int, str, str | None], Program] = {}
#: Worlds may be started in several threads at once.
_starting = threading.Lock()


def program(rank: int = 0, kind: str = TORCH, also: str | None = None) -> Program:
    """The program that has this loaded for this rank, and this module too. It gives its hash seed to what it starts."""
    with _starting:
        place = rank % KINDS[kind].programs, kind, also
        if place in _started and _started[place].process.poll() is not None:
            # A test that kills at random may hit it; those after it are not to fail for that.
            print(f"the program that has {kind} loaded ended with {_started.pop(place).close()}", file=sys.stderr)
        if place not in _started:
            _started[place] = Program(kind, *([also] if also else []))
        return _started[place]


def close_all() -> None:
    """End those that `program` has started."""
    while _started:
        _started.popitem()[1].close()
