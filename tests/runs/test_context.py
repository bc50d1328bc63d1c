from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunContextError, RunStateError
from paceline.runs import states
from paceline.runs.context import WorkerContext
from paceline.runs.offline import OfflineRun
from paceline.workspace import Run
from tests.helpers import make_run, run_python

WORKER = {
    "PACELINE_RUN_ID": "digits_1_2",
    "PACELINE_RUN_DIR": "/ws/runs/digits_1_2",
    "PACELINE_RANK": "3",
    "PACELINE_WORLD_SIZE": "4",
    "PACELINE_ATTEMPT": "2",
}


def test_worker_context_has_run_rank_and_attempt():
    context = WorkerContext.from_environment(WORKER)
    assert context == WorkerContext(Path("/ws/runs/digits_1_2"), rank=3, world_size=4, attempt=2)


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"PACELINE_RUN_DIR": ""}])
def test_worker_context_outside_a_run_is_none(environment):
    assert WorkerContext.from_environment(environment) is None


@pytest.mark.parametrize("name", ["PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_ATTEMPT"])
@pytest.mark.parametrize("value", [None, "", "x", "-1", "1.5", " 1"])
def test_missing_or_invalid_rank_variable_of_a_worker_raises_run_context_error_with_its_name(name, value):
    environment = {key: text for key, text in WORKER.items() if key != name}
    if value is not None:
        environment[name] = value
    with pytest.raises(RunContextError, match=f"^{name}=.*digits_1_2.*launcher sets"):
        WorkerContext.from_environment(environment)


@pytest.mark.parametrize("value", ["-1", "x", "0"])
def test_worker_context_uses_paceline_rank_and_ignores_a_rank_variable_set_by_the_user(value):
    alone = WORKER | {"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "1", "RANK": value}
    assert WorkerContext.from_environment(alone) == WorkerContext(Path("/ws/runs/digits_1_2"), 0, 1, 2)


def test_get_context_in_a_worker_returns_its_run_and_logs_metrics_under_its_rank(tmp_path, monkeypatch):
    folder, fd = make_run(tmp_path / "ws/runs", status=states.RUNNING)
    for name, value in (WORKER | {"PACELINE_RUN_DIR": str(folder.path)}).items():
        monkeypatch.setenv(name, value)
    run: Any = Run.get_context()
    assert (run.id, run.experiment.name, run.experiment.workspace.path) == (folder.run_id, "digits", tmp_path / "ws")
    run.log("loss", 0.5)
    assert run.get_metrics(by_rank=True) == {"3": {"loss": 0.5}}
    assert '"attempt": 2' in (folder.metrics / "rank_3.2.jsonl").read_text()
    os.close(fd)


@pytest.mark.promise("outside-run-script-works-itself")
def test_get_context_outside_a_run_returns_an_offline_run():
    assert isinstance(Run.get_context(), OfflineRun)


def test_get_context_outside_a_run_raises_without_allow_offline():
    with pytest.raises(RunStateError, match="belongs to no run"):
        Run.get_context(allow_offline=False)


def test_get_context_raises_an_error_if_a_worker_has_no_rank_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    with pytest.raises(RunContextError, match="PACELINE_RANK=''"):
        Run.get_context()


#: This program starts the Python code in its first argument, with an empty environment.
CLEARED = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={}, check=True)"


@pytest.mark.promise("run-s-script-starts-cleared")
@pytest.mark.parametrize("rank", ["PACELINE_RANK", "OMPI_COMM_WORLD_RANK"])
def test_process_with_a_cleared_environment_finds_its_run_by_its_ancestors(tmp_path, rank):
    folder, fd = make_run(tmp_path / "ws/runs", status=states.RUNNING)
    worker = {key: value for key, value in WORKER.items() if key != "PACELINE_RANK"}
    worker |= {"PACELINE_RUN_DIR": str(folder.path), "PACELINE_RUN_ID": folder.run_id, rank: "3"}
    code = (
        "import os, paceline; run = paceline.Run.get_context(); run.log('loss', 0.5)\n"
        "print(run.get_metrics(by_rank=True), os.environ['PACELINE_RUN_ID'], 'PACELINE_RUN_DIR' in os.environ)"
    )
    assert run_python(CLEARED, code, environment=worker) == f"{{'3': {{'loss': 0.5}}}} {folder.run_id} False\n"
    os.close(fd)


@pytest.mark.promise("run-s-script-starts-cleared")
def test_orphaned_process_of_a_run_raises_instead_of_losing_metrics(tmp_path):
    code = (
        "import os, paceline\n"
        "try: paceline.Run.get_context()\n"
        "except paceline.errors.RunContextError as error: print(error)\n"
        "os.environ['PACELINE_RUN_DIR'] = ''\n"
        "print(type(paceline.Run.get_context()).__name__)\n"
    )
    # The process finds its run by a supervisor among its ancestors, which has this command line and the variable
    # PACELINE_SUPERVISOR.
    said = run_python(CLEARED, code, "-m", "paceline.supervisor", environment={"PACELINE_SUPERVISOR": "digits_1_2"})
    assert said.startswith(
        "this process was started inside run digits_1_2, with an environment without the run's variables"
    )
    assert said.endswith("OfflineRun\n")
    assert run_python(CLEARED, code, environment={"PACELINE_SUPERVISOR": "digits_1_2"}) == "OfflineRun\n"


def test_get_context_imports_only_the_standard_library(tmp_path):
    code = (
        "import sys; before = set(sys.modules); import paceline; paceline.Run.get_context().log('a', 1)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    assert run_python(code).endswith("['paceline']\n")
