"""In the style of 2019: a sweep over an estimator, the best run's model registered, and a web service of it."""

import json

from azureml.core import Experiment, Workspace
from azureml.core.compute import AmlCompute, ComputeTarget
from azureml.core.compute_target import ComputeTargetException
from azureml.core.environment import Environment
from azureml.core.model import InferenceConfig, Model
from azureml.core.webservice import AciWebservice
from azureml.train.dnn import PyTorch
from azureml.train.hyperdrive import BanditPolicy, HyperDriveConfig, PrimaryMetricGoal, RandomParameterSampling, uniform
from azureml.widgets import RunDetails

ws = Workspace.from_config()
try:
    cluster = ComputeTarget(workspace=ws, name="cpucluster")
except ComputeTargetException:
    cluster = ComputeTarget.create(
        ws, "cpucluster", AmlCompute.provisioning_configuration("STANDARD_D2_V2", max_nodes=2)
    )
    cluster.wait_for_completion(show_output=True, min_node_count=None, timeout_in_minutes=20)

estimator = PyTorch(
    source_directory="src",
    script_params={"--epochs": 3},
    compute_target=cluster,
    entry_script="train.py",
    use_gpu=False,
)
sweep = HyperDriveConfig(
    estimator=estimator,
    hyperparameter_sampling=RandomParameterSampling({"learning_rate": uniform(0.001, 0.03)}),
    policy=BanditPolicy(slack_factor=0.5, evaluation_interval=1, delay_evaluation=2),
    primary_metric_name="accuracy",
    primary_metric_goal=PrimaryMetricGoal.MAXIMIZE,
    max_total_runs=3,
    max_concurrent_runs=2,
)
run = Experiment(workspace=ws, name="digits-2019").submit(sweep)
RunDetails(run).show()
run.wait_for_completion(show_output=True)
assert run.get_status() == "Completed"

best = run.get_best_run_by_primary_metric()
print("best:", best.id, best.get_details()["runDefinition"]["arguments"])
model = best.register_model(model_name="digits", model_path="outputs/model.pt")

inference = InferenceConfig(entry_script="score.py", source_directory="src", environment=Environment("score"))
service = Model.deploy(
    ws, "digits-svc", [model], inference, AciWebservice.deploy_configuration(cpu_cores=1, memory_gb=1), overwrite=True
)
service.wait_for_deployment(show_output=True)
print("label:", json.loads(service.run(json.dumps({"data": [[0.0] * 64]})))["labels"])
service.delete()
