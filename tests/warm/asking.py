"""Has a supervisor forked in the place of `subprocess.Popen`, where a fork does the same (supervising.py). Little is imported:
commands that are forked themselves do it too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

#: Bytes for the command line and for the variables of what is forked, which the program has to have at its own start.
WORDS, VARIABLES = 4_000, 24_000
#: What is forked: supervisors of runs and of services, controllers of sweeps and of pipelines.
MODULES = ("paceline.supervisor", "paceline.services", "paceline.sweeps", "paceline.pipelines")
#: With others of these, what the program has loaded would be other, or would behave in another way.
ALIKE = ("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE")


class Forked:
    """What `detached.start` returns of a process, as far as it is asked for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None while it runs, else 0: how it has ended nobody is told."""
        from paceline.system import processes

        if self.returncode is None and not processes.is_alive(self.pid):
            self.returncode = 0
        return self.returncode


def alike(environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that a fork has in common with its program."""
    return {name: environment.get(name) for name in ALIKE}


def could_be_forked(words: Sequence[str], environment: Mapping[str, str], library: str) -> bool:
    """Whether a program that has this Paceline loaded, and the same of `ALIKE`, has a fork that does the same."""
    return (
        list(words[:2]) == [sys.executable, "-m"]
        and words[2] in MODULES
        and os.path.samefile(os.path.join(environment["PYTHONPATH"], "paceline"), library)
        and not any(name.startswith(("PYTHON", "LD_")) and name != "PYTHONPATH" for name in environment)
        and room(words) < WORDS
        and room(map("=".join, environment.items())) < VARIABLES
    )


def room(texts: Iterable[str]) -> int:
    """The bytes that they take in a process."""
    return sum(len(os.fsencode(text)) + 1 for text in texts)


def fork(
    ask: Callable[..., Any], socket: str, words: Sequence[str], environment: Mapping[str, str], **options: Any
) -> Forked:
    """One that the program at this socket forks. options: as `subprocess.Popen` takes them."""
    given = {0: options["stdin"], 1: options["stdout"], 2: options["stderr"]}
    with open(os.devnull, "r+b") as nothing:
        files = {number: nothing if file == subprocess.DEVNULL else file for number, file in given.items()}
        fds = {number: file if isinstance(file, int) else file.fileno() for number, file in files.items()}
        fds |= {fd: fd for fd in options["pass_fds"]}
        connection = ask(socket, words, environment, options["cwd"], fds)
    with contextlib.closing(connection):
        return Forked(int(connection.recv(64)))


def in_place_of(popen: Callable[..., Any]) -> SimpleNamespace:
    """The module `subprocess` as `paceline.system.detached_process` uses it, with another `Popen`."""
    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)


def submit_with(ask: Callable[..., Any], socket: str, common: Mapping[str, str | None]) -> None:
    """From now on, what this process submits has a supervisor that the program at this socket forks. common: its `alike`."""
    from paceline.system import detached_process

    library = os.path.dirname(os.path.dirname(detached_process.__file__))

    def popen(words: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        if could_be_forked(words, env, library) and alike(env) == common:
            return fork(ask, socket, words, env, **options)
        return subprocess.Popen(words, env=env, **options)

    detached_process.subprocess = in_place_of(popen)  # type: ignore[assignment]
