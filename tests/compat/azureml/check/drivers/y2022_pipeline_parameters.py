"""What such a driver takes from the SDK; it is read, and never run."""

import azureml.core
from azureml.core import Workspace, Experiment, Run

print("version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.location, ws.resource_group, ws.subscription_id, sep="\t")
from azureml.core import Environment
from azureml.core.runconfig import RunConfiguration
from azureml.data import OutputFileDatasetConfig
from azureml.pipeline.core import Pipeline, PipelineParameter, StepSequence
from azureml.pipeline.steps import PythonScriptStep, EstimatorStep

rc = RunConfiguration()
rc.environment = Environment.get(ws, "AzureML-sklearn-1.5")
size = PipelineParameter(name="size", default_value=3)
step = PythonScriptStep("p.py", arguments=["--n", size], compute_target="local", runconfig=rc)
pipeline = Pipeline(ws, StepSequence(steps=[step]))
