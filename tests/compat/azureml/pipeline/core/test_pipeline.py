"""A pipeline of the SDK's as what Paceline runs: its steps, their order, their jobs. Nothing is started."""

from __future__ import annotations

import inspect
import re

import pytest

from paceline.compat.azureml.core.dataset import Dataset
from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.runconfig import MpiConfiguration, RunConfiguration
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.data.data_reference import DataPath, DataPathComputeBinding, DatasetConsumptionConfig
from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
from paceline.compat.azureml.exceptions import ScenarioNotSupportedException, UserErrorException
from paceline.compat.azureml.pipeline import core, steps
from paceline.compat.azureml.pipeline.core import (
    InputPortBinding,
    OutputPortBinding,
    Pipeline,
    PipelineData,
    PipelineParameter,
    StepSequence,
    TrainingOutput,
)
from paceline.compat.azureml.pipeline.steps import (
    CommandStep,
    EstimatorStep,
    HyperDriveStep,
    MpiStep,
    ParallelRunConfig,
    ParallelRunStep,
    PythonScriptStep,
)
from paceline.compat.azureml.train.estimator import Estimator
from paceline.compat.azureml.train.hyperdrive import (
    GridParameterSampling,
    HyperDriveConfig,
    PrimaryMetricGoal,
    choice,
)

RUN_ID = "piped_1700000000_00000001"


def spec(pipeline, **parameters):
    return pipeline._spec(RUN_ID, {**pipeline.parameters, **parameters})[0]


def script(name, **options):
    return PythonScriptStep(script_name="take.py", name=name, source_directory="src", **options)


def test_pipeline_classes_have_the_sdks_parameters():
    def names(kind):
        return [name for name in inspect.signature(kind.__init__).parameters if name != "self" and name[0] != "_"]

    assert names(Pipeline)[:5] == [
        *("workspace", "steps", "description", "default_datastore", "default_source_directory"),
    ]
    assert names(PythonScriptStep) == [
        *("script_name", "name", "arguments", "compute_target", "runconfig", "runconfig_pipeline_params", "inputs"),
        *("outputs", "params", "source_directory", "allow_reuse", "version", "hash_paths"),
    ]
    assert names(PipelineData) == [
        *("name", "datastore", "output_name", "output_mode", "output_path_on_compute", "output_overwrite", "data_type"),
        *("is_directory", "pipeline_output_name", "training_output"),
    ]
    assert names(EstimatorStep)[:4] == [
        *("name", "estimator", "estimator_entry_script_arguments", "runconfig_pipeline_params"),
    ]
    assert names(HyperDriveStep)[:3] == ["name", "hyperdrive_config", "estimator_entry_script_arguments"]
    assert names(CommandStep)[:4] == ["command", "name", "compute_target", "runconfig"]
    assert names(MpiStep)[:4] == ["name", "source_directory", "script_name", "arguments"]
    assert names(ParallelRunConfig) == [
        *("environment", "entry_script", "error_threshold", "output_action", "compute_target", "node_count"),
        *("process_count_per_node", "mini_batch_size", "source_directory", "description", "logging_level"),
        *("run_invocation_timeout", "run_max_try", "append_row_file_name", "allowed_failed_count"),
        *("allowed_failed_percent", "partition_keys", "environment_variables"),
    ]
    assert names(ParallelRunStep) == [
        *("name", "parallel_run_config", "inputs", "output", "side_inputs", "arguments", "allow_reuse"),
    ]


def test_step_data_and_parameters_become_arguments_and_inputs_of_the_jobs(ws, source):
    one, two = (
        PipelineData("one", pipeline_output_name="best"),
        OutputFileDatasetConfig("two", destination=(None, "d/{run-id}")),
    )
    times = PipelineParameter("times", 3)
    PythonScriptStep("leave.py", "leave", ["--one", one, "--two", two], "local", outputs=[one], source_directory="src")
    take = script(
        "take",
        arguments=["--one", one, two.as_upload(overwrite=True).as_input("second"), times],
        inputs=[one],
        params={"mode": "fast"},
    )
    # Only the last step is passed. The pipeline adds the step on which it depends.
    pipeline = Pipeline(ws, [take], default_source_directory="src")
    assert [step.name for step in pipeline.steps] == ["leave", "take"]
    assert pipeline.validate() == []
    found = spec(pipeline, times=5)
    first, second = found.steps
    assert first.job.arguments == ("--one", "$AZUREML_DATAREFERENCE_one", "--two", "$AZUREML_DATAREFERENCE_two")
    places = {one.name: (one.sources[0].path, one.mode, one.inside) for one in first.job.inputs}
    assert places == {
        "one": (f"azureml/{RUN_ID}_0/one", "upload", "one"),
        "two": (f"d/{RUN_ID}_0", "upload", None),
    }
    assert second.job.arguments == ("--one", "$AZUREML_DATAREFERENCE_one", "$AZUREML_DATAREFERENCE_second", "5")
    places = {one.name: (one.sources[0].path, one.mode, one.inside) for one in second.job.inputs}
    assert places == {"one": (f"azureml/{RUN_ID}_0/one", "mount", "one"), "second": (f"d/{RUN_ID}_0", "mount", None)}
    assert (second.after, second.takes) == ((0,), {"one": (0, "one"), "second": (0, "two")})
    assert second.job.environment_variables["AML_PARAMETER_mode"] == "fast"
    assert (found.outputs, found.parameters) == ({"best": (0, "one")}, {"times": 5})


def test_port_bindings_rename_inputs_and_outputs(ws, source):
    left = OutputPortBinding("left", pipeline_output_name="best")
    store = ws.get_default_datastore()
    bound = [
        InputPortBinding("taken", bind_object=left, bind_mode="download"),
        InputPortBinding("there", store.path("a/b")),
        InputPortBinding("table", Dataset.File.from_files("src/take.py")),
    ]
    leave = script("leave", arguments=["--out", left], outputs=[left])
    pipeline = Pipeline(ws, [leave, script("take", arguments=["--in", *bound], inputs=bound)])
    pipeline._set_experiment_name("e")
    first, second = spec(pipeline).steps
    assert first.job.arguments == ("--out", "$AZUREML_DATAREFERENCE_left")
    words = [f"$AZUREML_DATAREFERENCE_{name}" for name in ("taken", "there", "table")]
    assert second.job.arguments == ("--in", *words)
    assert {one.name: one.mode for one in second.job.inputs} == {
        "taken": "download",
        "there": "mount",
        "table": "mount",
    }
    assert second.takes == {"taken": (0, "left")}
    with pytest.raises(UserErrorException, match="bind_object='x'"):
        InputPortBinding("wrong", "x")


def test_step_sequence_and_run_after_set_the_order_of_pipeline_steps_without_shared_data(ws, source):
    a, b, c, d, e = (script(name) for name in "abcde")
    e.run_after(a)
    found = spec(Pipeline(ws, StepSequence([a, [b, c], d])))
    assert [(step.name, step.after) for step in found.steps] == [("a", ()), ("b", (0,)), ("c", (0,)), ("d", (1, 2))]
    found = spec(Pipeline(ws, [[e], a]))
    assert [(step.name, step.after) for step in found.steps] == [("a", ()), ("e", (0,))]


@pytest.mark.promise("pipelines-azure-sdk-run-they")
def test_each_kind_of_step_becomes_a_job(ws, source, tmp_path):
    data, mode = PipelineData("data"), PipelineParameter("mode", "fast")
    leave = script("leave", outputs=[data])
    command = CommandStep(["python", "take.py", data, "--mode", mode], "command", inputs=[data], source_directory="src")
    config = RunConfiguration()
    config.communicator = "Mpi"
    counted = script(
        "counted",
        runconfig=config,
        runconfig_pipeline_params={"NodeCount": PipelineParameter("nodes", 1), "MpiProcessCountPerNode": 2},
    )
    estimator = Estimator(source_directory="src", entry_script="take.py", compute_target="local")
    estimated = EstimatorStep("estimated", estimator, ["--in", data], inputs=[data])
    ranks = MpiStep("ranks", "src", "take.py", [data], "local", 2, 1, inputs=[data])
    tuned = HyperDriveStep(
        "tuned",
        HyperDriveConfig(
            GridParameterSampling({"--x": choice(1, 2)}),
            "score",
            PrimaryMetricGoal.MAXIMIZE,
            2,
            run_config=ScriptRunConfig("src", "take.py"),
        ),
        [data.as_download(), mode],
        inputs=[data],
    )
    found = spec(Pipeline(ws, [leave, command, counted, estimated, ranks, tuned]), nodes=2)
    jobs = {step.name: step.job for step in found.steps}
    assert jobs["command"].arguments == ("-c", 'python take.py "$AZUREML_DATAREFERENCE_data" --mode fast')
    assert (jobs["counted"].node_count, jobs["counted"].process_count_per_node) == (2, 2)
    assert config.node_count == 1, "what the driver has is not changed"
    assert jobs["estimated"].arguments == ("--in", "$AZUREML_DATAREFERENCE_data")
    assert (jobs["ranks"].node_count, jobs["ranks"].distributed_backend) == (2, "mpi")
    assert jobs["tuned"].arguments == ("$AZUREML_DATAREFERENCE_data", "fast")
    (sweep,) = [step for step in found.steps if step.sweep is not None]
    assert (sweep.sweep["metric"], sweep.takes) == ("score", {"data": (0, "data")})
    assert [one.mode for one in jobs["tuned"].inputs] == ["download"]
    with pytest.raises(UserErrorException, match=r"would be written by each trial\. Select .*TrainingOutput\("):
        HyperDriveStep("t", tuned.hyperdrive_config, outputs=[data])
    assert MpiConfiguration().process_count_per_node == 1


def test_pipeline_parameters_can_be_paths_and_datasets(ws, source, tmp_path):
    store = ws.get_default_datastore()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
        store.upload(str(tmp_path / name), target_path=name)
    path = PipelineParameter("path", DataPath(store, "a"))
    files = PipelineParameter("files", Dataset.File.from_files((store, "a/**")))
    step = script(
        "take",
        arguments=[(path, DataPathComputeBinding("download"))],
        inputs=[DatasetConsumptionConfig("data", files).as_mount()],
    )
    pipeline = Pipeline(ws, [step])
    given = {"path": DataPath(store, "b"), "files": Dataset.File.from_files((store, "b/**"))}
    for parameters, place in (({}, "a"), (given, "b")):
        found = {one.name: one for one in spec(pipeline, **parameters).steps[0].job.inputs}
        assert (found["path"].sources[0].path, found["path"].mode) == (place, "download")
        assert found["data"].sources[0].path.startswith(place)


def test_invalid_step_raises_a_user_error_before_submission(ws, source):
    data = PipelineData("data")

    def parallel(**values):
        given = {"environment": None, "entry_script": "take.py", "error_threshold": 0, "output_action": "summary_only"}
        return ParallelRunConfig(**{**given, "compute_target": "local", "node_count": 1, **values})

    def planned(**values):
        leave = script("leave", outputs=[data])
        step = ParallelRunStep("p", parallel(source_directory="src", **values), [data])
        return Pipeline(ws, [leave, step]).validate()

    for make, said in (
        (lambda: Pipeline(ws, []), "a pipeline needs at least one step"),
        (lambda: Pipeline(ws, ["train.py"]), "'train.py' must be a step"),
        (lambda: Pipeline(ws, [script("a", inputs=[data])]), "'a' takes 'data', which is in no step's outputs="),
        (lambda: PythonScriptStep(""), "script_name is required"),
        (CommandStep, "command is required"),
        (lambda: PipelineData("1st"), "the name '1st'"),
        (lambda: PipelineParameter("p", None), "the default of the parameter 'p' is None"),
        (lambda: script("a", runconfig_pipeline_params={"Nodes": 2}), "runconfig_pipeline_params has 'Nodes'"),
        (lambda: Pipeline(ws, [script("a", arguments=[{}])]).validate(), "an argument is {}"),
        (lambda: OutputFileDatasetConfig("x").read_delimited_files(path_glob="x"), "path_glob='x' is not supported"),
        (lambda: OutputFileDatasetConfig("x").read_parquet_files().register_on_complete("x"), "Register its files"),
        (lambda: parallel(output_action="append"), "output_action='append' must be one of append_row, summary_only"),
        (
            lambda: planned(partition_keys=["a"]),
            "makes mini-batches by 'a', a key missing in the paths of the input 'data'",
        ),
        (lambda: planned(partition_keys="a"), "partition_keys='a' must be a list of names"),
        (lambda: parallel(entry_script="run"), "entry_script='run' is not a Python file"),
        (lambda: ParallelRunStep("p", parallel(), []), "step 'p' has no inputs"),
        (lambda: ParallelRunStep("p", parallel(output_action="append_row"), [data]), "needs an output="),
        (lambda: planned(mini_batch_size="big"), "mini_batch_size='big' must be 1 or more"),
        (lambda: planned(node_count=0), "node_count=0 must be 1 or more"),
        (lambda: planned(entry_script="none.py"), "entry_script='none.py' is not in 'src'"),
        (lambda: TrainingOutput("Best"), "type='Best' of a TrainingOutput must be 'Model' or 'Metrics'"),
        (
            lambda: Experiment(ws, "e").submit(
                ScriptRunConfig("src", "take.py", [OutputFileDatasetConfig("x").as_input()])
            ),
            "is another step's output",
        ),
        (lambda: Experiment(ws, "e").submit(Pipeline(ws, [script("a")]), pipeline_parameters={"x": 1}), "'x' is given"),
    ):
        with pytest.raises(UserErrorException, match=re.escape(said)):
            make()
    assert not list(ws.runs_dir.iterdir())


@pytest.mark.parametrize("name", ["AutoMLStep", "DatabricksStep", "DataTransferStep", "RScriptStep", "ModuleStep"])
def test_unsupported_pipeline_step_raises_an_error_that_names_the_alternative(name):
    with pytest.raises(ScenarioNotSupportedException, match=f"{name} is not supported. .*Step"):
        getattr(steps, name)(name="a")


def test_publishing_or_scheduling_a_pipeline_is_refused_with_a_hint_at_the_alternative(ws, source):
    pipeline = Pipeline(ws, [script("a")])
    for call in (
        lambda: pipeline.publish("p"),
        lambda: core.PublishedPipeline.get(ws, "id"),
        lambda: core.Schedule.create(ws, recurrence=core.ScheduleRecurrence("Day", 1)),
    ):
        with pytest.raises(ScenarioNotSupportedException, match=r"is not supported\. .*pipeline"):
            call()
    assert core.PublishedPipeline.list(ws) == core.Schedule.list(ws) == []
