"""A driver of the Azure SDK on a target of several nodes, for whichever kind: the same lines for all."""

from __future__ import annotations

from paceline.compat.azureml.core.compute import AmlCompute, ComputeTarget
from paceline.compat.azureml.core.compute_target import ComputeTargetException
from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.runconfig import PyTorchConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.core.workspace import Workspace
from tests.engines.lab import Lab

SCRIPT = """
import os, socket, sys
from azureml.core import Run
run = Run.get_context()
assert sys.argv[1:] == ["--rank", os.environ["RANK"]], sys.argv
run.log("rank", int(os.environ["RANK"]))
if os.environ["RANK"] == "0":
    os.makedirs("outputs", exist_ok=True)
    with open("outputs/model.txt", "w") as file:
        file.write("weights")
run.complete()
"""


def check_driver(lab: Lab, target: str) -> None:
    """What drivers do: take the cluster or make it, submit, wait, read metrics, register the model."""
    lab.write(SCRIPT)
    ws = Workspace("local", "local", "team", _folder=lab.workspace_dir)
    try:
        cluster = ComputeTarget(workspace=ws, name=target)
    except ComputeTargetException:
        cluster = ComputeTarget.create(ws, target, AmlCompute.provisioning_configuration())
    config = ScriptRunConfig(
        source_directory=str(lab.source),
        script="train.py",
        arguments=["--rank", "$RANK"],
        compute_target=cluster,
        distributed_job_config=PyTorchConfiguration("Gloo", node_count=2),
    )
    config.run_config.environment.python.user_managed_dependencies = True
    run = Experiment(ws, "lab").submit(config)
    details = run.wait_for_completion(raise_on_error=False)
    assert details["status"] == "Completed", (run.failure, (run.folder.logs / "driver.log").read_text())
    assert sorted(run.get_metrics()["rank"]) == [0, 1]
    assert (details["target"], run.record().warnings) == (target, ())
    assert run.register_model("digits", "outputs/model.txt").version == 1
