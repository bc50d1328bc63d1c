"""How tests are handed to processes: one unit for each engine, the longest unit first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.side_by_side import DURATIONS, keep_durations, longest_first, unit_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/cli/test_run.py::test_it", "tests/cli"),
        ("tests/test_errors.py::test_it[a/b]", "tests"),
        ("tests/compat/horovod/keras/test_on_ranks.py::test_it[2]", "tests/compat/horovod/tensorflow"),
        ("tests/engines/ray/test_ray.py::test_it[ssh]", "tests/engines/ray"),
        ("tests/engines/everywhere/test_links.py::test_it[local]", "tests/engines/local"),
        ("tests/engines/everywhere/test_links.py::test_it[ray, shared folder]", "tests/engines/ray"),
        ("tests/engines/everywhere/test_links.py::test_it[slurm, login host]", "tests/engines/slurm"),
        ("tests/engines/everywhere/test_links.py::test_it", "tests/engines/ssh"),
    ],
)
def test_tests_of_one_engine_are_assigned_to_the_same_pytest_process(nodeid: str, unit: str) -> None:
    assert unit_of(nodeid) == unit


def test_test_groups_are_sorted_by_duration_with_unknown_ones_in_the_middle() -> None:
    ids = ["a/t.py::1", "new/t.py::1", "b/t.py::1", "a/t.py::2", "b/t.py::2"]
    items = [SimpleNamespace(nodeid=name) for name in ids]
    found = longest_first(items, {"a": 1.0, "b": 200.0})  # type: ignore[arg-type]
    assert [item.nodeid for item in found] == ["b/t.py::1", "b/t.py::2", "new/t.py::1", "a/t.py::1", "a/t.py::2"]


def test_partial_test_run_keeps_stored_durations_of_other_groups(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    keep_durations(path, {"a": 1.0, "b": 2.04}, is_whole=True)
    keep_durations(path, {"a": 3.0}, is_whole=False)
    assert list(json.loads(path.read_text()).items()) == [("a", 3.0), ("b", 2.0)]
    keep_durations(path, {"a": 3.0}, is_whole=True)
    assert json.loads(path.read_text()) == {"a": 3.0}


def test_stored_test_durations_name_existing_folders() -> None:
    missing = [unit for unit in json.loads(DURATIONS.read_text()) if not list((ROOT / unit).glob("test_*.py"))]
    assert missing == [], "run the whole suite with --keep-durations"


@pytest.mark.parametrize("place", ["test", "teardown"])
def test_crash_of_a_pytest_process_ends_the_run_and_names_the_test(tmp_path: Path, place: str) -> None:
    # One of two processes crashes in the very last test, when the other process has nothing left to do.
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    (tmp_path / "conftest.py").write_text(
        "import tests.side_by_side as side\n"
        "def pytest_xdist_make_scheduler(config, log): return side.ByUnit(config, log)\n"
        "def pytest_testnodedown(node, error):\n    if error: side.end_with_crash(node)\n"
    )
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "test_a.py").write_text("def test_a(): pass\n")
    body = (
        f"def test_b():\n    {crash}\n"
        if place == "test"
        else f"def test_b(): pass\ndef teardown_module():\n    {crash}\n"
    )
    (tmp_path / "b" / "test_b.py").write_text(body)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "FAILED b/test_b.py::test_b" in done.stdout
    assert "crashed while running 'b/test_b.py::test_b'" in done.stdout
