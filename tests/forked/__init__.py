"""Scripts that a test's programs start, as forks of a Python that has loaded what they import.

    a test            sets `environment()` for what it starts
    python train.py   reads site/sitecustomize.py at its start, hands over its words, variables, folder and descriptors, and waits
    program.py        has torch and others loaded; it forks, and the child runs the script as it stands

To load torch and what its first optimizer loads takes a processor three seconds in each process, scikit-learn one more: most of
what an example takes. What starts the script sees no difference: signals are passed on, and the exit code is the script's.
Only the interpreter that the tests run in does so, and neither `python -m`, nor `python -c`, nor a Python without PYTHONPATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
#: Where site/sitecustomize.py finds the program: the interpreter that it is a stand-in for, and its socket.
VARIABLE = "FORKED_SCRIPTS"


class Forked:
    """The program, once it is needed. It ends with `close`, or with this process."""

    def __init__(self) -> None:
        # Not in a test's folder: the path of a socket may have 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="pl-forked-", dir="/tmp")
        self._socket = os.path.join(self._folder.name, "socket")
        keep = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "OMP_WAIT_POLICY")
        environment = {name: os.environ[name] for name in keep if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "program.py"), self._socket],
            stdin=subprocess.PIPE,
            # As libraries read it when they are loaded: the size of a computation is nowhere the point of an example.
            env=environment | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            cwd="/",
        )

    def environment(self) -> dict[str, str]:
        """The variables by which the Pythons that find them hand their scripts over."""
        while not os.path.exists(self._socket):
            assert self._process.poll() is None, "the program that has the libraries loaded has ended"
            time.sleep(0.02)
        return {"PYTHONPATH": str(_HERE / "site"), VARIABLE: f"{sys.executable}{os.pathsep}{self._socket}"}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


_started: list[Forked] = []


def environment() -> dict[str, str]:
    """What to set for programs whose scripts are to be forks; nothing where there is no torch, or no Linux."""
    from importlib.util import find_spec

    if not sys.platform.startswith("linux") or find_spec("torch") is None:
        return {}
    if not _started:
        _started.append(Forked())
    return _started[0].environment()


def fork_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts of all that this test starts be forks."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def close_all() -> None:
    """End the program, if there is one."""
    while _started:
        _started.pop().close()
