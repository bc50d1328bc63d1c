"""A Python whose workers have torch loaded before they start: the environment of the tests, with another `python` in it.

    <folder>/pyvenv.cfg, lib      those of the tests' environment, by links: it has the same packages
    <folder>/bin/python           the text below
    <folder>/bin/*                the same programs
    <folder>/program              the socket of the program that forks

A worker that this `python` is to run, or a rank of horovodrun, is forked: that takes 0.05 s of a processor in place of 1.5 s.
All else, `python` runs itself. A worker is then no child of whoever has started it: that one has this `python` in its place.
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

#: Little is imported: it runs for every worker, and for every program that looks at its Python.
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
    """The path of such a Python, below `folder`. kind: of the program; more: modules that it loads besides."""
    real = Path(sys.executable)
    place = folder / "environment"
    (place / "bin").mkdir(parents=True)
    for name in ("pyvenv.cfg", "lib"):
        (place / name).symlink_to(Path(sys.prefix) / name)
    python = place / "bin" / real.name
    for other in real.parent.iterdir():
        if not other.name.startswith("python"):
            (place / "bin" / other.name).symlink_to(other)
    # With more modules it is for this one alone.
    with (
        contextlib.closing(OwnProgram.of(kind, *more)) if more else contextlib.nullcontext(program(0, kind)) as started
    ):
        here = str(Path(__file__).parent)
        (place / "program").symlink_to(started.path)
        write_program(python, _PYTHON.format(real=str(real), path=started.path, python=str(python), here=here))
        for name in {"python", "python3"} - {real.name}:
            (place / "bin" / name).symlink_to(real.name)
        yield python


def forking_in_environments(python: Path) -> dict[str, str]:
    """What to set so that workers are forked, too, which run in environments that Paceline makes of this Python and that hold no
    package of their own."""
    return {
        "PYTHONPATH": str(Path(__file__).parent / "site"),
        WORKERS: str((python.parents[1] / "program").readlink()),
    }


@contextlib.contextmanager
def submitting_with(python: Path) -> Iterator[None]:
    """Runs that this process submits meanwhile are supervised by this Python, and their workers run on it."""
    with mock.patch.object(sys, "executable", str(python)):
        yield
