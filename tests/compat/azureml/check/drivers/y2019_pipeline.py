"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.pipeline.core import Pipeline, PipelineData
from azureml.pipeline.steps import PythonScriptStep

out = PipelineData("out", datastore=ws.get_default_datastore())
step = PythonScriptStep(name="prep", script_name="p.py", arguments=["--o", out], outputs=[out], compute_target="local")
pipeline = Pipeline(workspace=ws, steps=[step])
