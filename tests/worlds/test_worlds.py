"""The real supervisor and agents in simulated time, with faults that a seed draws (`python -m tests.worlds`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: How many worlds are simulated: 300 here, 100,000 with `make proof`.
WORLDS = int(os.environ.get("PACELINE_WORLDS", "300"))
JOBS = os.cpu_count() or 1
#: The fault after which two supervisors of the same run are alive.
TWO = "cut off supervisor's node"

# A busy machine takes some minutes, and 100,000 worlds take hours.
pytestmark = pytest.mark.timeout(3600 + 2 * WORLDS)


def simulate(*words: object) -> subprocess.CompletedProcess[str]:
    # A process of its own, because the simulation replaces the standard library's clocks, threads and files.
    command = [sys.executable, "-m", "tests.worlds", *map(str, words)]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)


def test_supervisor_keeps_all_rules_in_simulated_worlds():
    done = simulate("--seeds", WORLDS, "--jobs", JOBS)
    assert (done.returncode, f"{WORLDS} worlds, 0 broke a rule" in done.stdout) == (0, True), done.stdout + done.stderr


def test_second_supervisor_beside_a_suspended_one_keeps_all_rules():
    done = simulate("--seeds", WORLDS // 3, "--jobs", JOBS, "--fault", TWO)
    assert (done.returncode, ", 0 broke a rule" in done.stdout) == (0, True), done.stdout + done.stderr


def test_seed_repeats_a_world_to_the_same_event():
    first, second = (simulate("--seed", 5, "--switches").stdout for _ in range(2))
    events, result = first.split("\n{\n", 1)
    assert events == second.split("\n{\n", 1)[0]
    assert json.loads("{" + result)["events"] > 400


@pytest.mark.parametrize(
    ("sabotage", "message", "fault"),
    [
        ("lost lines", "the log of rank", ""),
        ("lost ends", "has no end", ""),
        ("lost records", "the run is Finalizing", ""),
        ("lost claims", "released the run's nodes after the claim", TWO),
    ],
)
def test_fault_that_is_built_into_paceline_breaks_a_rule(sabotage, message, fault):
    done = simulate("--seeds", 20, "--jobs", JOBS, "--sabotage", sabotage, "--fault", fault)
    assert done.returncode == 1
    assert message in done.stdout
