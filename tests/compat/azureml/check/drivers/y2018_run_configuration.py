"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core.runconfig import RunConfiguration
from azureml.core.conda_dependencies import CondaDependencies
from azureml.core import ScriptRunConfig

rc = RunConfiguration()
rc.environment.docker.enabled = True
rc.environment.docker.base_image = azureml.core.runconfig.DEFAULT_CPU_IMAGE
rc.environment.python.conda_dependencies = CondaDependencies.create(conda_packages=["scikit-learn"])
run = Experiment(ws, "e").submit(ScriptRunConfig(source_directory=".", script="train.py", run_config=rc))
