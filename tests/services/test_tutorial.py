"""The tutorial: train, tune, register, deploy, call, as one script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.services import store

SCRIPT = Path(paceline.__file__).parents[2] / "examples" / "tutorial" / "tutorial.py"


# `make test` runs the notebook of docs/tutorials/01 instead, which does the same.
@pytest.mark.promise("train-tune-register-deploy-call")
@pytest.mark.proof
def test_service_tutorial_runs_as_one_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "registered: tutorial-digits:1 tutorial-digits:2" in lines
    assert any(line.startswith("asked for [0, 1, 2, 3, 4] answered [") for line in lines)
    assert "revision 2 answered [0, 1, 2, 3, 4]" in lines
    assert lines[-1] == "revision 1"
    assert store.all_folders(tmp_path / ".paceline") == []
