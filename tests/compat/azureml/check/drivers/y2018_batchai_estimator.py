"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core.compute import ComputeTarget, BatchAiCompute
from azureml.core.compute_target import ComputeTargetException
from azureml.telemetry import set_diagnostics_collection
from azureml.train.dnn import PyTorch
from azureml.train.widgets import RunDetails

set_diagnostics_collection(send_diagnostics=True)
try:
    cluster = ComputeTarget(workspace=ws, name="gpu")
except ComputeTargetException:
    cluster = ComputeTarget.create(ws, "gpu", BatchAiCompute.provisioning_configuration(vm_size="STANDARD_NC6"))
run = Experiment(ws, "e").submit(PyTorch("src", compute_target=cluster, entry_script="t.py", use_gpu=True))
RunDetails(run).show()
