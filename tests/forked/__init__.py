"""Scripts that a test's programs start, as forks of a Python that has loaded what they import.

    a test            sets `environment()` for what it starts
    python train.py   reads site/sitecustomize.py at its start, hands over its words, variables, folder and descriptors, and waits
    program.py        has torch and others loaded; it forks, and the child runs the script as it stands

To load torch and what its first optimizer loads takes a processor three seconds in each process, scikit-learn one more: most of
what an example takes. What starts the script sees no difference: signals are passed on, and the exit code is the script's.
Only the interpreter that the tests run in does so, and neither `python -m`, nor `python -c`, nor a Python without PYTHONPATH.

`run` hands a script over by itself, to a second such program, which has loaded the command line: half of what a command takes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
#: Where site/sitecustomize.py finds the program: the interpreter that it is a stand-in for, and its socket.
VARIABLE = "FORKED_SCRIPTS"

#: What the examples import.
LIBRARIES = (
    *("numpy", "torch", "torch.utils.data", "torch.utils.data.distributed", "torch.nn.parallel", "torch._dynamo"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"),
    *("sklearn.datasets", "sklearn.linear_model", "sklearn.model_selection", "matplotlib.pyplot"),
    *("torch.utils.tensorboard", "accelerate"),
)
#: What commands that submit, follow and look at runs load.
COMMAND_LINE = (
    "typer.main",
    "paceline.cli.main",
    *(f"paceline.cli.{name}" for name in ("run", "read", "logs", "files")),
)


class Forked:
    """The program, once it is needed. It ends with `close`, or with this process."""

    def __init__(self, loads: Sequence[str]) -> None:
        # Not in a test's folder: the path of a socket may have 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="pl-forked-", dir="/tmp")
        self._socket = os.path.join(self._folder.name, "socket")
        keep = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "OMP_WAIT_POLICY")
        environment = {name: os.environ[name] for name in keep if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "program.py"), self._socket, *loads],
            stdin=subprocess.PIPE,
            # As libraries read it when they are loaded: the size of a computation is nowhere the point of an example.
            env=environment | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            cwd="/",
        )

    @property
    def socket(self) -> str:
        """Where it takes scripts, once it does."""
        while not os.path.exists(self._socket):
            assert self._process.poll() is None, "the program that has the libraries loaded has ended"
            time.sleep(0.02)
        return self._socket

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


_started: dict[Sequence[str], Forked] = {}


def program(loads: Sequence[str]) -> Forked:
    """The one that has these loaded."""
    if loads not in _started:
        _started[loads] = Forked(loads)
    return _started[loads]


def environment() -> dict[str, str]:
    """What to set for programs whose scripts are to be forks; nothing where there is no torch, or no Linux.

    The Pythons that find these variables hand their scripts over.
    """
    from importlib.util import find_spec

    if not sys.platform.startswith("linux") or find_spec("torch") is None:
        return {}
    return {
        "PYTHONPATH": str(_HERE / "site"),
        VARIABLE: f"{sys.executable}{os.pathsep}{program(LIBRARIES).socket}",
    }


def fork_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts of all that this test starts be forks."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def run(
    words: Sequence[str], *, environment: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """What a command of Paceline's command line answers: `words` are its script and its arguments. Nothing is typed into it.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then; it has now.
    """
    told = {"words": list(words), "environment": dict(environment), "folder": str(folder), "umask": _umask()}
    text = json.dumps(told | {"fds": [0, 1, 2]}).encode()
    with ThreadPoolExecutor(2) as readers, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(program(COMMAND_LINE).socket)
        (out, own_out), (err, own_err) = os.pipe(), os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        socket.send_fds(connection, [b"%08d" % len(text)], [nothing, own_out, own_err])
        for fd in (nothing, own_out, own_err):
            os.close(fd)
        printed = [readers.submit(_read, fd) for fd in (out, err)]
        connection.sendall(text)
        connection.settimeout(timeout_s)
        answers = connection.makefile("r")
        try:
            answers.readline()
            code = int(answers.readline())
            stdout, stderr = (one.result(timeout_s) for one in printed)
        except TimeoutError:
            connection.close()
            raise subprocess.TimeoutExpired(list(words), timeout_s) from None
    return subprocess.CompletedProcess(list(words), code, stdout, stderr)


def _read(fd: int) -> str:
    with open(fd, newline=None, encoding="utf-8") as pipe:
        return pipe.read()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def close_all() -> None:
    """End the programs."""
    while _started:
        _started.popitem()[1].close()
