"""In the style of 2022: a ScriptRunConfig with an environment and a distributed configuration; an interactive run."""

from azureml.core import Environment, Experiment, ScriptRunConfig, Workspace
from azureml.core.conda_dependencies import CondaDependencies
from azureml.core.runconfig import MpiConfiguration

ws = Workspace.from_config()
environment = Environment("digits")
environment.python.conda_dependencies = CondaDependencies.create(
    conda_packages=["scikit-learn"], pip_packages=["azureml-defaults", "torch", "horovod"]
)
environment.docker.enabled = True

config = ScriptRunConfig(
    source_directory="src",
    script="train.py",
    arguments=["--epochs", 2],
    compute_target="local",
    environment=environment,
    distributed_job_config=MpiConfiguration(process_count_per_node=1, node_count=2),
)
experiment = Experiment(ws, "digits-2022")
run = experiment.submit(config, tags={"style": "2022"})
run.wait_for_completion(show_output=True)
print("accuracy:", run.get_metrics("accuracy")["accuracy"][-1])

with experiment.start_logging(snapshot_directory="src") as logged:
    logged.log("seen", len(list(experiment.get_runs())))
print(logged.get_status())
