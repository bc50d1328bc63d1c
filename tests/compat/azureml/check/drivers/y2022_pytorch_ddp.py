"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core import ScriptRunConfig, Environment
from azureml.core.runconfig import PyTorchConfiguration

env = Environment.from_conda_specification("e", "e.yml")
config = ScriptRunConfig(
    "src",
    command=["python", "t.py"],
    environment=env,
    distributed_job_config=PyTorchConfiguration(node_count=2, process_count=4),
)
