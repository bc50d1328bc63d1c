"""A Python whose workers have torch loaded before they start: the tests' environment with another `python` in it.

    <folder>/pyvenv.cfg, lib      links into the tests' environment, so it has the same packages
    <folder>/bin/python           the text below
    <folder>/bin/*                the same programs
    <folder>/program              the socket of the program that forks

This `python` forks workers and ranks of horovodrun, which takes 0.05 CPU seconds instead of 1.5, and runs all other programs
itself. A forked worker is no child of the process that started it: the child is this `python`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.helpers import write_program
from tests.warm.kinds import TORCH
from tests.warm.programs import OwnProgram, program
from tests.warm.ways import WORKERS

#: This program imports few modules, because it runs for every worker and every supervisor.
_PYTHON = """\
#!{real} -IS
import os, sys

words = sys.argv[1:]
FORKED = ("paceline/worker/__main__.py", "paceline/compat/horovod/runner/main_script.py")
if not words or not words[0].endswith(FORKED) or not os.path.exists({path!r}):
    # By this path, so that it is the environment that lies around it.
    os.execv({real!r}, [{python!r}, *words])
sys.path.insert(0, {here!r})
from hand_over import hand_over

hand_over({path!r}, words, python={python!r}, hides=True, frees=False, send=os.killpg)
"""


@contextlib.contextmanager
def warm_python(folder: Path, *more: str, kind: str = TORCH) -> Iterator[Path]:
    """Yield the path of such a Python below `folder`. kind: libraries of its program. more: further modules."""
    real = Path(sys.executable)
    place = folder / "environment"
    (place / "bin").mkdir(parents=True)
    for name in ("pyvenv.cfg", "lib"):
        (place / name).symlink_to(Path(sys.prefix) / name)
    python = place / "bin" / real.name
    for other in real.parent.iterdir():
        if not other.name.startswith("python"):
            (place / "bin" / other.name).symlink_to(other)
    # A program with additional modules is not shared between tests.
    with contextlib.closing(OwnProgram(kind, *more)) if more else contextlib.nullcontext(program(0, kind)) as started:
        here = str(Path(__file__).parent)
        (place / "program").symlink_to(started.path)
        write_program(python, _PYTHON.format(real=str(real), path=started.path, python=str(python), here=here))
        for name in {"python", "python3"} - {real.name}:
            (place / "bin" / name).symlink_to(real.name)
        yield python


def forking_in_environments(python: Path) -> dict[str, str]:
    """Return the variables that let this Python's environments fork their workers.

    For environments that Paceline makes from this Python, with no package of their own.
    """
    return {
        "PYTHONPATH": str(Path(__file__).parent / "site"),
        WORKERS: str((python.parents[1] / "program").readlink()),
    }


@contextlib.contextmanager
def submitting_with(python: Path) -> Iterator[None]:
    """Submit runs whose supervisors and workers run on this Python."""
    with mock.patch.object(sys, "executable", str(python)):
        yield
