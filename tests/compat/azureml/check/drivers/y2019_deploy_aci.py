"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core.conda_dependencies import CondaDependencies
from azureml.core.model import InferenceConfig, Model
from azureml.core.webservice import AciWebservice, Webservice
from azureml.exceptions import WebserviceException

env = CondaDependencies()
env.add_conda_package("scikit-learn")
ic = InferenceConfig(runtime="python", entry_script="score.py", conda_file="e.yml")
dc = AciWebservice.deploy_configuration(cpu_cores=1, memory_gb=1, auth_enabled=True)
try:
    service = Webservice(ws, "s")
except WebserviceException:
    service = Model.deploy(ws, "s", [Model(ws, "m")], ic, dc)
