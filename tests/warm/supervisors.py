"""Supervisors and controllers that are forked from a program which has loaded what they load: that takes a processor 0.02 s in
place of 0.1 s, and the tests start more than a thousand.

Those that show how a supervisor is started, and that any of its processes may be killed, start it as users do (`STARTED`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from paceline.system import detached_process
from tests.warm.asking import ALIKE, VARIABLES, WORDS, alike, could_be_forked, fork, in_place_of
from tests.warm.hand_over import ask
from tests.warm.programs import OwnProgram

_PROGRAM = Path(__file__).with_name("supervising.py")
#: That of forked commands; a test may set another one.
_PYTHON = sys.executable
_LIBRARY = str(Path(detached_process.__file__).parents[1])
#: Folders and files of tests whose supervisors are started in the ordinary way.
STARTED = (
    "tests/chaos/",
    "tests/cli/test_quick.py",
    "tests/engines/local/test_conformance.py",
    "tests/pipelines/test_controller.py",
    "tests/services/test_supervise.py",
    "tests/supervisor/",
    "tests/system/test_detached.py",
    "tests/targets/test_supervisors.py",
)


class Supervisors:
    """The programs that they are forked from, each started when it is first needed; they end with this process."""

    def __init__(self) -> None:
        #: Of each Python that supervises, for its workers run on the same one (`tests.warm.python`), and of each set of the
        #: variables that count when it is loaded.
        self._programs: dict[tuple[str | None, ...], OwnProgram] = {}
        # Now, for the test that starts the first may have set others.
        self._alike = alike(os.environ)
        self._kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR")}

    def popen(self, words: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        """In the place of `subprocess.Popen`, as `paceline.system.detached_process` calls it."""
        if could_be_forked(words, env, _LIBRARY) and alike(env) == self._alike:
            return fork(ask, self.socket(words[0], self._alike), words, env, **options)
        return subprocess.Popen(words, env=env, **options)

    def socket(self, python: str, common: Mapping[str, str | None]) -> str:
        """Where the program of this Python listens that has these variables in common with its forks."""
        place = python, *(common[name] for name in ALIKE)
        if place in self._programs and self._programs[place].has_ended:
            self._programs.pop(place).close()
        if place not in self._programs:
            set_ = {name: value for name, value in common.items() if value is not None}
            self._programs[place] = OwnProgram(lambda socket: self._command(python, socket, set_))
        return self._programs[place].path

    def _command(self, python: str, socket: str, common: Mapping[str, str]) -> tuple[list[str], dict[str, Any]]:
        command = [python, str(_PROGRAM), socket, " " * WORDS]
        return command, {"env": {**self._kept, **common, "ROOM": " " * VARIABLES}, "cwd": "/"}

    def close(self) -> None:
        """End the programs."""
        while self._programs:
            self._programs.popitem()[1].close()


#: Those that this process's tests have forked at the moment; none where they are started as users start them.
current: Supervisors | None = None


def for_commands(environment: Mapping[str, str]) -> tuple[str, dict[str, str | None]] | None:
    """What a command in this environment, which is forked itself, needs to have its supervisor forked (`asking.submit_with`)."""
    if current is None:
        return None
    common = alike(environment)
    return current.socket(_PYTHON, common), common


@contextlib.contextmanager
def forking(supervisors: Supervisors) -> Iterator[None]:
    """Supervisors that this process starts meanwhile are forked, where a fork does the same; those of forked commands too."""
    global current
    with mock.patch.object(detached_process, "subprocess", in_place_of(supervisors.popen)):
        current, before = supervisors, current
        try:
            yield
        finally:
            current = before
