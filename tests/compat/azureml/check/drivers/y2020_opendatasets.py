"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.opendatasets import MNIST
from azureml.core import ScriptRunConfig
from azureml.core.compute import AmlCompute, ComputeTarget
from azureml.exceptions import ComputeTargetException

data = MNIST.get_file_dataset()
config = AmlCompute.provisioning_configuration(vm_size="STANDARD_D2_V2", max_nodes=4)
