"""docs/versions.md has for each supported release the tests that were run on it; `.ci/compat.py` makes that table."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import torch_private

ROOT = Path(__file__).parents[2]

CHECKS = "tests/parallel/test_on_ranks.py::test_each_function_of_the_checks_folder_passes_on_every_rank"


@contextlib.contextmanager
def loaded(name):
    """A script of .ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


@pytest.fixture(scope="module")
def compat():
    with loaded("compat") as module:
        yield module


def test_each_installed_program_such_as_slurm_or_ray_has_a_row_in_the_version_table(tmp_path, monkeypatch):
    with loaded("engine_versions") as versions:
        table = versions.TABLE.read_text().partition(versions.BEGIN)[2].partition(versions.END)[0]
        assert set(versions.here()) <= set(versions.rows_of(table)), "write it: .venv/bin/python .ci/engine_versions.py"
        # The table keeps the row of an engine (here Ray) that is not installed on this machine.
        page = tmp_path / "versions.md"
        page.write_text(
            f"above\n{versions.BEGIN}\n| a | b | c |\n|---|---|---|\n| Ray | 1.0 | then |\n{versions.END}\nbelow\n"
        )
        monkeypatch.setattr(versions, "TABLE", page)
        monkeypatch.setattr(versions, "here", lambda: {"Slurm": "22.05"})
        versions.main()
        assert list(versions.rows_of(page.read_text())) == ["Slurm", "Ray"]
        assert "| Ray | 1.0 | then |" in page.read_text()


@pytest.fixture(scope="module")
def rows(compat):
    text = compat.TABLE.read_text()
    return [
        dict(zip(compat.HEADINGS, row, strict=True))
        for row in compat.rows_of(text.partition(compat.BEGIN)[2].partition(compat.END)[0])
    ]


def test_version_table_covers_all_supported_versions(compat, rows):
    (major, first), (_, last) = torch_private.OLDEST, torch_private.NEWEST
    assert [compat.minor(release) for release in compat.TORCH] == [
        f"{major}.{number}" for number in range(last, first - 1, -1)
    ]
    done = {compat.minor(row["torch"]) for row in rows}
    assert f"{major}.{last}" in done
    text = compat.TABLE.read_text().partition(compat.END)[0]
    assert text.rstrip().endswith(compat.not_run([(row["torch"], row["Python"]) for row in rows]) or "|")


def test_every_python_in_the_pip_classifiers_is_in_the_version_matrix(compat, rows):
    project = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project))
    assert set(compat.PYTHON) == named
    assert {row["Python"] for row in rows} <= named


def test_version_matrix_has_no_failed_test(compat, rows):
    assert [row for row in rows if row["result"] != "ok"] == []


def test_versions_page_names_the_oldest_and_newest_torch():
    text = (ROOT / "docs" / "versions.md").read_text()
    oldest, newest = (".".join(map(str, bound)) for bound in (torch_private.OLDEST, torch_private.NEWEST))
    assert f"every minor release of torch from {oldest} to {newest}" in text
    assert [f"| before {oldest} |", f"| {oldest} to {newest} |", f"| after {newest} |"] == re.findall(
        r"^(\| (?:before|after|\d)[\d. to]+ \|)", text, re.MULTILINE
    )


def test_each_test_id_is_assigned_to_its_column_of_the_version_matrix(compat):
    ids = {
        f"{CHECKS}[loop.check_a-2]": "DataParallel, FullyShard",
        f"{CHECKS}[stages.check_a-2]": "PipelineParallel, products",
        f"{CHECKS}[pipeline.check_a-4]": "PipelineParallel, products",
        f"{CHECKS}[tensor.check_a-4]": None,
        f"{CHECKS}[checkpoint.check_a-2]": "checkpoints",
        "tests/torch_mpi/test_group.py::test_each_check_of_the_collectives_over_mpi_passes_on_every_rank[3-x]": "`mpi`",
        "tests/compat/horovod/test_on_ranks.py::test_horovod_compatibility_check_passes_on_every_rank[3-a.check]": "Horovod",
        "tests/compat/horovod/test_on_ranks.py::test_horovod_compatibility_check_passes_on_every_rank[4-a.check]": None,
        "tests/collectives/test_links.py::test_it": None,
    }
    assert {test_id: compat.column_of(test_id) for test_id in ids} == ids


def test_tests_of_every_module_in_tests_parallel_checks_have_a_column_in_the_version_matrix(compat):
    for path in (ROOT / "tests" / "parallel" / "checks").glob("[!_]*.py"):
        assert compat.column_of(f"{CHECKS}[{path.stem}.check_a-2]"), path


REPORT = """<testsuites><testsuite>
<testcase file="tests/test_torch_private.py" name="test_a"/>
<testcase file="tests/test_torch_private.py" name="test_b"><failure message="no"/></testcase>
<testcase file="tests/test_torch_private.py" name="test_c"><skipped/></testcase>
<testcase file="tests/parallel/test_examples.py" name="test_d"><error message="no"/></testcase>
<testcase file="tests/torch_mpi/test_backend.py" name="test_e"/>
</testsuite></testsuites>"""


def test_passed_and_failed_tests_of_a_junit_report_are_counted_per_column(compat):
    found = compat.read_report(REPORT)
    assert str(found["private parts"]) == "**1 of 2 failed**"
    assert list(found["private parts"].failed) == ["tests/test_torch_private.py::test_b"]
    assert str(found["examples"]) == "**1 of 1 failed**"
    assert str(found["`mpi`"]) == "ok"
    assert str(found["TensorParallel"]) == "not run"


def test_result_of_a_version_matrix_row_names_the_failed_columns(compat):
    columns = compat.read_report(REPORT)
    passed = {column: compat.Found(passed=1) for column in compat.COLUMNS}
    assert compat.row("2.15.0", "3.11", passed, "2026-01-01") == ("2.15.0", "3.11", "ok", "2026-01-01")
    failed = compat.row("2.15.0", "3.11", passed | {"examples": columns["examples"]}, "2026-01-01")
    assert failed[2] == "examples: **1 of 1 failed**"


def test_new_version_matrix_row_replaces_only_the_row_of_the_same_version(compat, tmp_path):
    page = tmp_path / "versions.md"
    page.write_text(f"before\n\n{compat.BEGIN}\n{compat.END}\n\nafter\n")
    ok = compat.read_report("<testsuites/>")
    for build, python, date in (
        *(("2.9.1+cu128", "3.11", "2026-01-01"), ("2.15.0+cu132", "3.11", "2026-01-01")),
        *(("2.15.0+cu132", "3.9", "2026-01-01"), ("2.15.0+cpu", "3.11", "2026-02-02")),
    ):
        compat.add_row(page, compat.row(build, python, ok, date))
    text = page.read_text()
    assert text.startswith("before\n\n<!--")
    assert text.endswith("-->\n\nafter\n")
    assert (
        "\nNot run yet: torch 2.14, torch 2.13, torch 2.12, torch 2.11, torch 2.10, Python 3.10, Python 3.12, " in text
    )
    assert [(row[0], row[1], row[-1]) for row in compat.rows_of(text)] == [
        ("2.15.0+cpu", "3.11", "2026-02-02"),
        ("2.15.0+cu132", "3.9", "2026-01-01"),
        ("2.9.1+cu128", "3.11", "2026-01-01"),
    ]


def test_version_matrix_skips_and_reports_a_python_version_that_is_not_installed(compat):
    here = "{}.{}".format(*sys.version_info[:2])
    cells, absent = compat.chosen([f"2.15.0@{here}", "2.14.1@3.99"])
    assert [(cell.torch, cell.python) for cell, _ in cells] == [("2.15.0", here)]
    assert absent == ["3.99"]
    assert subprocess.run([cells[0][1], "-c", ""], check=False).returncode == 0


def test_matrix_environment_is_removed_after_success_or_failure(compat, tmp_path, monkeypatch):
    monkeypatch.setattr(compat.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compat, "TABLE", tmp_path / "no page")
    seen = []

    def install(cell, python, folder):
        seen.append(folder)
        (folder / "venv").mkdir()
        raise ends.pop()

    monkeypatch.setattr(compat, "install", install)
    ends = [KeyboardInterrupt(), subprocess.CalledProcessError(1, ["pip"], "no such torch")]
    failed = compat.run(compat.Cell("2.99.0", "3.11"), sys.executable)
    assert failed == ["torch 2.99.0 on Python 3.11: could not be installed or run: pip"]
    with pytest.raises(KeyboardInterrupt):
        compat.run(compat.Cell("2.99.0", "3.11"), sys.executable)
    assert len(seen) == 2
    assert not any(folder.exists() for folder in seen)


def test_version_matrix_folders_of_a_dead_process_are_removed_and_live_ones_kept(compat, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, live = tmp_path / f"paceline-compat-{ended.pid}-a", tmp_path / f"paceline-compat-{os.getpid()}-b"
    for folder in (left, live):
        folder.mkdir()
    compat.remove_left_folders(tmp_path)
    assert (left.exists(), live.exists()) == (False, True)
