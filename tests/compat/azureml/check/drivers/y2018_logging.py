"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
exp = Experiment(workspace=ws, name="log")
run = exp.start_logging()
run.log("mse", 0.5)
run.complete()
