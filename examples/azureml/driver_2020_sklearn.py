"""In the style of 2020: scikit-learn's estimator under HyperDrive, and the best run's model."""

from azureml.core import Experiment, Workspace
from azureml.core.compute import AmlCompute, ComputeTarget
from azureml.core.compute_target import ComputeTargetException
from azureml.train.hyperdrive.parameter_expressions import choice
from azureml.train.hyperdrive.run import PrimaryMetricGoal
from azureml.train.hyperdrive.runconfig import HyperDriveConfig
from azureml.train.hyperdrive.sampling import RandomParameterSampling
from azureml.train.sklearn import SKLearn
from azureml.widgets import RunDetails

ws = Workspace.from_config()
try:
    cluster = ComputeTarget(workspace=ws, name="cpu-cluster")
except ComputeTargetException:
    cluster = ComputeTarget.create(
        ws, "cpu-cluster", AmlCompute.provisioning_configuration("STANDARD_D2_V2", max_nodes=4)
    )
    cluster.wait_for_completion(show_output=True)

estimator = SKLearn(
    source_directory="src",
    script_params={"--kernel": "linear", "--penalty": 1.0},
    compute_target=cluster,
    entry_script="train_svm.py",
    pip_packages=["joblib==0.13.2"],
)
sweep = HyperDriveConfig(
    estimator=estimator,
    hyperparameter_sampling=RandomParameterSampling(
        {"--kernel": choice("linear", "rbf", "poly", "sigmoid"), "--penalty": choice(0.5, 1, 1.5)}
    ),
    primary_metric_name="Accuracy",
    primary_metric_goal=PrimaryMetricGoal.MAXIMIZE,
    max_total_runs=4,
    max_concurrent_runs=2,
)
run = Experiment(workspace=ws, name="svm-2020").submit(sweep)
RunDetails(run).show()
run.wait_for_completion(show_output=True)
assert run.get_status() == "Completed"

best = run.get_best_run_by_primary_metric()
print(best.get_details()["runDefinition"]["arguments"], best.get_file_names())
model = best.register_model(model_name="digits-svm", model_path="outputs/model.joblib")
print("model:", model.name, model.version)
