"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core import Environment
from azureml.core.model import Model, InferenceConfig
from azureml.core.webservice import LocalWebservice, Webservice
from azureml.core.resource_configuration import ResourceConfiguration

model = Model.register(workspace=ws, model_name="m", model_path="m.pkl", model_framework=Model.Framework.SCIKITLEARN)
ic = InferenceConfig(entry_script="score.py", environment=Environment("e"))
service = Model.deploy(ws, "s", [model], ic, LocalWebservice.deploy_configuration(port=6789))
package = Model.package(ws, [model], ic, generate_dockerfile=True)
