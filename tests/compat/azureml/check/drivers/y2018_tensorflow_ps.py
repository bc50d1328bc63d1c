"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.train.dnn import TensorFlow
from azureml.core import Datastore

ds = Datastore(ws, "blob")
estimator = TensorFlow(
    "src", compute_target="gpu", entry_script="t.py", node_count=2, worker_count=2, distributed_backend="ps"
)
