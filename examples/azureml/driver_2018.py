"""In the style of 2018: a BatchAI cluster, an estimator, a datastore itself among the parameters, two nodes over MPI."""

import os

import azureml.core
from azureml.core import Experiment, Workspace
from azureml.core.compute import BatchAiCompute, ComputeTarget
from azureml.core.compute_target import ComputeTargetException
from azureml.train.dnn import PyTorch

print("SDK version:", azureml.core.VERSION)
ws = Workspace.from_config()
print(ws.name, ws.resource_group, ws.location, ws.subscription_id, sep="\n")

try:
    cluster = ComputeTarget(workspace=ws, name="gpucluster")
except ComputeTargetException:
    config = BatchAiCompute.provisioning_configuration(
        vm_size="STANDARD_NC6", autoscale_enabled=True, cluster_min_nodes=0, cluster_max_nodes=4
    )
    cluster = ComputeTarget.create(ws, "gpucluster", config)
    cluster.wait_for_completion(show_output=True)

estimator = PyTorch(
    source_directory=os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"),
    compute_target=cluster,
    entry_script="train.py",
    script_params={"--data_dir": ws.get_default_datastore(), "--epochs": 3},
    node_count=2,
    process_count_per_node=1,
    distributed_backend="mpi",
    use_gpu=True,
    pip_packages=["azureml-defaults"],
)
run = Experiment(workspace=ws, name="digits-2018").submit(estimator)
run.wait_for_completion(show_output=True)
print("accuracy:", run.get_metrics()["accuracy"][-1])
