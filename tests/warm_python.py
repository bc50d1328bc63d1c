"""A Python whose workers have torch loaded before they start: the environment of the tests, with another `python` in it.

    <folder>/pyvenv.cfg, lib      those of the tests' environment, by links: it has the same packages
    <folder>/bin/python           the text below
    <folder>/bin/*                the same programs

A worker that this `python` is to run, or a rank of horovodrun, is forked from a program that has torch, or what its kind says,
loaded (`tests.warm`): that takes 0.05 s of a processor in place of 1.5 s. For its script nothing is loaded until it is imported
(`tests.put_away`). All else, `python` runs itself. A worker is then no child of whoever has started it: that one has this
`python` in its place, which passes signals on, ends as the worker does, and with which the worker ends.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.helpers import write_program
from tests.warm import TORCH, Warm

#: Little is imported: it runs for every worker, and for every program that looks at its Python.
_PYTHON = """\
#!{real} -IS
import os, sys

REAL, PATH, PYTHON = {real!r}, {path!r}, {python!r}
words = sys.argv[1:]
WARM = ("paceline/worker/__main__.py", "paceline/compat/horovod/runner/main_script.py")
if not words or not words[0].endswith(WARM) or not os.path.exists(PATH):
    # By this path, so that it is the environment that lies around it.
    os.execv(REAL, [PYTHON, *words])

import _socket, json, signal

# What is sent to this process is meant for the worker.
worker, early = 0, []

def pass_on(number, frame=None):
    try:
        os.killpg(worker, number) if worker else early.append(number)
    except ProcessLookupError:
        pass  # its end is about to be told

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
connection.connect(PATH)
told = dict(argv=words, environment=dict(os.environ), directory=os.getcwd(), python=PYTHON)
file = os.memfd_create("told")
os.write(file, json.dumps(told).encode())
given = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (file, 1, 2))
connection.sendmsg([b"start"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, given)])
worker = int(connection.recv(64) or 0)
for number in early:
    pass_on(number)
code = int(connection.recv(64) or -9) if worker else -9
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code & 0xFF)
"""


@contextlib.contextmanager
def warm_python(folder: Path, *more: str, kind: str = TORCH) -> Iterator[Path]:
    """The path of such a Python, below `folder`. kind: of the program; more: modules that it loads besides."""
    from tests.ranks import clean_environment

    real = Path(sys.executable)
    place = folder / "environment"
    (place / "bin").mkdir(parents=True)
    for name in ("pyvenv.cfg", "lib"):
        (place / name).symlink_to(Path(sys.prefix) / name)
    python = place / "bin" / real.name
    for program in real.parent.iterdir():
        if not program.name.startswith("python"):
            (place / "bin" / program.name).symlink_to(program)
    started = Warm(clean_environment(), kind, *more)
    try:
        write_program(python, _PYTHON.format(real=str(real), path=started.path, python=str(python)))
        for name in {"python", "python3"} - {real.name}:
            (place / "bin" / name).symlink_to(real.name)
        started.wait()
        yield python
    finally:
        started.close()


@contextlib.contextmanager
def submitting_with(python: Path) -> Iterator[None]:
    """Runs that this process submits meanwhile are supervised by this Python, and their workers run on it."""
    with mock.patch.object(sys, "executable", str(python)):
        yield
