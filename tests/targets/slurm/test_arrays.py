"""Runs as tasks of a job array: the task of each run, for Slurm, for the script and for readers."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paceline.targets.slurm.script import Array, array_text, listed_id
from paceline.targets.slurm.settings import SlurmSettings
from tests.helpers import make_job


def array(first: int, last: int, at_once: int = 4) -> Array:
    return Array.of([f"digits_1_ab_{number}" for number in range(first, last + 1)], at_once)


def text(found: Array, **values: Any) -> str:
    given: dict[str, Any] = {"runs_dir": PurePosixPath("/w 1/100%/runs"), "library_dir": PurePosixPath("/lib")}
    return array_text(make_job(), SlurmSettings.of("lab", {}), found, python="python3", **(given | values))


@pytest.mark.parametrize(
    ("first", "last", "option", "pattern"),
    [(0, 7, "--array=0-7%4", "digits_1_ab_%a"), (2040, 2042, "--array=40-42", "digits_1_ab_2%3a")],
)
def test_array_task_number_maps_to_its_run(first: int, last: int, option: str, pattern: str) -> None:
    found = array(first, last)
    lines = text(found).splitlines()
    assert f"#SBATCH {option}" in lines
    assert f'#SBATCH "--output=/w 1/100%%/runs/{pattern}/logs/driver.log"' in lines
    assert f"#SBATCH --job-name=paceline-digits_1_ab_{first}-{last}" in lines
    assert list(found.tasks) == [number % 1000 for number in range(first, last + 1)]


def test_array_task_script_starts_the_supervisor_of_its_own_run(tmp_path: Path) -> None:
    runs = tmp_path / "it's 1" / "runs"
    run = runs / "digits_1_ab_2041"
    run.mkdir(parents=True)
    program = tmp_path / "python 3"
    program.write_text('#!/bin/sh\nprintf "%s|" "$@" "$PWD" "$PACELINE_SUPERVISOR" "$PYTHONPATH"\n')
    program.chmod(0o755)
    script = array_text(
        make_job(),
        SlurmSettings.of("lab", {}),
        array(2040, 2042),
        runs_dir=PurePosixPath(runs),
        library_dir=PurePosixPath("/lib"),
        python=str(program),
    )
    environment = {"SLURM_ARRAY_TASK_ID": "41", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.split("|")[:-1] == ["-m", "paceline.supervisor", str(run), str(run), run.name, "/lib"]


def test_array_task_id_is_formatted_like_squeue() -> None:
    assert listed_id({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}) == "5_0"
    assert listed_id({"SLURM_JOB_ID": "7"}) == "7"
    assert listed_id({}) == ""
