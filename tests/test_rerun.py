"""Reruns with changes: the script's options get other values, and a wrong change is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import JobError, RunNotFoundError
from paceline.job.job import Job
from paceline.rerun import Parameter, RerunChanges, changed, parameters
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.workspace import Workspace
from tests.helpers import make_job, make_run

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-l", "--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--opt", choices=["sgd", "adam"])
parser.add_argument("--amp", action=argparse.BooleanOptionalAction)
parser.add_argument("--sizes", type=int, nargs="+")
parser.add_argument("--tag", action="append")
args = parser.parse_args()
"""
CLICK = """
import click
@click.command()
@click.option("--lr", type=float)
@click.option("--shout/--quiet")
def main(lr, shout): ...
main()
"""


def run_of(tmp_path: Path, arguments: tuple[str, ...], script: str = SCRIPT, **values: object) -> tuple[RunFolder, Job]:
    job = make_job(arguments=arguments, **values)
    folder, _ = make_run(tmp_path / "runs", status=states.FAILED, job=job, snapshot_id="ab" * 32)
    source = tmp_path / "snapshots" / ("ab" * 32)
    source.mkdir(parents=True)
    (source / "train.py").write_text(script)
    folder.snapshot.symlink_to(source)
    return folder, job


@pytest.mark.parametrize(
    ("given", "change", "wanted"),
    [
        ("--lr 0.1 --epochs 3", {"lr": "0.5"}, "--lr 0.5 --epochs 3"),
        ("--epochs 3 --lr=0.1", {"--lr": "0.5"}, "--epochs 3 --lr=0.5"),
        ("-l 0.1 --epochs 3", {"lr": "0.5"}, "--lr 0.5 --epochs 3"),
        ("--epochs 3 --lr 1 --lr 2", {"lr": "3"}, "--epochs 3 --lr 3"),
        ("--epochs 3", {"lr": "0.5"}, "--epochs 3 --lr 0.5"),
        ("--epochs 3", {"lr": "-1e-05"}, "--epochs 3 --lr=-1e-05"),
        ("--epochs 3 -- x", {"lr": "1"}, "--epochs 3 --lr 1 -- x"),
        ("--lr 0.1 --epochs 3", {"lr": None}, "--epochs 3"),
        ("--epochs 3", {"amp": "true"}, "--epochs 3 --amp"),
        ("--amp --epochs 3", {"amp": "false"}, "--no-amp --epochs 3"),
        ("--no-amp --epochs 3", {"amp": None}, "--epochs 3"),
        ("--sizes 1 2 --epochs 3", {"sizes": "4 5 6"}, "--sizes 4 5 6 --epochs 3"),
        ("--epochs 3 --tag a --tag b", {"tag": "c d"}, "--epochs 3 --tag=c --tag=d"),
    ],
)
def test_rerun_changes_the_value_of_a_script_option(
    tmp_path: Path, given: str, change: dict[str, str | None], wanted: str
) -> None:
    folder, job = run_of(tmp_path, tuple(given.split()))
    made, problems = changed(folder, job, RerunChanges(parameters=change), tmp_path)
    assert problems == {}
    assert " ".join(made.arguments) == wanted


def test_rerun_changes_hydra_overrides(tmp_path: Path) -> None:
    folder, job = run_of(
        tmp_path, ("model.lr=0.1", "+x=1"), "import hydra\n@hydra.main(config_name='c')\ndef main(c): ...\n"
    )
    made, _ = changed(folder, job, RerunChanges(parameters={"model.lr": "0.5", "seed": "7", "+x": None}), tmp_path)
    assert made.arguments == ("model.lr=0.5", "seed=7")


def test_click_options_of_a_script_are_detected(tmp_path: Path) -> None:
    folder, job = run_of(tmp_path, ("--lr", "1", "--shout"), CLICK)
    assert [(one.name, one.value, one.is_switch) for one in parameters(folder)] == [
        ("--lr", "1", False),
        ("--shout", "true", True),
    ]
    made, _ = changed(folder, job, RerunChanges(parameters={"shout": "false"}), tmp_path)
    assert made.arguments == ("--lr", "1", "--quiet")


def test_rerun_parameters_include_options_of_the_script_and_values_of_the_run(tmp_path: Path) -> None:
    folder, _ = run_of(tmp_path, ("--epochs", "3", "--sizes", "1", "2", "--no-amp", "--extra", "a b", "pos"))
    assert parameters(folder) == [
        Parameter(name="--lr", value=None, type="float"),
        Parameter(name="--epochs", value="3", type="int", is_required=True),
        Parameter(name="--opt", value=None, type="str", choices=("sgd", "adam")),
        Parameter(name="--amp", value="false", type="str", is_switch=True),
        Parameter(name="--sizes", value="1 2", type="int", is_list=True),
        Parameter(name="--tag", value=None, type="str", is_list=True),
        Parameter(name="--extra", value="a b"),
    ]


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        (RerunChanges(parameters={"lr": "fast"}), "lr", "fast must be of type float"),
        (RerunChanges(parameters={"opt": "lion"}), "opt", "not one of its choices sgd, adam"),
        (RerunChanges(parameters={"amp": "maybe"}), "amp", "takes true or false"),
        (RerunChanges(parameters={"epochs": None}), "epochs", "requires"),
        (RerunChanges(parameters={"rate": "1"}), "rate", "the script has no option --rate"),
        (RerunChanges(parameters={"sizes": "1 'x"}), "sizes", "Close the quotes"),
        (RerunChanges(parameters={"sizes": "1 x"}), "sizes", "must be of type int"),
        (RerunChanges(compute_target="moon"), "compute_target", "there is no compute target 'moon'"),
        (RerunChanges(compute_target="../x"), "compute_target", "there is no compute target"),
        (RerunChanges(node_count="many"), "node_count", "'many'"),
        (RerunChanges(process_count_per_node="-1"), "process_count_per_node", "at least 1"),
        (RerunChanges(process_count_per_node=0), "process_count_per_node", "at least 1"),
        (RerunChanges(process_count_per_node="2"), "distributed_backend", "need a distributed_backend"),
        (RerunChanges(distributed_backend="smoke"), "distributed_backend", "smoke"),
        (RerunChanges(resume=True), "resume", "no checkpoint"),
    ],
)
def test_invalid_rerun_change_is_reported_under_its_field_with_the_reason(
    tmp_path: Path, changes: RerunChanges, field: str, said: str
) -> None:
    folder, job = run_of(tmp_path, ("--epochs", "3"))
    _, problems = changed(folder, job, changes, tmp_path)
    assert list(problems) == [field]
    assert said in problems[field]


def test_rerun_changes_node_count_process_count_and_backend(tmp_path: Path) -> None:
    folder, job = run_of(tmp_path, ("--epochs", "3"), node_count=(2, 4), distributed_backend="gloo")
    made, problems = changed(folder, job, RerunChanges(parameters={"lr": "1"}), tmp_path)
    assert (made.node_range, problems) == ((2, 4), {})
    made, _ = changed(folder, job, RerunChanges(node_count="1", process_count_per_node="3", arguments=("x",)), tmp_path)
    assert (made.node_range, made.world_size, made.arguments[-1]) == (None, 3, "x")


def test_workspace_rerun_with_an_invalid_change_or_an_unknown_run_raises_and_starts_no_run(tmp_path: Path) -> None:
    folder, _ = run_of(tmp_path, ("--epochs", "3"))
    workspace = Workspace(tmp_path)
    with pytest.raises(JobError, match=r"rate: the script has no option --rate.*node_count: "):
        workspace.rerun(folder.run_id, {"rate": 1}, node_count="x")
    with pytest.raises(RunNotFoundError):
        workspace.rerun("none_1700000000_00000001")
    assert [path.name for path in workspace.runs_dir.iterdir()] == [folder.run_id]
