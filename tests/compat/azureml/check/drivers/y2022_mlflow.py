"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
import mlflow

mlflow.set_tracking_uri(ws.get_mlflow_tracking_uri())
with Experiment(ws, "e").start_logging() as run:
    run.log("a", 1)
