"""A driver of the Azure SDK on a target of several nodes, for whichever kind: the same lines for all."""

from __future__ import annotations

from paceline.compat.azureml.core.compute import AmlCompute, ComputeTarget, ComputeTargetException
from paceline.compat.azureml.core.dataset import Dataset
from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.runconfig import PyTorchConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.core.workspace import Workspace
from paceline.compat.azureml.pipeline.core import Pipeline, PipelineData
from paceline.compat.azureml.pipeline.steps import ParallelRunConfig, ParallelRunStep
from tests.engines.lab import Lab
from tests.helpers import write_tree

SCRIPT = """
import os, socket, sys
from azureml.core import Run
run = Run.get_context()
assert sys.argv[1:] == ["--rank", os.environ["PACELINE_RANK"]], sys.argv
run.log("rank", int(os.environ["PACELINE_RANK"]))
if os.environ["PACELINE_RANK"] == "0":
    os.makedirs("outputs", exist_ok=True)
    with open("outputs/model.txt", "w") as file:
        file.write("weights")
run.complete()
"""


def check_driver(lab: Lab, target: str) -> None:
    """The steps of a driver: take the cluster or make it, submit, wait, read metrics, register the model."""
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
    check_mini_batches(lab, ws, cluster)


def check_mini_batches(lab: Lab, ws: Workspace, cluster: object) -> None:
    """Mini-batches of files that are here, shared out over two nodes there; the rows of both are one file."""
    (lab.source / "batch.py").write_text(
        "import os\ndef run(mini_batch):\n    return [os.path.basename(path) + open(path).read() for path in mini_batch]\n"
    )
    files = write_tree(lab.source.parent / "files", {f"{number}.txt": f" {number}" for number in range(4)})
    store = ws.get_default_datastore()
    store.upload(str(files), "files")
    rows = PipelineData("rows", pipeline_output_name="rows")
    config = ParallelRunConfig(
        None, "batch.py", 0, "append_row", cluster, 2, mini_batch_size=1, source_directory=str(lab.source)
    )
    step = ParallelRunStep("score", config, [Dataset.File.from_files((store, "files")).as_named_input("files")], rows)
    run = Experiment(ws, "lab").submit(Pipeline(ws, [step]))
    run.wait_for_completion(show_output=False, raise_on_error=False)
    assert run.get_status() == "Completed", (run.failure, run.find_step_run("score")[0].get_job_log())
    run.get_pipeline_output("rows").download(str(lab.source.parent))
    made = lab.source.parent / run.get_pipeline_output("rows").path_on_datastore / "parallel_run_step.txt"
    assert made.read_text() == "".join(f"{number}.txt {number}\n" for number in range(4))
