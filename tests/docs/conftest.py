"""A copy of the examples to try the documentation's commands in."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.errors import LauncherError
from paceline.launchers.mpi import find_open_mpi
from tests.docs.pages import ROOT
from tests.warm import fork_scripts

#: Read this variable on import, because a fixture later removes it from the environment.
_REQUIRED = bool(os.environ.get("PACELINE_REQUIRE_ENGINES"))

#: Example -> text in the example -> its replacement in the copy for tests, which trains with less data. `make demo` and
#: tests/parallel/test_examples.py show that the full examples learn.
SMALLER = {
    "digits/train.py": {"(order[360:], order[:360])": "(order[360:520], order[:100])"},
    "many_nodes/train.py": {
        '"--width", type=int, default=128': '"--width", type=int, default=32',
        '"--depth", type=int, default=4': '"--depth", type=int, default=1',
    },
    "parallel/chars_parallel.py": {"default=640": "default=64"},
    "parts/train.py": {"default=300": "default=50"},
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the repository's examples, as the working directory, with `paceline` and `python` on PATH."""
    lacking({"torch", "sklearn", "matplotlib", "mpi4py", "Open MPI"})
    copy = tmp_path / "paceline"
    shutil.copytree(ROOT / "examples", copy / "examples", ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    for name, changes in SMALLER.items():
        path = copy / "examples" / name
        text = path.read_text()
        for large, small in changes.items():
            assert large in text, f"{name} has no {large}"
            text = text.replace(large, small)
        path.write_text(text)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    fork_scripts(monkeypatch, also_in_environments=True)
    return copy


def lacking(needs: Iterable[str]) -> None:
    """Skip the test, or fail if all engines are required, unless these packages and "Open MPI" are here."""
    missing = [name for name in sorted(needs) if name != "Open MPI" and find_spec(name) is None]
    if "Open MPI" in needs:
        try:
            find_open_mpi(sys.executable)
        except LauncherError:
            missing.append("Open MPI")
    if missing:
        (pytest.fail if _REQUIRED else pytest.skip)(f"the examples need {', '.join(missing)}")
