"""Hooks on imports, with stand-ins for the libraries. What `when_loaded` does for real libraries is tested where it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
HOOK = "from paceline.system.when_loaded import load_triton_before_tensorflow as hook\nhook()\nhook()\n"


def imported(folder: Path, triton: str | None, script: str) -> list[str]:
    """Return what the stand-ins print while this script runs. triton: the stand-in's source; None where it is not installed."""
    (folder / "tensorflow.py").write_text("print('tensorflow')")
    (folder / "other.py").write_text("print('other')")
    if triton is not None:
        (folder / "triton.py").write_text(triton)
    # Without site-packages, where the real ones may be.
    command = [sys.executable, "-I", "-S", "-c", f"import sys\nsys.path[:0] = {[str(SOURCE), str(folder)]!r}\n{script}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("triton", "printed"),
    [
        ("print('triton')", ["other", "triton", "tensorflow"]),
        ("raise OSError('no driver')", ["other", "tensorflow"]),
        (None, ["other", "tensorflow"]),
    ],
    ids=["installed", "broken", "absent"],
)
def test_triton_is_imported_before_tensorflow(tmp_path: Path, triton: str | None, printed: list[str]) -> None:
    assert imported(tmp_path, triton, f"{HOOK}import other\nimport tensorflow\nimport tensorflow") == printed


def test_triton_is_not_imported_where_tensorflow_came_first_or_never_comes(tmp_path: Path) -> None:
    assert imported(tmp_path, "print('triton')", f"import tensorflow\n{HOOK}import other") == ["tensorflow", "other"]
    assert imported(tmp_path, "print('triton')", f"{HOOK}import other") == ["other"]
