"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core import ScriptRunConfig
from azureml.train.hyperdrive import (
    HyperDriveConfig,
    GridParameterSampling,
    PrimaryMetricGoal,
    TruncationSelectionPolicy,
    choice,
)
from azureml.train.hyperdrive.run import HyperDriveRun
from azureml.exceptions import ActivityFailedException, UserErrorException

hd = HyperDriveConfig(
    run_config=ScriptRunConfig("src", "t.py"),
    hyperparameter_sampling=GridParameterSampling({"lr": choice(1, 2)}),
    policy=TruncationSelectionPolicy(truncation_percentage=20),
    primary_metric_name="a",
    primary_metric_goal=PrimaryMetricGoal.MINIMIZE,
    max_total_runs=4,
)
