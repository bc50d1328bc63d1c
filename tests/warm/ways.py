"""Ways to have a script run by a program that has its libraries loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.warm.kinds import COMMAND_LINE, EXAMPLES, TORCH
from tests.warm.programs import program

_HERE = Path(__file__).parent
#: The variable with which site/sitecustomize.py finds the real interpreter and the socket of the program.
VARIABLE = "FORKED_SCRIPTS"
#: The variable for workers, which need only the socket.
WORKERS = "FORKED_WORKERS"


def run_alone(
    *words: str,
    loaded: str,
    environment: Mapping[str, str],
    folder: Path | None = None,
    timeout_s: float = 2700,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """What `python *words` has printed and returned, in a process that has this loaded already (on Linux; elsewhere
    it loads it). options: see `ask`.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then, and is killed.
    """
    if not sys.platform.startswith("linux"):
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=environment, cwd=folder, timeout=timeout_s, capture_output=True, text=True, check=False
        )
    (out, own_out), (err, own_err) = os.pipe(), os.pipe()
    with ThreadPoolExecutor(2) as readers:
        printed = [readers.submit(_read, fd) for fd in (out, err)]
        try:
            process = program(0, loaded).start(words, environment, own_out, folder, own_err, **options)
        finally:
            os.close(own_out)
            os.close(own_err)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, *(one.result() for one in printed))


def _read(fd: int) -> str:
    with open(fd, encoding="utf-8", errors="replace") as pipe:
        return pipe.read()


def run_command(
    *words: str, environment: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command of Paceline's command line, whose script and arguments are `words`.

    Tests run some 1,200 commands. Loading the command line takes each 0.13 CPU seconds.
    """
    return run_alone(
        *words,
        loaded=COMMAND_LINE,
        environment=environment,
        folder=folder,
        timeout_s=timeout_s,
        hides=True,
        frees=False,
    )


def below_mpirun(ranks: int, *words: str, kind: str = TORCH, also: str | None = None, hides: bool = False) -> list[str]:
    """The words by which mpirun, or horovodrun, starts a rank that runs a script with torch, or what the kind says, loaded.

    Without it they would be `python *words`. hides: for the script nothing is loaded until it imports it.
    """
    started = [program(rank, kind, also) for rank in range(ranks)]
    sockets = os.pathsep.join(one.path for one in started)
    # -S skips site-packages, which hand_over.py does not use.
    return [sys.executable, "-S", str(_HERE / "hand_over.py"), *(["--hides"] if hides else []), sockets, *words]


def forking_variables(kind: str = EXAMPLES, also: str | None = None) -> dict[str, str]:
    """What to set for programs whose scripts are to be forks; nothing where there is no torch, or no Linux.

    kind, also: of the program that forks them; see `program`.

    Only the interpreter that the tests run in hands its scripts over, and neither `python -m`, nor `python -c`, nor a Python
    without PYTHONPATH.
    """
    if not sys.platform.startswith("linux") or find_spec("torch") is None:
        return {}
    return {
        "PYTHONPATH": str(_HERE / "site"),
        VARIABLE: f"{sys.executable}{os.pathsep}{program(0, kind, also).path}",
    }


def fork_scripts(monkeypatch: pytest.MonkeyPatch, kind: str = EXAMPLES, *, also_in_environments: bool = False) -> None:
    """Let the scripts of all that this test starts be forks.

    kind: of the program that forks them. also_in_environments: the workers, too, of runs in environments that Paceline makes of
    this Python, where those hold nothing that the program has loaded.
    """
    variables = forking_variables(kind)
    if variables and also_in_environments:
        variables[WORKERS] = program(0, kind).path
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
