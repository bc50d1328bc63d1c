"""Pipelines by the SDK's names, run on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.compat.azureml.core.dataset import Dataset
from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.run import get_run
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
from paceline.compat.azureml.exceptions import (
    ActivityFailedException,
    ExperimentExecutionException,
    UserErrorException,
)
from paceline.compat.azureml.pipeline.core import (
    Pipeline,
    PipelineData,
    PipelineParameter,
    PipelineRun,
    StepRun,
    TrainingOutput,
)
from paceline.compat.azureml.pipeline.steps import (
    CommandStep,
    HyperDriveStep,
    HyperDriveStepRun,
    ParallelRunConfig,
    ParallelRunStep,
    PythonScriptStep,
)
from paceline.compat.azureml.train.hyperdrive import (
    GridParameterSampling,
    HyperDriveConfig,
    PrimaryMetricGoal,
    choice,
)
from paceline.compat.azureml.widgets import RunDetails
from tests.helpers import write_tree
from tests.sweeps.helpers import hide_matplotlib


@pytest.fixture
def leases(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))


@pytest.mark.promise("pipelines-azure-sdk-run-they")
def test_submitted_sdk_pipeline_completes_and_its_steps_and_outputs_are_found_by_name(ws, source, leases, capsys):
    one = PipelineData("one", pipeline_output_name="first")
    two = OutputFileDatasetConfig("two").register_on_complete("pairs")
    leave = PythonScriptStep("leave.py", "leave", [one, two], outputs=[one], source_directory="src")
    take = PythonScriptStep(
        "take.py",
        "take",
        [one, two.as_input("second"), PipelineParameter("times", 3)],
        inputs=[one],
        params={"mode": "fast"},
        source_directory="src",
    )
    run = Experiment(ws, "piped").submit(Pipeline(ws, [leave, take]), pipeline_parameters={"times": 5}, tags={"a": "b"})
    assert isinstance(run, PipelineRun)
    RunDetails(run).show()
    assert run.wait_for_completion(show_output=True) == run.get_status() == "Completed", run.record().failure
    assert (run.type, run.tags) == ("azureml.PipelineRun", {"a": "b"})
    assert "step take is Completed" in capsys.readouterr().out
    assert [step.name for step in run.get_steps()] == ["leave", "take"]
    (found,) = run.find_step_run("take")
    assert isinstance(found, StepRun)
    assert (found.type, found.parent.id, found.get_metrics()) == ("azureml.StepRun", run.id, {"times": 5})
    assert {child.id: child.name for child in run.get_children()} == {f"{run.id}_0": "leave", f"{run.id}_1": "take"}
    assert found.get_stdout_log() == "took both\n"
    assert "took both" in found.get_job_log()
    assert run.find_step_run("nobody") == []

    # This output is a single file. Its download has the same path as in the store.
    left = run.get_pipeline_output("first")
    assert left.download("got") == 1
    assert Path("got", left.path_on_datastore).read_text() == "one"
    assert run.find_step_run("leave")[0].get_output_data("one").path_on_datastore == left.path_on_datastore
    assert [path.endswith("x.txt") for path in Dataset.get_by_name(ws, "pairs").to_path()] == [True]
    with pytest.raises(UserErrorException, match="it has first"):
        run.get_pipeline_output("last")

    again = PipelineRun(Experiment(ws, "piped"), Experiment(ws, "piped").submit(Pipeline(ws, [leave, take])).id)
    again.wait_for_completion(show_output=False)
    reused, ran = again.get_steps()
    assert (reused.is_reused, reused.properties["azureml.reusedrunid"], ran.is_reused) == (True, f"{run.id}_0", False)
    assert get_run(again.experiment, again.id) == again
    assert isinstance(get_run(again.experiment, again.id), PipelineRun)


@pytest.mark.promise("sweep-s-metrics-best-trial")
def test_step_after_a_sweep_step_gets_the_best_trials_outputs_and_a_failed_step_is_named(ws, source, leases):
    hide_matplotlib(ws.path)
    (source / "tune.py").write_text(
        "import os, sys; from azureml.core import Run; Run.get_context().log('score', int(sys.argv[2]))\n"
        "os.makedirs('outputs/model'); open('outputs/model/weights', 'w').write(sys.argv[2])"
    )
    (source / "best.py").write_text(
        "import json, os, sys\n"
        "weights, model, metrics = sys.argv[1:]\n"
        "assert open(weights).read() == open(os.path.join(model, 'weights')).read() == '2'\n"
        "assert sorted(one['score'] for one in json.load(open(metrics)).values()) == [[1], [2]]\n"
    )
    tuned = HyperDriveConfig(
        GridParameterSampling({"--x": choice(1, 2)}),
        "score",
        PrimaryMetricGoal.MAXIMIZE,
        2,
        run_config=ScriptRunConfig("src", "tune.py"),
    )
    weights = PipelineData("weights", training_output=TrainingOutput("Model", model_file="./outputs/model/weights"))
    model = PipelineData("model", training_output=TrainingOutput("Model", model_file="outputs/model"))
    metrics = PipelineData("metrics", pipeline_output_name="told")
    HyperDriveStep("tune", tuned, outputs=[weights, model], metrics_output=metrics)
    best = PythonScriptStep(
        "best.py", "best", [weights, model, metrics], inputs=[weights, model, metrics], source_directory="src"
    )
    fail = PythonScriptStep("fail.py", "fail", source_directory="src")
    fail.run_after(best)
    run = Pipeline(ws, [fail]).submit("piped", continue_on_step_failure=True)
    with pytest.raises(ActivityFailedException) as caught:
        run.wait_for_completion(show_output=False)
    error = json.loads(caught.value.message)["error"]
    assert error["code"] == "step"
    assert "step 'fail'" in error["message"]
    assert "ValueError: no luck" in error["message"]
    (sweep,) = run.find_step_run("tune")
    assert isinstance(sweep, HyperDriveStepRun)
    assert HyperDriveStepRun(step_run=sweep).get_best_run_by_primary_metric().get_metrics() == {"score": 2}
    assert run.find_step_run("fail")[0].get_status() == "Failed"
    assert sweep.get_output_data("metrics").path_on_datastore == run.get_pipeline_output("told").path_on_datastore
    with pytest.raises(UserErrorException, match="is not a pipeline; its kind is sweep"):
        PipelineRun(run.experiment, sweep.id)


BATCH = """
import os, sys
from azureml_user.parallel_run import EntryScript
def init():
    EntryScript().logger.warning("ready for %s", sys.argv[1])
def run(mini_batch):
    if isinstance(mini_batch, list):
        names = [os.path.basename(path) for path in mini_batch]
        if "3.txt" in names:
            os._exit(7)
        return [f"{name} {open(path).read()}" for name, path in zip(names, mini_batch)]
    mini_batch["double"] = mini_batch["n"] * 2
    return mini_batch
"""


@pytest.mark.promise("sweep-s-metrics-best-trial")
def test_mini_batches_are_distributed_over_the_workers_of_a_step(ws, source, leases, tmp_path):
    (source / "batch.py").write_text(BATCH)
    (source / "table.py").write_text("import sys; open(sys.argv[1] + '/n.csv', 'w').write('n;m\\n1;a\\n2;b\\n3;c\\n')")
    store = ws.get_default_datastore()
    write_tree(tmp_path / "files", {f"{number}.txt": f"{number * 11}" for number in range(5)})
    store.upload("files", "files")
    files = Dataset.File.from_files((store, "files"))
    config = ParallelRunConfig(
        None, "batch.py", 2, "append_row", "local", 1, 2, PipelineParameter("size", "9"), "src", run_max_try=2
    )
    rows = PipelineData("rows", pipeline_output_name="rows")
    scored = ParallelRunStep("scored", config, [files.as_named_input("files")], rows, arguments=["the model"])
    made = OutputFileDatasetConfig("made")
    make = PythonScriptStep("table.py", "make", [made], source_directory="src")
    table = made.read_delimited_files(separator=";").keep_columns(["n"])
    config = ParallelRunConfig(
        None,
        "batch.py",
        0,
        "append_row",
        "local",
        1,
        mini_batch_size="16B",
        source_directory="src",
        append_row_file_name="t",
    )
    doubled = OutputFileDatasetConfig("doubled", destination=(store, "doubled"))
    tables = ParallelRunStep("tables", config, [table.as_input("numbers")], doubled, arguments=["numbers"])
    run = Pipeline(ws, [make, scored, tables]).submit("piped", pipeline_parameters={"size": 2})
    assert run.wait_for_completion(show_output=False) == "Completed", run.record().failure
    run.get_pipeline_output("rows").download("got")
    place = Path("got", run.get_pipeline_output("rows").path_on_datastore)
    # A mini-batch whose process dies is tried twice and then skipped.
    assert (place / "parallel_run_step.txt").read_text() == "0.txt 0\n1.txt 11\n4.txt 44\n"
    (step,) = run.find_step_run("scored")
    assert "mini-batch 2 of 3, try 2: its process ended with exit code 7" in step.get_stdout_log()
    assert "WARNING entry_script: ready for the model" in "".join(step.get_details_with_logs()["logFiles"].values())
    store.download("tables", "doubled")
    assert Path("tables", "doubled", "t").read_text() == "1 2\n2 4\n3 6\n"
    assert "mini-batch 2 of 2: 1 of 1 items" in run.find_step_run("tables")[0].get_stdout_log()


PARTS = """
def run(mini_batch, mini_batch_context):
    values, size = mini_batch_context.partition_key_value, len(mini_batch)
    if isinstance(mini_batch, list):
        assert len(mini_batch_context.dataset.to_path()) == size
    else:
        assert mini_batch_context.dataset.to_pandas_dataframe().equals(mini_batch), mini_batch_context
    return [f"{values} {size}"] * size
"""


@pytest.mark.promise("mini-batches-made-keys-table")
def test_partition_keys_define_the_mini_batches(ws, source, leases, tmp_path):
    pandas = pytest.importorskip("pandas")
    (source / "parts.py").write_text(PARTS)
    store = ws.get_default_datastore()
    names = ("a/winter/x", "a/winter/y", "a/fall/x", "b/fall/x")
    write_tree(tmp_path / "files", {f"{name}.wav": name for name in names})
    store.upload("files", "seasons")
    files = Dataset.File.from_files(
        (store, "seasons/*/*/*.wav"), partition_format="seasons/{user}/{season}/{kind}.wav"
    ).register(ws, "files")
    files = Dataset.get_by_name(ws, "files")
    assert files.partition_keys == ["user", "season", "kind"]
    assert files.get_partition_key_values(["user"]) == [{"user": "a"}, {"user": "b"}]
    frame = pandas.DataFrame({"n": range(4), "city": ["x/y", "z", None, "z"]})
    rows = Dataset.Tabular.register_pandas_dataframe(frame, (store, "frames"), "rows", show_progress=False)
    table = rows.partition_by(["city"], (store, "parts"), name="parts", show_progress=False)
    assert (table.partition_keys, sorted(table.to_pandas_dataframe()["n"])) == (["city"], [0, 1, 2, 3])
    assert len(table.get_partition_key_values()) == 3
    as_files = rows.partition_by("city", (store, "parts"), show_progress=False, partition_as_file_dataset=True)
    assert sorted(one["city"] for one in as_files.get_partition_key_values()) == [
        "__HIVE_DEFAULT_PARTITION__",
        "x%2Fy",
        "z",
    ]
    with pytest.raises(UserErrorException, match="there is no column 'town'"):
        rows.partition_by("town", (store, "parts"))
    steps, outputs = [], []
    for data, keys in ((files.as_named_input("files"), ["user", "season"]), (table.as_named_input("rows"), ["city"])):
        config = ParallelRunConfig(
            None, "parts.py", 0, "append_row", "local", 1, source_directory="src", partition_keys=keys
        )
        outputs.append(OutputFileDatasetConfig(f"made_{data.name}", destination=(store, f"made_{data.name}")))
        steps.append(ParallelRunStep(data.name, config, [data], outputs[-1]))
    run = Pipeline(ws, steps).submit("parts")
    assert run.wait_for_completion(show_output=False) == "Completed", run.record().failure
    store.download("got", show_progress=False)
    texts = [Path("got", f"made_{step.name}", "parallel_run_step.txt").read_text().splitlines() for step in steps]
    assert texts[0] == [
        "{'user': 'a', 'season': 'fall'} 1",
        *(["{'user': 'a', 'season': 'winter'} 2"] * 2),
        "{'user': 'b', 'season': 'fall'} 1",
    ]
    assert texts[1] == ["{'city': 'x/y'} 1", *(["{'city': 'z'} 2"] * 2), "{'city': None} 1"]


def test_pipeline_wait_raises_at_its_timeout_and_returns_canceled_after_a_step_cancels_the_pipeline(ws, source, leases):
    wait = CommandStep("until [ -e ../../../../go ]; do sleep 0.1; done", "wait", source_directory="src")
    (source / "stop.py").write_text(
        "import time\nfrom azureml.core import Run\nRun.get_context().parent.cancel()\ntime.sleep(600)\n"
    )
    stop = PythonScriptStep("stop.py", "stop", source_directory="src")
    stop.run_after(wait)
    run = Experiment(ws, "piped").submit(Pipeline(ws, [stop]))
    with pytest.raises(ExperimentExecutionException, match=r"has not ended within 0\.1 s"):
        run.wait_for_completion(show_output=False, timeout_seconds=0.1)
    Path("go").touch()
    assert run.wait_for_completion(show_output=False) == "Canceled"
    assert [step.get_status() for step in run.get_steps()] == ["Completed", "Canceled"]
