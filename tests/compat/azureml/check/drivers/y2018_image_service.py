"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core.model import Model
from azureml.core.image import ContainerImage, Image
from azureml.core.webservice import Webservice, AciWebservice

model = Model.register(model_path="m.pkl", model_name="m", workspace=ws)
config = ContainerImage.image_configuration(runtime="python", execution_script="score.py", conda_file="e.yml")
image = Image.create(name="i", models=[model], image_config=config, workspace=ws)
aci = AciWebservice.deploy_configuration(cpu_cores=1, memory_gb=1)
service = Webservice.deploy_from_image(workspace=ws, name="s", image=image, deployment_config=aci)
