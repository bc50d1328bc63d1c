"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.tensorboard import Tensorboard
from azureml.tensorboard.export import export_to_tensorboard
from azureml.core.script_run_config import ScriptRunConfig

run = next(Experiment(ws, "e").get_runs())
tb = Tensorboard([run], local_root="logs", port=6006)
export_to_tensorboard(run, "logs2")
