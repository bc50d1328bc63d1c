"""A copy of the examples to try the documentation's commands in."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.errors import LauncherError
from paceline.launchers.mpi import find_open_mpi
from tests.docs.pages import ROOT

#: Read before a fixture takes the variable away.
_REQUIRED = bool(os.environ.get("PACELINE_REQUIRE_ENGINES"))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the repository's examples, as the working directory, with `paceline` and `python` on PATH."""
    missing = [name for name in ("torch", "sklearn", "matplotlib", "mpi4py") if find_spec(name) is None]
    try:
        find_open_mpi(sys.executable)
    except LauncherError:
        missing.append("Open MPI")
    if missing:
        (pytest.fail if _REQUIRED else pytest.skip)(f"the examples need {', '.join(missing)}")
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "examples", copy / "examples", ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return copy
