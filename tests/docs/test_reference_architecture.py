"""The page of the reference architecture: its commands run, its figures are those that were measured and computed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks
from tests.docs.test_docs import assert_prints_what_it_says

PAGE = DOCS / "reference-architecture.md"
COMMANDS = blocks(PAGE, "console")


@pytest.mark.promise("reference-architecture-s-example-runs")
@pytest.mark.slow
def test_example_trains_on_two_nodes_and_resumes_from_checkpoints(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = [
        block
        for block in COMMANDS
        if not any(word in block.text for word in ("arithmetic", "compute add", "simulated"))
    ]
    assert ["prepare" in block.text for block in run] == [True, False, False]
    for block in run:
        assert_prints_what_it_says(block)


@pytest.mark.promise("simulated-nodes-run-real-agents")
def test_example_on_simulated_nodes_survives_a_dead_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "many_nodes", tmp_path / "examples" / "many_nodes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    add, run = (block for block in COMMANDS if "compute add" in block.text or "simulated" in block.text)
    for block in (add, run):
        assert_prints_what_it_says(block)


@pytest.mark.promise("reference-architecture-s-example-runs")
def test_arithmetic_on_the_reference_architecture_page_equals_the_output_of_its_program() -> None:
    (said,) = [block.text for block in COMMANDS if "arithmetic" in block.text]
    command = [sys.executable, str(ROOT / "examples" / "many_nodes" / "arithmetic.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.partition("\n")[2] == printed


@pytest.mark.promise("reference-architecture-s-example-runs")
def test_figures_on_the_reference_architecture_page_equal_the_benchmark_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "many_nodes.json").read_text())
    text = " ".join(PAGE.read_text().split())
    assert f"did {2 * result['of_twice']:.2f} times the work of one" in text
    assert f"a killed worker cost {result['restart_s']:.1f} s" in text
