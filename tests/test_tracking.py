from __future__ import annotations

import argparse
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import RunStateError, UserError
from paceline.runs.run import Run
from paceline.runs.search.facts import read_facts
from paceline.system.run_variables import TRACKED_VARIABLE
from paceline.workspace import Workspace
from tests.helpers import make_run, run_python, start_python

PROGRAM = """
import os, signal, subprocess, sys, time
import paceline
run = paceline.init({"lr": 0.1})
paceline.log({"loss": 0.5}, step=1)
print(run.id, flush=True)
"""


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    yield
    paceline.finish()


def run_of(program: str) -> Run:
    """The run of a program that prints the run's id."""
    with start_python(program, stderr=-3) as process:
        return Workspace.from_config().get_run(process.communicate()[0].split()[0])


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("", "Completed", None),
        ("paceline.finish(); paceline.finish()", "Completed", None),
        ("sys.exit(0)", "Completed", None),
        ("sys.exit(3)", "Failed", "The program ended with sys.exit(3)."),
        ("raise ValueError('bad batch')", "Failed", "ValueError: bad batch"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "Canceled", None),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "Failed",
            "The program that logged the run ended without complete().",
        ),
    ],
)
def test_tracked_run_ends_with_its_program(end: str, status: str, message: str | None) -> None:
    run = run_of(PROGRAM + end)
    assert (run.status, run.failure.message if run.failure else None) == (status, message)
    assert (run.get_metrics(), run.properties) == ({"loss": 0.5}, {"lr": "0.1"})
    assert run.experiment.name == Path.cwd().name.strip("-_")


def test_traceback_of_a_failed_program_is_stored_in_its_failure() -> None:
    failure = run_of(PROGRAM + "raise ValueError('bad batch')").failure
    assert failure is not None
    assert "raise ValueError" not in (failure.traceback or "")  # code of `-c` has no source lines
    assert (failure.traceback or "").startswith("Traceback")


def test_forked_children_and_subprocesses_log_to_the_run_of_their_program() -> None:
    child = """
if os.fork() == 0:
    paceline.log("forked", 2)
    sys.exit(5)
os.wait()
subprocess.run([sys.executable, "-c", "import sys, paceline; paceline.log('child', 1); print(paceline.init().id)"])
"""
    first, second = run_python(PROGRAM + child).split()
    run = Workspace.from_config().get_run(first)
    assert (first, run.status) == (second, "Completed")
    assert run.get_metrics() == {"loss": 0.5, "forked": 2, "child": 1}


RANK = """
import os, sys, time
import paceline
rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
if rank == 0:
    time.sleep(0.5)
run = paceline.init({"local_rank": rank})
paceline.log("loss", rank)
print(run.id, flush=True)
"""
TORCHRUN = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


#: This program starts two ranks, as a launcher does, and prints their output and exit codes.
LAUNCHER = """
import os, subprocess, sys
program, name = sys.argv[1:]
environments = [{**os.environ, name: str(rank)} for rank in range(2)]
started = [subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-3, env=each) for each in environments]
print(*(process.communicate()[0].decode().split()[0] for process in started), *(each.returncode for each in started))
"""


def ranks(program: str, variables: dict[str, str], rank: str) -> tuple[list[str], list[int]]:
    words = run_python(LAUNCHER, program, rank, environment=variables).split()
    return words[:2], [*map(int, words[2:])]


@pytest.mark.parametrize(("variables", "rank"), [(TORCHRUN, "RANK"), (SRUN, "SLURM_PROCID")], ids=["torchrun", "srun"])
def test_ranks_of_one_launch_have_one_run(variables: dict[str, str], rank: str) -> None:
    for number in (1, 2):  # the second launch has the same variables as the first
        ids, codes = ranks(RANK, variables, rank)
        assert (len(set(ids)), codes) == (1, [0, 0])
        run = Workspace.from_config().get_run(ids[0])
        assert run.get_metrics(by_rank=True) == {"0": {"loss": 0}, "1": {"loss": 1}}
        assert (run.status, run.properties) == ("Completed", {"local_rank": "0"})
        assert len([*paceline.Experiment(Workspace.from_config(), run.experiment.name).get_runs()]) == number


def test_exception_of_another_rank_is_reported_as_the_failure_of_the_run() -> None:
    # atexit calls the first registered function last, after rank 1 has stored its failure.
    begin = "import atexit, os\nif os.environ['RANK'] == '1': atexit.register(lambda: open('ended', 'w').close())\n"
    end = """
if rank: raise ValueError("bad batch")
for _ in range(10_000):
    if os.path.exists("ended"): break
    time.sleep(0.01)
import signal
os.kill(os.getpid(), signal.SIGTERM)
"""
    ids, codes = ranks(begin + RANK + end, TORCHRUN, "RANK")
    failure = Workspace.from_config().get_run(ids[0]).failure
    assert codes == [-signal.SIGTERM, 1]
    assert failure is not None
    assert (failure.rank, failure.message) == (1, "ValueError: bad batch")


def test_waiting_rank_raises_run_state_error_if_rank_0_never_calls_init(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("paceline.tracking._PATIENCE_S", 0.0)
    with pytest.raises(RunStateError, match=r"rank 1 has waited .* Call it on every rank, or on rank 0 only\."):
        paceline.init()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"run_id": 5}', '{"run_id": "../x"}', '{"run_id": "digits_1_2", "launcher": []}']
)
def test_waiting_for_rank_0_ignores_a_broken_launch_file(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline import tracking

    launch = tracking._launch_file(Workspace.from_config().path)
    launch.parent.mkdir()
    launch.write_text(content)
    monkeypatch.setattr("paceline.tracking._PATIENCE_S", 0.05)
    with pytest.raises(RunStateError, match="has waited"):
        tracking._wait_for_rank_0(Workspace.from_config().runs_dir, launch, "here", 1)


def test_tracked_program_has_its_script_and_arguments_in_the_record(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import paceline\nprint(paceline.init().id)\n")
    done = subprocess.run([sys.executable, script, "--lr", "0.1"], capture_output=True, text=True, check=True)
    run = Workspace.from_config().get_run(done.stdout.split()[0])
    assert run.record().command == (str(script), "--lr", "0.1")
    facts = read_facts(run.folder)
    assert facts is not None
    assert (facts.script, facts.arguments, facts.params["lr"]) == (str(script), "--lr 0.1", 0.1)


def test_sys_exit_function_can_still_be_pickled_after_paceline_init() -> None:
    paceline.init()
    assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit


def test_log_without_init_raises_with_the_next_step() -> None:
    with pytest.raises(RunStateError, match=r"^paceline.log\(\) has no run to log to. Call paceline.init\(\) before"):
        paceline.log("loss", 1)


def test_second_init_returns_the_same_run_and_adds_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    run = paceline.init({"lr": 0.1}, experiment="digits", name="first", tags={"k": 1})
    assert paceline.init({"lr": 0.2, "deep": {"width": 3}}) == run == Run.get_context()
    assert (run.properties, run.tags, run.display_name) == ({"lr": "0.1", "deep.width": "3"}, {"k": "1"}, "first")
    assert "parameter 'lr' stays '0.1'; '0.2' came later" in capsys.readouterr().err
    with pytest.raises(RunStateError, match=r"this program logs to .* of experiment 'digits'. Call paceline.finish"):
        paceline.init(experiment="other")
    paceline.finish()
    other = paceline.init(experiment="other")
    assert (run.status, other.status, other.experiment.name) == ("Completed", "Running", "other")


def test_init_after_a_run_was_ended_starts_a_new_run() -> None:
    run = paceline.init()
    run.fail("no")
    assert paceline.init() != run
    assert run.status == "Failed"


def test_init_in_a_worker_returns_the_run_of_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fd = make_run(tmp_path / "ws/runs", status="Running")
    variables = {"RUN_DIR": str(folder.path), "RUN_ID": folder.run_id, "RANK": "1", "WORLD_SIZE": "2", "ATTEMPT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PACELINE_{name}", value)
    paceline.log("early", 1)
    run = paceline.init({"lr": 1}, experiment="elsewhere")
    assert (run.id, run.properties) == (folder.run_id, {})  # rank 1 has no parameters, because rank 0 stores them
    assert run.get_metrics(by_rank=True) == {"1": {"early": 1}}
    paceline.finish()
    assert run.status == "Running"
    os.close(fd)


@dataclass
class Settings:
    lr: float
    data: dict[str, int]


@pytest.mark.parametrize(
    "params", [{"lr": 0.1, "data": {"n": 3}}, argparse.Namespace(lr=0.1, data={"n": 3}), Settings(0.1, {"n": 3})]
)
def test_init_stores_parameters_of_each_supported_type(params: object) -> None:
    assert paceline.init(params).properties == {"lr": "0.1", "data.n": "3"}


@pytest.mark.parametrize("params", [[1], "lr=1", 5, Settings])
def test_parameters_of_another_type_are_refused_before_a_run_starts(params: Any) -> None:
    with pytest.raises(UserError, match=r"Give a dict, an argparse.Namespace or a dataclass"):
        paceline.init(params)
    assert TRACKED_VARIABLE not in os.environ
    assert not (Workspace.from_config().experiments)


def test_exception_at_an_interactive_prompt_does_not_fail_the_run() -> None:
    run = run_of(PROGRAM + "sys.ps1 = '>>> '\nraise ValueError('a typing error')")
    assert run.status == "Completed"


def test_tracking_a_plain_program_does_not_import_torch_numpy_pandas_or_matplotlib() -> None:
    code = PROGRAM + "print(*sorted({'numpy', 'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    assert run_python(code).split("\n", 1)[1].strip() == ""
