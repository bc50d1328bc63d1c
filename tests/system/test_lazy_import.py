"""A module of the standard library that is loaded at its first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import run_python

HEAD = """
import sys
from paceline.system import lazy_import
lazy_import.later("inspect")
stand_in = sys.modules["inspect"]
"""

SOURCE = Path(__file__).parents[2] / "src"
HOOK = "from paceline.system.lazy_import import load_triton_before_tensorflow as hook\nhook()\nhook()\n"


def test_lazily_imported_module_is_loaded_at_the_first_attribute_access():
    code = """
import dataclasses
@dataclasses.dataclass
class A:
    "With a docstring."
    a: int
print("ast" in sys.modules)
import inspect
print(inspect is stand_in, inspect.signature(A), "ast" in sys.modules)
import inspect as again
print(again is stand_in, inspect.signature is again.signature)
from inspect import Parameter
print(Parameter.__module__)
"""
    # The first line is left out, because dataclasses loads other modules in each release of Python.
    told = run_python(HEAD + code).splitlines()
    assert told[1:] == ["True (a: int) -> None True", "False True", "inspect"]


@pytest.mark.parametrize("statement", ["import inspect", "import dataclasses, inspect"])
def test_lazy_import_does_not_replace_a_module_that_is_already_loaded(statement):
    code = f"{statement}\nfrom paceline.system import lazy_import\nlazy_import.later('inspect')\nimport sys\n"
    assert run_python(code + "print(sys.modules['inspect'] is inspect, 'signature' in vars(inspect))") == "True True\n"


def imported(folder: Path, triton: str | None, script: str) -> list[str]:
    """Return what the stand-ins print while this script runs. triton: source of its stand-in; None if it is not installed."""
    (folder / "tensorflow.py").write_text("print('tensorflow')")
    (folder / "other.py").write_text("print('other')")
    if triton is not None:
        (folder / "triton.py").write_text(triton)
    # -S leaves out site-packages, which may have the real packages.
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
def test_import_of_tensorflow_imports_triton_first_if_triton_can_be_imported(
    tmp_path: Path, triton: str | None, printed: list[str]
) -> None:
    assert imported(tmp_path, triton, f"{HOOK}import other\nimport tensorflow\nimport tensorflow") == printed


def test_triton_is_not_preloaded_without_or_after_tensorflow(tmp_path: Path) -> None:
    assert imported(tmp_path, "print('triton')", f"import tensorflow\n{HOOK}import other") == ["tensorflow", "other"]
    assert imported(tmp_path, "print('triton')", f"{HOOK}import other") == ["other"]
