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
from paceline.compat.azureml.pipeline.core import Pipeline, PipelineData, PipelineParameter, PipelineRun, StepRun
from paceline.compat.azureml.pipeline.steps import CommandStep, HyperDriveStep, HyperDriveStepRun, PythonScriptStep
from paceline.compat.azureml.train.hyperdrive import (
    GridParameterSampling,
    HyperDriveConfig,
    PrimaryMetricGoal,
    choice,
)
from paceline.compat.azureml.widgets import RunDetails


@pytest.fixture
def leases(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))


def test_a_pipeline_from_its_submission_to_what_it_has_left(ws, source, leases, capsys):
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

    # A file where another script makes a folder: below its place in the store.
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


def test_a_failed_step_and_a_sweep_among_steps(ws, source, leases):
    (source / "tune.py").write_text(
        "import sys; from azureml.core import Run; Run.get_context().log('score', int(sys.argv[2]))"
    )
    tuned = HyperDriveConfig(
        GridParameterSampling({"--x": choice(1, 2)}),
        "score",
        PrimaryMetricGoal.MAXIMIZE,
        2,
        run_config=ScriptRunConfig("src", "tune.py"),
    )
    tune = HyperDriveStep("tune", tuned)
    fail = PythonScriptStep("fail.py", "fail", source_directory="src")
    fail.run_after(tune)
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
    with pytest.raises(UserErrorException, match="is no pipeline; its kind is sweep"):
        PipelineRun(run.experiment, sweep.id)


def test_waiting_has_an_end_and_a_step_may_cancel_its_pipeline(ws, source, leases):
    wait = CommandStep("until [ -e ../../../../go ]; do sleep 0.1; done", "wait", source_directory="src")
    (source / "stop.py").write_text(
        "import time\nfrom azureml.core import Run\nRun.get_context().parent.cancel()\ntime.sleep(60)\n"
    )
    stop = PythonScriptStep("stop.py", "stop", source_directory="src")
    stop.run_after(wait)
    run = Experiment(ws, "piped").submit(Pipeline(ws, [stop]))
    with pytest.raises(ExperimentExecutionException, match=r"has not ended within 0\.1 s"):
        run.wait_for_completion(show_output=False, timeout_seconds=0.1)
    Path("go").touch()
    assert run.wait_for_completion(show_output=False) == "Canceled"
    assert [step.get_status() for step in run.get_steps()] == ["Completed", "Canceled"]
