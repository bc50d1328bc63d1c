from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import pytest

from paceline.compat.azureml.core.dataset import Dataset
from paceline.compat.azureml.core.experiment import Experiment, Run
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
from paceline.compat.azureml.exceptions import HyperDriveConfigException, HyperDriveRuntimeException
from paceline.compat.azureml.train.estimator import Estimator
from paceline.compat.azureml.train.hyperdrive import (
    BanditPolicy,
    BayesianParameterSampling,
    GridParameterSampling,
    HyperDriveConfig,
    HyperDriveRun,
    HyperDriveRunConfig,
    MedianStoppingPolicy,
    PrimaryMetricGoal,
    RandomParameterSampling,
    TruncationSelectionPolicy,
    choice,
    loguniform,
    normal,
    randint,
    uniform,
)
from tests.helpers import wait_until
from tests.sweeps.helpers import hide_matplotlib

SPACE = {"--lr": loguniform(-6, -1), "batch": choice(16, 32)}


def config(**changes):
    values = {
        "hyperparameter_sampling": RandomParameterSampling(SPACE),
        "primary_metric_name": "accuracy",
        "primary_metric_goal": PrimaryMetricGoal.MAXIMIZE,
        "max_total_runs": 4,
        "run_config": ScriptRunConfig("src", "train.py"),
    }
    return HyperDriveConfig(**(values | changes))


def test_sweep_classes_have_the_sdks_parameters():
    def names(function):
        return [*inspect.signature(function).parameters][1:] if inspect.isclass(function) is False else None

    assert names(BanditPolicy.__init__) == ["evaluation_interval", "slack_factor", "slack_amount", "delay_evaluation"]
    assert names(HyperDriveConfig.__init__)[:7] == [
        *("hyperparameter_sampling", "primary_metric_name", "primary_metric_goal", "max_total_runs"),
        *("max_concurrent_runs", "max_duration_minutes", "policy"),
    ]
    assert names(HyperDriveRunConfig.__init__)[:2] == ["estimator", "hyperparameter_sampling"]


def test_bounds_of_loguniform_are_logarithms():
    assert loguniform(-6, -1) == __import__("paceline").loguniform(math.exp(-6), math.exp(-1))
    assert choice(range(3)) == choice([0, 1, 2]) == choice(0, 1, 2)
    assert randint(4)
    with pytest.raises(HyperDriveConfigException, match="logarithms"):
        loguniform(1, 1000)
    with pytest.raises(HyperDriveConfigException):
        uniform(2, 1)


def test_policies_accept_positional_arguments_in_the_sdks_order():
    bandit = BanditPolicy(2, 0.1, None, 5).policy
    assert (bandit.evaluation_interval, bandit.slack_factor, bandit.delay_evaluation) == (2, 0.1, 5)
    assert MedianStoppingPolicy(1, 5).policy.delay_evaluation == 5
    assert TruncationSelectionPolicy(20, 1, 5).policy.truncation_percentage == 20
    with pytest.raises(HyperDriveConfigException, match="slack"):
        BanditPolicy(1, 0.1, 0.2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run_config": None}, "exactly one"),
        ({"estimator": Estimator("src", compute_target="local", entry_script="t.py")}, "exactly one"),
        ({"run_config": "train.py"}, "ScriptRunConfig"),
        ({"primary_metric_goal": "up"}, "MAXIMIZE"),
        ({"max_total_runs": 0}, "max_total_runs=0"),
        ({"policy": "bandit"}, "policy"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_hyperdrive_config_refuses_invalid_values(changes, said):
    with pytest.raises(HyperDriveConfigException, match=said):
        config(**changes)


def test_samplings_accept_the_same_expressions_as_the_sdk():
    with pytest.raises(HyperDriveConfigException, match="choice only"):
        GridParameterSampling({"lr": uniform(0, 1)})
    with pytest.raises(HyperDriveConfigException, match="choice and uniform"):
        BayesianParameterSampling({"lr": normal(0, 1)})
    assert PrimaryMetricGoal.from_str("minimize") is PrimaryMetricGoal.MINIMIZE


SCRIPT = """
import argparse, os
from azureml.core import Dataset, Run
parser = argparse.ArgumentParser()
parser.add_argument("--resume-from")
parser.add_argument("--lr", type=float)
parser.add_argument("--batch", type=int)
parser.add_argument("--data")
parser.add_argument("--left")
given = parser.parse_args()
run = Run.get_context()
if given.resume_from:
    assert given.resume_from == os.environ["AZUREML_DATAREFERENCE_MODEL_LOCATION"]
    run.log("before", int(open(os.path.join(given.resume_from, "batch.txt")).read()))
    run.log("accuracy", 1)
    # A dataset among the arguments is asked for by what the script is given for it.
    run.log("rows", len(Dataset.get_by_id(run.experiment.workspace, id=given.data).to_pandas_dataframe()))
    open(os.path.join(given.left, "x"), "w").write(run.id)
else:
    open("outputs/batch.txt", "w").write(str(given.batch))
    for step in (3, 1):
        run.log("accuracy", given.batch * step)
"""


@pytest.mark.promise("sweep-s-children-gone-own")
def test_sweep_over_an_estimator_runs_and_finds_the_best_child(ws):
    hide_matplotlib(ws.path)
    Path("src").mkdir()
    Path("src/train.py").write_text(SCRIPT)
    estimator = Estimator(
        "src",
        compute_target="local",
        entry_script="train.py",
        script_params={"--lr": 5, "--batch": 1},
        user_managed=True,
    )
    swept = HyperDriveRunConfig(
        estimator=estimator,
        hyperparameter_sampling=GridParameterSampling({"--batch": choice(16, 32)}),
        primary_metric_name="accuracy",
        primary_metric_goal=PrimaryMetricGoal.MAXIMIZE,
        max_total_runs=9,
        max_concurrent_runs=2,
    )
    run = Experiment(ws, "hd").submit(swept)
    assert isinstance(run, HyperDriveRun)
    wait_until(lambda: run.get_status() in ("Completed", "Failed", "Canceled"), "the sweep ends", 60)
    assert run.get_status() == "Completed", (run.folder.logs / "driver.log").read_text()
    best = run.get_best_run_by_primary_metric()
    # A trial's result is the best value of its series, not the last value.
    assert best.get_metrics() == {"accuracy": [96, 32]}
    assert best.parent.id == run.id
    rows = run.get_children_sorted_by_primary_metric()
    assert [row["best_primary_metric"] for row in rows] == [96, 48]
    assert sorted(child.id for child in run.get_children()) == [f"{run.id}_0", f"{run.id}_1"]
    assert json.loads(run.tags[f"_aml_system_{best.id}"]) == {"--batch": 32}
    assert json.loads(run.get_hyperparameters()[best.id]) == {"--batch": 32}
    assert json.loads(run.tags["generator_config"])["name"] == "GRID"
    assert json.loads(run.tags["primary_metric_config"]) == {"name": "accuracy", "goal": "maximize"}
    # Run and HyperDriveRun return the same metrics.
    table = run.get_metrics("best_child_by_primary_metric")["best_child_by_primary_metric"]
    assert Run(Experiment(ws, "hd"), run.id).get_metrics()["best_child_by_primary_metric"] == table
    last = {key: column[-1] if isinstance(column, list) else column for key, column in table.items()}
    assert (last.pop("timestamp") > "2026", last) == (
        True,
        {"metric_name": "accuracy", "run_id": best.id, "metric_value": 96, "final": True},
    )
    assert set(run.get_metrics()) == {f"{run.id}_0", f"{run.id}_1"}
    assert isinstance(ws.get_run(run.id), HyperDriveRun)
    assert [type(one) for one in Experiment(ws, "hd").get_runs(type="hyperdrive")] == [HyperDriveRun]
    with pytest.raises(HyperDriveRuntimeException):
        run.fail()
    Path("rows.csv").write_text("a\n1\n2\n")
    rows = Dataset.Tabular.from_delimited_files("rows.csv").as_named_input("rows")
    left = OutputFileDatasetConfig("left", destination=(ws.get_default_datastore(), "left/{run-id}"))
    again = HyperDriveConfig(
        run_config=ScriptRunConfig("src", "train.py", ["--data", rows, "--left", left]),
        hyperparameter_sampling=GridParameterSampling({"--batch": choice(1, 32)}),
        primary_metric_name="accuracy",
        primary_metric_goal=PrimaryMetricGoal.MAXIMIZE,
        max_total_runs=2,
        resume_from=run,
        resume_child_runs=[best],
        custom_run_id="again_1",
    )
    with pytest.raises(HyperDriveConfigException, match="optimized 'accuracy', maximize"):
        Experiment(ws, "hd").submit(HyperDriveConfig(**{**vars(again), "primary_metric_name": "loss"}))
    second = Experiment(ws, "hd").submit(again)
    wait_until(lambda: second.get_status() in ("Completed", "Failed", "Canceled"), "the sweep ends", 60)
    assert second.get_status() == "Completed", (second.folder.logs / "driver.log").read_text()
    assert second.id == "again_1"
    assert second.get_metrics()["again_1_0"] == {"before": 32, "accuracy": 1, "rows": 2}
    # Each trial writes to a folder of its own.
    assert ws.get_default_datastore().download("got", "left") == 1
    assert Path("got/left/again_1_0/x").read_text() == "again_1_0"
    assert second.get_best_run_by_primary_metric().id == best.id
    assert second.get_best_run_by_primary_metric(include_resume_from_runs=False).parent.id == second.id
