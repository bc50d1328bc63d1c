"""Checks that the suite adds for targets whose nodes are this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.job.job import Job
from paceline.targets import configured
from paceline.testing.under_test import TargetUnderTest
from tests.helpers import wait_until

RUN: Any = SimpleNamespace(id="suite_1700000000_deadbeef")


class Local(TargetUnderTest):
    kind = "local"


class Toy(TargetUnderTest):
    kind = "toy"
    settings: Mapping[str, Any] = {"label": "red"}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def test_processes_of_a_run_are_found_by_environment_and_command_line(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    target = Local(tmp_path)
    assert target.processes(RUN) == {}
    started.append(subprocess.Popen(["sleep", "60"], env={"PACELINE_RUN_ID": RUN.id}))
    started.append(subprocess.Popen(["sh", "-c", "sleep 60; exit", RUN.id], env={}))

    pids = {process.pid for process in started}
    wait_until(lambda: set(target.processes(RUN)) == pids, "both are seen")
    for process in started:
        process.kill()
    # The killed processes are zombies until this test waits for them.
    wait_until(lambda: target.processes(RUN) == {}, "neither is seen")


def test_target_under_test_is_added_to_its_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.system.plugins.installed", lambda group: {"toy": "tests.targets.toy:ToyTarget"})
    target = Toy(tmp_path)
    described = configured.read(target.workspace_dir, target.name)

    assert (described.kind, described.settings) == ("toy", {"label": "red"})
    assert Local(tmp_path).name == "local"


def test_job_with_a_slow_package_build_is_available_only_if_nodes_share_a_folder(tmp_path: Path) -> None:
    slow = Local(tmp_path).slow_preparation()
    assert slow is not None
    (package,) = Job(entry_script="train.py", **slow).environment.pip_packages
    assert (Path(package) / "pyproject.toml").exists()
    assert Local(tmp_path, is_shared=False).slow_preparation() is None
