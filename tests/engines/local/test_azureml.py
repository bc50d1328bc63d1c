"""Drivers and scripts for the Azure ML SDK, run unchanged: each driver is a separate program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.workspace import Workspace
from tests.warm import forking_in_environments, kinds, warm_python

SCRIPT = """
import argparse, os, subprocess, sys
from azureml.core import Run
parser = argparse.ArgumentParser()
parser.add_argument("--data_dir")
parser.add_argument("--rank")
parser.add_argument("--epochs", type=int)
given = parser.parse_args()
run = Run.get_context()
assert given.rank == os.environ["PACELINE_RANK"] == os.environ["AZ_BATCHAI_TASK_INDEX"], given
assert os.path.isdir(given.data_dir) and open(os.path.join(given.data_dir, "d/x.csv")).read() == "a,b"
assert os.environ["AZ_BATCHAI_PYTORCH_INIT_METHOD"].startswith("tcp://")
assert run.experiment.workspace.get_default_datastore().name == "workspaceblobstore"
assert run.experiment.workspace.name == "the-team", "as the driver has it"
for epoch in range(given.epochs):
    run.log("loss", 1 / (epoch + 1))
# What the script starts logs into the same run, and not to nowhere.
subprocess.run([sys.executable, "-c", "from azureml.core import Run; Run.get_context().log('below', 1)"], check=True)
if run.id and given.rank == "0":
    os.makedirs("outputs", exist_ok=True)
    open("outputs/model.txt", "w").write("weights")
    os.makedirs("logs/tb", exist_ok=True)
    open("logs/tb/events", "w").write("events")
run.cancel()  # the SDK's does nothing there
run.complete()
"""

DRIVER = """
import azureml.core
from azureml.core import Workspace, Experiment, ScriptRunConfig, Environment
from azureml.core.compute import AmlCompute, ComputeTarget
from azureml.core.compute_target import ComputeTargetException
from azureml.exceptions import ActivityFailedException
from azureml.telemetry import set_diagnostics_collection
from azureml.train.dnn import PyTorch
from azureml.widgets import RunDetails

set_diagnostics_collection(send_diagnostics=True)
ws = Workspace.from_config()
try:
    target = ComputeTarget(workspace=ws, name="gpucluster")
except ComputeTargetException:
    target = ComputeTarget.create(ws, "gpucluster", AmlCompute.provisioning_configuration(vm_size="STANDARD_NC6", max_nodes=4))
    target.wait_for_completion(show_output=True)
ds = ws.get_default_datastore()
ds.upload_files(["x.csv"], target_path="d", overwrite=True)
exp = Experiment(workspace=ws, name="digits")
estimator = PyTorch(
    source_directory="src", entry_script="train.py", compute_target=target, use_gpu=True,
    script_params={"--data_dir": ds, "--rank": "$AZ_BATCHAI_TASK_INDEX", "--epochs": 9},
    node_count=2, process_count_per_node=1, distributed_backend="gloo", pip_packages=["azureml-sdk[notebooks]==1.0"],
)
run = exp.submit(estimator, script_params={"--epochs": 2})
RunDetails(run).show()
details = run.wait_for_completion(show_output=True)
assert details["runDefinition"]["arguments"][-1] == "2", details
assert run.get_metrics()["loss"].count(0.5) == 2, run.get_metrics()
assert len(run.get_metrics()["below"]) == 2
assert "outputs/model.txt" in run.get_file_names()
run.download_file("outputs/model.txt", "got/")
assert open("got/model.txt").read() == "weights"
for name in ("70_driver_log", "80_driver_log", "65_job_prep-tvmps_x", "20_image_build_log"):
    run.download_file(f"azureml-logs/{name}.txt", "log.txt")
run.download_file("logs/tb/events", "got/")
assert open("got/events").read() == "events" and "logs/tb/events" in run.get_file_names()
assert "all/logs/tb/events" in run.get_all_logs("all")
print("WARNINGS", len(run.record().warnings))

from azureml.core import Dataset
from azureml.data import OutputFileDatasetConfig

code = "import os, sys; open(os.path.join(sys.argv[1], 'x.csv'), 'w').write(open(sys.argv[2]).read())"
out = OutputFileDatasetConfig("made", destination=(ds, "made/{run-id}")).register_on_complete("made", tags={"a": "b"})
one = Dataset.File.from_files((ds, "d/x.csv")).as_named_input("one").as_mount(path_on_compute="/mnt/one")
copied = exp.submit(ScriptRunConfig("src", command=["python", "-c", f'"{code}"', out, one]))
copied.wait_for_completion()
# Nobody has asked for its details yet.
assert ws.datasets["made"].to_path() == ["/x.csv"] and ws.datasets["made"].tags == {"a": "b"}
assert copied.get_details()["outputDatasets"][0]["dataset"].name == "made"

failing = exp.submit(ScriptRunConfig("src", command="python -c 'import sys; sys.exit(3)'", environment=Environment("e")))
try:
    failing.wait_for_completion()
except ActivityFailedException as error:
    print("FAILED AS IT SHOULD", "error" in error.message)

slow = exp.submit(ScriptRunConfig("src", command="sleep 600"))
slow.fail("enough")
slow.wait_for_completion(raise_on_error=False)
assert slow.get_status() == "Failed" and slow.failure.message == "enough", slow.record()

with exp.start_logging(snapshot_directory="src") as logged:
    open("outputs/own.txt", "w").write("1")
    logged.log_list("l", range(3))
assert "outputs/own.txt" in logged.get_file_names() and logged.get_status() == "Completed"
print(logged.restore_snapshot(path="zips").endswith(".zip"), exp)
"""


@pytest.mark.promise("drivers-sdk-run-they-one", "output-dataset-one-run-completed")
def test_azure_sdk_driver_script_runs_unchanged_under_paceline_azureml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text(SCRIPT)
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "config.json").write_text(
        '{"subscription_id": "s", "resource_group": "g", "workspace_name": "the-team"}'
    )
    (tmp_path / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, "-m", "paceline.azureml", "driver.py"],
        cwd=tmp_path,
        env={
            name: value for name, value in os.environ.items() if name not in ("PACELINE_WORKSPACE", "PACELINE_AZUREML")
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED AS IT SHOULD True" in done.stdout
    assert "True Experiment(Name: digits," in done.stdout
    runs = [*Workspace(tmp_path / ".paceline").experiments["digits"].get_runs()]
    (first,) = [run for run in runs if run.record().job and run.record().job.distributed_backend]
    said = " ".join(first.record().warnings)
    # Each unavailable feature is reported once, and the run's record has the same text.
    assert [part in said for part in ("azureml-sdk[notebooks]==1.0", "gpucluster (STANDARD_NC6)")] == [True, True]
    assert textwrap.shorten(said, 10_000) == " ".join(dict.fromkeys(first.record().warnings))


EXAMPLES = Path(__file__).parents[3] / "examples" / "azureml"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python that has loaded what the examples' scripts import: twenty of them are run."""
    pytest.importorskip("sklearn")
    with warm_python(tmp_path_factory.mktemp("warm"), kind=kinds.EXAMPLES) as found:
        yield found


@pytest.mark.promise("drivers-sdk-run-they-one")
@pytest.mark.parametrize(
    ("driver", "last"),
    [
        # Only `make proof` runs this driver, because tests/docs runs the README, which has the same driver.
        pytest.param("driver_2018.py", "accuracy: 0.9", marks=pytest.mark.proof, id="2018"),
        pytest.param("driver_2019.py", "label: [", id="2019"),
        pytest.param("driver_2019_tensorflow.py", "accuracy: 0.", id="2019-tensorflow"),
        pytest.param("driver_2020.py", "model: digits 1", id="2020"),
        # Only `make proof` runs this driver. The 2019 driver also has a sweep, and the 2020 driver also has runs with
        # packages.
        pytest.param("driver_2020_sklearn.py", "model: digits-svm 1", marks=pytest.mark.proof, id="2020-sklearn"),
        pytest.param("driver_2022.py", "Completed", id="2022"),
    ],
)
def test_azure_sdk_examples_of_each_release_era_run_unchanged(
    tmp_path: Path, driver: str, last: str, request: pytest.FixtureRequest
) -> None:
    python = request.getfixturevalue("python_with_tensorflow" if "tensorflow" in driver else "python")
    shutil.copytree(EXAMPLES, tmp_path / "project")
    done = subprocess.run(
        [python, "-m", "paceline.azureml", driver],
        cwd=tmp_path / "project",
        # Use one thread, because with such small images several threads mainly wait for each other and take twice the CPU time.
        env={
            **{name: value for name, value in os.environ.items() if name != "PACELINE_WORKSPACE"},
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            # Don't build the drivers' environments, because the tests' environment has their packages.
            **forking_in_environments(python),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(last)


@pytest.mark.promise("drivers-sdk-run-they-one")
def test_azure_sdk_notebook_runs_after_import_paceline_azureml_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("PACELINE_WORKSPACE", raising=False)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("from azureml.core import Run\nRun.get_context().log('loss', 0.5)\n")
    cells = [
        "import paceline.azureml",
        "import azureml.core\nfrom azureml.widgets import RunDetails",
        "from azureml.core import Workspace, Experiment, ScriptRunConfig",
        "ws = Workspace.from_config()\nexp = Experiment(ws, 'book')\nexp",
        "run = exp.submit(ScriptRunConfig('src', 'train.py'))\nRunDetails(run).show()",
        "run.wait_for_completion()\nprint(run.get_metrics())",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.data["text/html"] for output in book.cells[4].outputs if "text/html" in output.get("data", {})]
    assert any("<table>" in html for html in shown)
    assert book.cells[5].outputs[-1].text == "{'loss': 0.5}\n"
