"""In the style of 2020: a pipeline of steps with data between them, submitted twice; then the model, registered."""

from azureml.core import Experiment, Workspace
from azureml.core.compute import AmlCompute, ComputeTarget
from azureml.core.compute_target import ComputeTargetException
from azureml.core.conda_dependencies import CondaDependencies
from azureml.core.runconfig import RunConfiguration
from azureml.data import OutputFileDatasetConfig
from azureml.pipeline.core import Pipeline, PipelineData, PipelineParameter, StepSequence
from azureml.pipeline.steps import PythonScriptStep
from azureml.widgets import RunDetails

ws = Workspace.from_config()
try:
    cluster = ComputeTarget(workspace=ws, name="cpucluster")
except ComputeTargetException:
    cluster = ComputeTarget.create(
        ws, "cpucluster", AmlCompute.provisioning_configuration("STANDARD_D2_V2", max_nodes=2)
    )
    cluster.wait_for_completion(show_output=True)

run_config = RunConfiguration()
run_config.environment.python.conda_dependencies = CondaDependencies.create(
    conda_packages=["scikit-learn"], pip_packages=["azureml-defaults"]
)

store = ws.get_default_datastore()
prepared = OutputFileDatasetConfig(name="prepared", destination=(store, "digits/{run-id}")).register_on_complete(
    "digits"
)
trained = PipelineData("trained", datastore=store, pipeline_output_name="model")
penalty = PipelineParameter(name="penalty", default_value=1.0)

prepare = PythonScriptStep(
    name="prepare",
    script_name="prepare.py",
    source_directory="steps",
    arguments=["--output", prepared],
    compute_target=cluster,
    runconfig=run_config,
)
train = PythonScriptStep(
    name="train",
    script_name="train.py",
    source_directory="steps",
    arguments=["--input", prepared.as_input("digits"), "--penalty", penalty, "--output", trained],
    outputs=[trained],
    compute_target=cluster,
    runconfig=run_config,
)
evaluate = PythonScriptStep(
    name="evaluate",
    script_name="evaluate.py",
    source_directory="steps",
    arguments=["--input", prepared.as_input("digits"), "--model", trained],
    inputs=[trained],
    compute_target=cluster,
    runconfig=run_config,
    allow_reuse=False,
)

pipeline = Pipeline(workspace=ws, steps=StepSequence([prepare, train, evaluate]))
pipeline.validate()
experiment = Experiment(ws, "digits-2020")
for value in (1.0, 0.01):
    run = experiment.submit(pipeline, pipeline_parameters={"penalty": value})
    RunDetails(run).show()
    run.wait_for_completion(show_output=True)
    for step in run.get_steps():
        reused = step.properties.get("azureml.isreused", "false")
        print(f"{step.name}: {step.get_status()}, reused: {reused}")
    print("accuracy:", run.find_step_run("evaluate")[0].get_metrics()["accuracy"])

run.get_pipeline_output("model").download("downloaded")
model = run.find_step_run("evaluate")[0].register_model("digits", "outputs/model.pkl")
print("model:", model.name, model.version)
