"""Supervisors that are forked from a program which has loaded what they load: that takes a processor 0.02 s in place of 0.1 s,
and the tests start more than a thousand.

Those that show how a supervisor is started, and that any of its processes may be killed, start it as users do (`STARTED`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from paceline.system import detached, processes
from tests.warm.hand_over import ask
from tests.warm.programs import OwnProgram

_PROGRAM = Path(__file__).with_name("supervising.py")
_LIBRARY = Path(detached.__file__).parents[1]
#: Bytes for the command line and for the variables of what is forked, which the program has to have at its own start.
_WORDS, _VARIABLES = 4_000, 24_000
#: With others of these, what the program has loaded would be other, or would behave in another way.
_ALIKE = ("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE")
#: Folders and files of tests whose supervisors are started in the ordinary way.
STARTED = (
    "tests/chaos/",
    "tests/engines/local/test_conformance.py",
    "tests/supervisor/",
    "tests/system/test_detached.py",
    "tests/targets/test_supervisors.py",
)


class Forked:
    """What `detached.start` returns of a process, as far as it is asked for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None while it runs, else 0: how it has ended nobody is told."""
        if self.returncode is None and not processes.is_alive(self.pid):
            self.returncode = 0
        return self.returncode


class Supervisors:
    """The programs that they are forked from, each started when it is first needed; they end with this process."""

    def __init__(self) -> None:
        #: Of each Python that supervises: its workers run on the same one (`tests.warm.python`).
        self._programs: dict[str, OwnProgram] = {}
        # Now, for the test that starts the first may have set others.
        self._alike = {name: os.environ.get(name) for name in _ALIKE}
        self._kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", *_ALIKE)}

    def popen(self, words: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        """In the place of `subprocess.Popen`, as `paceline.system.detached` calls it."""
        if not self._can(words, env):
            return subprocess.Popen(words, env=env, **options)
        return Forked(self._ask(words, env, **options))

    def _can(self, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a fork would do the same."""
        if words[:3] != [sys.executable, "-m", "paceline.supervisor"]:
            return False
        if not os.path.samefile(os.path.join(environment["PYTHONPATH"], "paceline"), _LIBRARY):
            return False
        if any(name.startswith(("PYTHON", "LD_")) and name != "PYTHONPATH" for name in environment):
            return False
        if _room(words) >= _WORDS or _room(map("=".join, environment.items())) >= _VARIABLES:
            return False
        return all(environment.get(name) == value for name, value in self._alike.items())

    def _program(self, python: str) -> OwnProgram:
        found = self._programs.get(python)
        if found is None or found.has_ended:
            if found is not None:
                found.close()
            found = self._programs[python] = OwnProgram(self._start)
        return found

    def _start(self, socket: str) -> tuple[list[str], dict[str, Any]]:
        command = [sys.executable, str(_PROGRAM), socket, " " * _WORDS]
        return command, {"env": {**self._kept, "ROOM": " " * _VARIABLES}, "cwd": "/"}

    def _ask(self, words: Sequence[str], environment: Mapping[str, str], **options: Any) -> int:
        given = {0: options["stdin"], 1: options["stdout"], 2: options["stderr"]}
        with open(os.devnull, "r+b") as nothing:
            fds = {number: nothing.fileno() if fd == subprocess.DEVNULL else fd for number, fd in given.items()}
            fds |= {fd: fd for fd in options["pass_fds"]}
            connection = ask(self._program(words[0]).path, words, environment, options["cwd"], fds)
        with contextlib.closing(connection):
            return int(connection.recv(64))

    def close(self) -> None:
        """End the programs."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()


def _room(texts: Iterable[str]) -> int:
    """The bytes that they take in a process."""
    return sum(len(os.fsencode(text)) + 1 for text in texts)


@contextlib.contextmanager
def forking(supervisors: Supervisors) -> Iterator[None]:
    """Supervisors that this process starts meanwhile are forked, where a fork does the same."""
    module = SimpleNamespace(Popen=supervisors.popen, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(detached, "subprocess", module):
        yield
