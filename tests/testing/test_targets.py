"""The conformance suite of targets: the documentation's own target passes it, and faults do not."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.testing.under_test import TargetUnderTest
from tests.docs.pages import blocks, code_words, section, tables
from tests.testing.conftest import PAGE, SUITE, TARGET

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

#: Kind of faulty target -> (the check that finds the fault, its message).
FAULTS = {
    "generous": ("test_a_job_that_can_never_fit_is_refused_at_submission", "DID NOT RAISE"),
    "deaf": ("test_a_run_is_canceled_while_it_runs[gloo]", "saved.exists()"),
    "foreign": ("test_workers_get_the_documented_environment_variables[single]", "SLURM_PROCID"),
    "forgetful": ("test_runs_at_the_same_time_have_separate_outputs_and_logs", "no process of the run is left"),
    "namesake": ("test_a_run_goes_through_its_states_in_order[gloo]", "len(set("),
}


def test_example_target_in_the_documentation_has_at_most_60_lines() -> None:
    lines = [line for line in TARGET.splitlines() if line.strip()]
    assert len(lines) <= 60


def test_documentation_page_lists_every_attribute_of_the_target_test_class() -> None:
    rows = tables(section(PAGE, "The conformance suite"))[0]
    written = {word.partition("(")[0] for row in rows for word in code_words(row[0])}
    real = {name for name in [*vars(TargetUnderTest), *TargetUnderTest.__annotations__] if not name.startswith("_")}
    # The page does not describe these attributes, which follow from other attributes or are for the suite itself.
    assert written == real - {"name", "workspace_dir", "finished"}


@pytest.mark.promise("page-s-target-60-lines")
@pytest.mark.slow
def test_documented_example_target_passes_the_conformance_suite(run_in_environment: Runner, tmp_path: Path) -> None:
    suite = SUITE.replace("    backends", "    slack_s = 60.0\n    backends")  # this machine may be busy
    (tmp_path / "test_nice.py").write_text(suite)
    done = run_in_environment("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=400", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:]
    # The skipped tests need mpirun, or a node that can be lost.
    assert re.search(r"\d\d passed, 12 skipped", done.stdout), done.stdout[-2000:]


@pytest.mark.slow
def test_commands_of_the_documentation_page_on_target_plugins_run(run_in_environment: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint(os.nice(0), os.environ['RANK'])\n")
    for line in blocks(PAGE, "console")[0].text.splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "paceline"
        done = run_in_environment("-m", "paceline", *words, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}"
    # All four workers have the requested low priority, which adds to the priority of the tests.
    levels = re.findall(r"(\d+) ([0-3])$", done.stdout, re.MULTILINE)
    assert sorted(rank for _, rank in levels) == ["0", "1", "2", "3"]
    assert all(int(level) >= 15 for level, _ in levels)


@pytest.mark.promise("page-s-target-60-lines")
@pytest.mark.slow
def test_conformance_suite_detects_faulty_targets(run_in_environment: Runner, tmp_path: Path) -> None:
    suite = SUITE
    for kind in FAULTS:
        given = f"    @pytest.fixture\n    def under_test(self, {kind}_under_test):\n        return {kind}_under_test\n"
        suite += (
            SUITE.replace("Nice", kind.capitalize())
            .replace("nice", kind)
            .replace("under_test(", f"{kind}_under_test(")
            .replace("    pass\n", given)
            # Request only slightly more than the machine has: a target that refuses nothing must not start thousands of
            # agents.
            .replace("    backends", "    never_fits = {'node_count': 3, 'distributed_backend': 'gloo'}\n    backends")
        )
    (tmp_path / "test_faulty.py").write_text(suite)
    checks = [f"test_faulty.py::Test{kind.capitalize()}::{check}" for kind, (check, _) in FAULTS.items()]
    done = run_in_environment("-m", "pytest", "-q", "-p", "no:cacheprovider", *checks, cwd=tmp_path)

    found = re.split(r"\n_+ (?:ERROR at teardown of )?Test(\w+)\.", done.stdout)
    said = {kind.capitalize(): "" for kind in FAULTS}
    for name, text in zip(found[1::2], found[2::2], strict=True):
        said[name] += text
    for kind, (_, words) in FAULTS.items():
        assert words in said[kind.capitalize()], f"{kind} was not found:\n{done.stdout[-6000:]}"
