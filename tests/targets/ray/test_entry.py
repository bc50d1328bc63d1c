"""The scripts that a Ray job runs, run by a real shell below stand-ins for Ray's processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.targets.ray.entry import shared_entrypoint, travel_entrypoint

#: This program starts the script as Ray does: below a worker, which is below a raylet whose command line has the interpreter.
RAYLET = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]]).returncode)"
#: The address of the node, as the raylet's command line has it.
ADDRESS = "10.1.2.3"
WORKER = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1], shell=True).returncode)"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "a 'b\"; $(touch oops)" / "runs" / "x_1_00000001"
    (folder / "logs").mkdir(parents=True)
    (folder / "state.json").write_text('{"status": "Completed"}')
    return folder


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(script: str, ray_python: Path | None, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [f"--python_worker_command={ray_python} setup_worker.py --x", f"--node_ip_address={ADDRESS}"]
    command = command if ray_python else []
    return subprocess.run(
        [sys.executable, "-c", RAYLET, WORKER, script, *command],
        cwd=cwd,
        env={"PATH": os.defpath, "PYTHONPATH": "/theirs"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def driver_log(run_dir: Path) -> str:
    return (run_dir / "logs" / "driver.log").read_text()


def test_supervisor_uses_the_submitters_python_if_it_exists_on_the_cluster(run_dir: Path, tmp_path: Path) -> None:
    ray = program(tmp_path / "ray" / "python", "")
    mine = program(tmp_path / "my 'env" / "python", 'echo "mine: $*"; env | grep ^PACELINE_; echo path $PYTHONPATH')
    done = run(shared_entrypoint(run_dir, tmp_path / "li b", str(mine)), ray, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = driver_log(run_dir).splitlines()
    assert f"mine: -m paceline.supervisor {run_dir}" in lines
    assert f"PACELINE_RAY_PYTHON={ray}" in lines
    assert f"PACELINE_RAY_LIBRARY={tmp_path / 'li b'}" in lines
    assert f"PACELINE_RAY_ADDRESS={ADDRESS}" in lines
    assert "PACELINE_SUPERVISOR=x_1_00000001" in lines
    assert "PACELINE_SHELL_PYTHONPATH=/theirs" in lines
    assert f"path {tmp_path / 'li b'}" in lines
    assert not (tmp_path / "oops").exists()
    assert not (run_dir / "oops").exists()


def test_supervisor_falls_back_to_the_python_that_has_ray(run_dir: Path, tmp_path: Path) -> None:
    ray = program(tmp_path / "ray" / "python", 'echo "ray\'s: $*"')
    run(shared_entrypoint(run_dir, tmp_path, "/nowhere/python"), ray, tmp_path)
    assert f"ray's: -m paceline.supervisor {run_dir}" in driver_log(run_dir).splitlines()


def test_ray_job_fails_if_its_run_did_not_complete(run_dir: Path, tmp_path: Path) -> None:
    ray = program(tmp_path / "ray" / "python", "")
    (run_dir / "state.json").write_text('{"status": "Failed"}')
    script = shared_entrypoint(run_dir, tmp_path, str(ray))
    assert run(script, ray, tmp_path).returncode == 1


def test_ray_job_fails_and_names_the_run_folder_if_the_cluster_cannot_see_that_folder(
    run_dir: Path, tmp_path: Path
) -> None:
    ray = program(tmp_path / "ray" / "python", "")
    script = shared_entrypoint(tmp_path / "not 'here", tmp_path, str(ray))
    done = run(script, ray, tmp_path)
    assert done.returncode == 70
    assert done.stdout.startswith("paceline: The cluster's head, ")
    assert f"does not see {tmp_path / 'not '}" in done.stdout.replace("'here", "")
    assert "datastore" in done.stdout


def test_job_without_a_shared_folder_imports_paceline_from_its_package(tmp_path: Path) -> None:
    ray = program(tmp_path / "ray" / "python", 'echo "ray\'s: $*"; env | grep -e ^PACELINE_ -e ^PYTHONPATH')
    done = run(travel_entrypoint("x_1", None, "word"), ray, tmp_path)
    lines = done.stdout.splitlines()
    assert "ray's: -m paceline.targets.ray.remote_supervisor word" in lines
    assert f"PYTHONPATH={tmp_path}" in lines
    assert f"PACELINE_RAY_LIBRARY={tmp_path}" in lines


def test_stopped_ray_job_waits_for_its_supervisor(run_dir: Path, tmp_path: Path) -> None:
    # Ray signals every process of a job at once; the shell must not go before the supervisor.
    slow = program(tmp_path / "slow" / "python", 'kill -TERM $PPID; sleep 0.3; echo "last words"')
    script = shared_entrypoint(run_dir, tmp_path, str(slow))
    assert run(script, slow, tmp_path).returncode == 0
    assert driver_log(run_dir) == "last words\n"
