"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core.compute import RemoteCompute, DsvmCompute
from azureml.core.authentication import InteractiveLoginAuthentication

auth = InteractiveLoginAuthentication()
vm = RemoteCompute.attach(ws, name="vm", username="u", address="a", ssh_port=22, password="p")
