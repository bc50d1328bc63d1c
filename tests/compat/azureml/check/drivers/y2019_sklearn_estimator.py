"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.train.sklearn import SKLearn
from azureml.core.datastore import Datastore

est = SKLearn(
    source_directory="src", entry_script="train.py", compute_target="local", script_params={"--kernel": "linear"}
)
