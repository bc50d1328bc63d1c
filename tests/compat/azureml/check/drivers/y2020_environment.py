"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core import Environment, ScriptRunConfig
from azureml.core.environment import CondaDependencies
from azureml.core.runconfig import MpiConfiguration

env = Environment.get(workspace=ws, name="AzureML-TensorFlow-2.3-GPU")
mine = Environment("mine")
mine.python.conda_dependencies = CondaDependencies.create(pip_packages=["azureml-defaults"])
src = ScriptRunConfig(
    source_directory="src", script="t.py", environment=mine, distributed_job_config=MpiConfiguration(node_count=2)
)
