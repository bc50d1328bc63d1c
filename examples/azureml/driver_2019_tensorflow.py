"""In the style of 2019: TensorFlow's estimator with a version of then, whose metrics come from a callback of Keras."""

from azureml.core import Experiment, Workspace
from azureml.core.compute import AmlCompute, ComputeTarget
from azureml.core.compute_target import ComputeTargetException
from azureml.train.dnn import TensorFlow

ws = Workspace.from_config()
try:
    cluster = ComputeTarget(workspace=ws, name="gpucluster")
except ComputeTargetException:
    config = AmlCompute.provisioning_configuration(vm_size="STANDARD_NC6", max_nodes=4)
    cluster = ComputeTarget.create(ws, "gpucluster", config)
    cluster.wait_for_completion(show_output=True, min_node_count=None, timeout_in_minutes=20)

estimator = TensorFlow(
    source_directory="src",
    script_params={"--batch-size": 32, "--epochs": 8},
    compute_target=cluster,
    entry_script="train_keras.py",
    pip_packages=["keras==2.2.5", "scikit-learn"],
    framework_version="1.13",
    use_gpu=True,
)
run = Experiment(workspace=ws, name="keras-2019").submit(estimator)
run.wait_for_completion(show_output=True)

model = run.register_model(model_name="keras-digits", model_path="outputs/model")
model.download(target_dir="downloaded", exist_ok=True)
print("accuracy:", run.get_metrics()["Accuracy"][-1])
