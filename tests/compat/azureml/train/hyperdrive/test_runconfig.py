from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest

from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
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


def test_signatures_are_the_sdk_s():
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


def test_policies_are_paceline_s_by_the_sdk_s_order_of_parameters():
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
def test_what_the_sdk_refuses_is_refused(changes, said):
    with pytest.raises(HyperDriveConfigException, match=said):
        config(**changes)


def test_samplings_take_what_the_sdk_s_take():
    with pytest.raises(HyperDriveConfigException, match="choice alone"):
        GridParameterSampling({"lr": uniform(0, 1)})
    with pytest.raises(HyperDriveConfigException, match="choice and uniform"):
        BayesianParameterSampling({"lr": normal(0, 1)})
    assert PrimaryMetricGoal.from_str("minimize") is PrimaryMetricGoal.MINIMIZE


SCRIPT = """
import argparse
from azureml.core import Run
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--batch", type=int)
given = parser.parse_args()
run = Run.get_context()
for step in (3, 1):
    run.log("accuracy", given.batch * step)
"""


def test_a_sweep_of_an_estimator(ws):
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
    wait_until(lambda: run.get_status() in ("Completed", "Failed", "Canceled"), "the sweep ends")
    assert run.get_status() == "Completed", (run.folder.logs / "driver.log").read_text()
    best = run.get_best_run_by_primary_metric()
    # The best value of the series counts, not the last.
    assert best.get_metrics() == {"accuracy": [96, 32]}
    assert best.parent.id == run.id
    rows = run.get_children_sorted_by_primary_metric()
    assert [row["best_primary_metric"] for row in rows] == [96, 48]
    assert sorted(child.id for child in run.get_children()) == [f"{run.id}_0", f"{run.id}_1"]
    assert f"_aml_system_{best.id}" in run.tags
    assert set(run.get_metrics()) == {f"{run.id}_0", f"{run.id}_1"}
    assert isinstance(ws.get_run(run.id), HyperDriveRun)
    assert [type(one) for one in Experiment(ws, "hd").get_runs(type="hyperdrive")] == [HyperDriveRun]
    with pytest.raises(HyperDriveRuntimeException):
        run.fail()
    again = HyperDriveConfig(
        run_config=ScriptRunConfig("src", "train.py"),
        hyperparameter_sampling=GridParameterSampling({"--batch": choice(1, 2)}),
        primary_metric_name="accuracy",
        primary_metric_goal=PrimaryMetricGoal.MAXIMIZE,
        max_total_runs=2,
        resume_from=run,
    )
    second = Experiment(ws, "hd").submit(again)
    wait_until(lambda: second.get_status() in ("Completed", "Failed", "Canceled"), "the sweep ends")
    assert second.get_status() == "Completed", (second.folder.logs / "driver.log").read_text()
    assert second.get_best_run_by_primary_metric().id == best.id
    assert second.get_best_run_by_primary_metric(include_resume_from_runs=False).parent.id == second.id
