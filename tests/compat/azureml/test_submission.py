from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from paceline.compat.azureml.core.compute import AmlCompute, ComputeTarget
from paceline.compat.azureml.core.dataset import Dataset
from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.runconfig import (
    MpiConfiguration,
    PyTorchConfiguration,
    RunConfiguration,
    TensorflowConfiguration,
)
from paceline.compat.azureml.core.script_run_config import ScriptRunConfig
from paceline.compat.azureml.data.data_reference import DataPathComputeBinding, DataReference
from paceline.compat.azureml.exceptions import ComputeTargetException, RunConfigurationException, UserErrorException
from paceline.compat.azureml.submission import prepared
from paceline.compat.azureml.train.estimator import Estimator
from tests.helpers import write_tree


def job(ws, config):
    return prepared(config, ws).job


def shape(found):
    return found.node_count, found.process_count_per_node, found.distributed_backend


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (1, 1, None)),
        (MpiConfiguration(2, 3), (3, 2, "mpi")),
        (PyTorchConfiguration("Nccl", 4, 2), (2, 2, "gloo")),
        (PyTorchConfiguration("Gloo", node_count=2), (2, 1, "gloo")),
        (TensorflowConfiguration(2, 0), (2, 1, "tensorflow")),
    ],
    ids=["none", "mpi", "nccl", "gloo", "tensorflow"],
)
def test_distributed_configuration_sets_backend_and_process_counts(ws, given, expected):
    assert shape(job(ws, ScriptRunConfig("src", "train.py", distributed_job_config=given))) == expected


def test_tensorflow_configuration_starts_parameter_servers(ws):
    config = TensorflowConfiguration(worker_count=2, parameter_server_count=1)
    found = job(ws, ScriptRunConfig("src", "train.py", distributed_job_config=config))
    assert (found.distributed_backend, found.worker_count, found.parameter_server_count) == ("ps", 2, 1)


def test_process_count_that_nodes_cannot_share_evenly_is_refused(ws):
    with pytest.raises(RunConfigurationException, match="process_count=3"):
        job(ws, ScriptRunConfig("src", "train.py", distributed_job_config=PyTorchConfiguration("Gloo", 3, 2)))
    with pytest.raises(RunConfigurationException, match="distributed_job_config='mpi'"):
        ScriptRunConfig("src", "train.py", distributed_job_config="mpi")


def test_run_configuration_changed_before_submission_is_used_for_the_submitted_job(ws):
    config = ScriptRunConfig(source_directory="src", script="train.py")
    ComputeTarget.create(ws, "cluster", AmlCompute.provisioning_configuration())
    config.run_config.target = ComputeTarget(ws, "cluster")
    config.run_config.environment_variables = {"A": 1}
    config.run_config.environment = Environment("mine")
    config.run_config.environment.environment_variables = {"A": "0", "B": "2"}
    config.run_config.arguments = ["--lr", 0.1, "--on", True]
    found = prepared(config, ws)
    assert found.job.arguments == ("--lr", "0.1", "--on", "True")
    assert dict(found.job.environment_variables) == {"A": "1", "B": "2", "AZUREML_ARM_WORKSPACE_NAME": ws.name}
    assert found.job.compute_target == "local"
    assert "cluster is this machine" in found.notes[0]


def test_same_data_in_configuration_and_arguments_is_one_input(ws):
    store = ws.get_default_datastore()
    reference = DataReference(store, "code", "code", mode="download", overwrite=True)
    config = ScriptRunConfig("src", "train.py", ["--d", reference, "--again", reference])
    config.run_config.data_references = {"code": reference.to_config(), "other": store.path("x").to_config()}
    found = job(ws, config)
    assert [(one.name, one.mode) for one in found.inputs] == [("code", "download"), ("other", "mount")]
    config.arguments = [reference.as_mount()]
    assert [(one.name, one.mode) for one in job(ws, config).inputs] == [("code", "mount"), ("other", "mount")]


def test_script_configs_with_one_run_config_keep_their_own_scripts(ws):
    run = RunConfiguration()
    first, second = (ScriptRunConfig("src", f"{name}.py", [name], run_config=run) for name in "ab")
    first.arguments = ["later"]
    assert [(one.entry_script, one.arguments) for one in (job(ws, first), job(ws, second))] == [
        ("a.py", ("later",)),
        ("b.py", ("b",)),
    ]
    assert (run.script, run.arguments) == (None, [])


def test_notebook_job_gets_nbconvert_if_it_is_missing(ws, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nbconvert" else find_spec(name))
    found = prepared(ScriptRunConfig("src", "train.ipynb"), ws)
    assert (found.job.entry_script, found.job.environment.pip_packages[-1]) == ("bash", "nbconvert")
    assert "Notebooks need nbconvert" in found.notes[-1]
    assert "-m nbconvert --to notebook --execute train.ipynb" in found.job.arguments[1]


def test_arguments_in_one_string_are_split_as_by_a_shell(ws):
    assert job(ws, ScriptRunConfig("src", "train.py", "--name 'a b' --x 1")).arguments == ("--name", "a b", "--x", "1")


def test_misspelled_attribute_of_a_run_configuration_raises_but_a_deprecated_one_is_accepted():
    config = RunConfiguration()
    config.auto_prepare_environment = True
    with pytest.raises(AttributeError, match="node_counts"):
        config.node_counts = 2
    with pytest.raises(AttributeError, match="conda_dependency"):
        config.environment.python.conda_dependency = None


def test_datastore_as_an_argument_is_mounted_as_a_folder(ws):
    store = ws.get_default_datastore()
    found = job(ws, ScriptRunConfig("src", "train.py", ["--data", store, "--part", store.path("a/b").as_download()]))
    assert found.arguments[1] == "$AZUREML_DATAREFERENCE_workspaceblobstore"
    (whole, part) = found.inputs
    assert (whole.sources[0].datastore, whole.sources[0].path, whole.mode) == ("default", "", "mount")
    assert (part.sources[0].datastore, part.sources[0].path, part.mode) == ("default", "a/b", "download")


def test_data_references_of_a_run_configuration_become_inputs(ws):
    config = RunConfiguration()
    config.data_references = {"train": ws.get_default_datastore().path("a").to_config()}
    config.data_references["train"].path_on_compute = "/tmp/train"
    made = prepared(ScriptRunConfig("src", "train.py", run_config=config), ws)
    assert any("does not appear at /tmp/train" in note for note in made.notes)
    (found,) = made.job.inputs
    assert (found.name, found.sources[0].datastore, found.sources[0].path) == ("train", "default", "a")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("python train.py && echo done", "python train.py && echo done"),
        (["python train.py --x 1"], "python train.py --x 1"),
        (["python", "train.py", "--name", "a b"], "python train.py --name a b"),
        (["python t.py --rate", 0.1], "python t.py --rate 0.1"),
        (
            ["python t.py", "--x $HOME", True, "&&", "ls -l | wc", 'a "b c"'],
            'python t.py --x $HOME True && ls -l | wc a "b c"',
        ),
        (("python t.py", Path("my data")), "python t.py 'my data'"),
    ],
    ids=["text", "one", "words", "a line and a number", "what a shell reads", "path"],
)
def test_command_items_are_joined_into_one_line(ws, command, line):
    found = job(ws, ScriptRunConfig("src", command=command))
    assert (found.entry_script, found.arguments) == ("bash", ("-c", line))


def test_data_path_in_a_command_is_quoted(ws):
    made = job(ws, ScriptRunConfig("src", command=["python t.py --data", ws.get_default_datastore().path("a", "d")]))
    assert made.arguments == ("-c", 'python t.py --data "$AZUREML_DATAREFERENCE_d"')
    assert [one.name for one in made.inputs] == ["d"]


def test_script_config_with_a_notebook_becomes_a_bash_command_that_executes_the_notebook(ws):
    found = job(ws, ScriptRunConfig("src", "a/book.ipynb"))
    assert (found.entry_script, found.arguments[0]) == ("bash", "-c")
    assert "--execute a/book.ipynb" in found.arguments[1]


@pytest.mark.parametrize(
    ("metadata", "is_named"),
    [
        ({"kernelspec": {"name": "python36", "language": "python"}}, True),
        ({"kernelspec": {"name": "python38-azureml"}}, True),
        ({"kernelspec": {"name": "conda-env-x"}, "language_info": {"name": "python"}}, True),
        ({}, True),
        ({"kernelspec": {"name": "ir", "language": "R"}}, False),
    ],
    ids=["python36", "azureml", "conda", "none", "R"],
)
def test_python_notebook_runs_with_the_runs_own_kernel(ws, metadata, is_named):
    write_tree(Path("src"), {"book.ipynb": json.dumps({"cells": [], "metadata": metadata})})
    found = job(ws, ScriptRunConfig("src", "book.ipynb"))
    assert ("kernel_name=python3" in found.arguments[1]) == is_named


def test_invalid_script_configuration_raises_the_sdks_exception(ws):
    with pytest.raises(UserErrorException, match="excludes script and arguments"):
        ScriptRunConfig("src", "train.py", command="python train.py")
    with pytest.raises(UserErrorException, match="the script or command is missing"):
        job(ws, ScriptRunConfig("src"))
    with pytest.raises(ComputeTargetException, match="can't be a target's name"):
        job(ws, ScriptRunConfig("src", "train.py", compute_target="no name!"))
    with pytest.raises(UserErrorException, match="None"):
        job(ws, ScriptRunConfig("src", "train.py", ["--x", None]))


def test_run_details_have_the_environments_name_and_version(ws, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    mine = Environment("mine").register(ws)
    exp = Experiment(ws, "named")
    run = exp.submit(ScriptRunConfig("src", "train.py", environment=mine))
    run.cancel()
    shown = run.get_details()["runDefinition"]["environment"]
    assert (shown["name"], shown["version"]) == ("mine", "1")
    assert (run.get_environment().name, run.get_environment().version) == ("mine", "1")
    # The user has changed the environment after version 1 was registered with other packages. So the changed
    # environment has no version.
    mine.python.conda_dependencies.add_pip_package("einops")
    changed = prepared(ScriptRunConfig("src", "train.py", environment=mine), ws).job.environment
    assert (changed.name, changed.version) == ("mine", None)
    assert (
        job(ws, ScriptRunConfig("src", "train.py", environment=Environment("no such name!"))).environment.name is None
    )


@pytest.mark.promise("can-t-had-replaced-sentence")
def test_note_about_a_replaced_azure_cluster_is_shown_once(ws, tmp_path, capsys, caplog):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    ComputeTarget.create(ws, "once-cluster", AmlCompute.provisioning_configuration("STANDARD_D2_V2"))
    environment = Environment("once")
    environment.python.conda_dependencies.add_pip_package("azureml-sdk")
    config = ScriptRunConfig("src", "train.py", compute_target="once-cluster", environment=environment)
    exp = Experiment(ws, "once")
    for told_at_submission in (True, False):
        caplog.clear()
        run = exp.submit(config)
        run.wait_for_completion(show_output=True)
        shown = capsys.readouterr().out
        at_the_end = shown.count("once-cluster (STANDARD_D2_V2) is this machine")
        assert ("azureml-sdk is left out" in caplog.text, "azureml-sdk is left out" in shown) == (True, False)
        # The first submission prints that the cluster is this machine, so its run does not repeat this. The second run
        # prints it at its end.
        assert (caplog.text.count("is this machine"), at_the_end) == ((1, 0) if told_at_submission else (0, 1))
        assert len(run.record().warnings) == 3
    with pytest.raises(UserErrorException, match=r"can't submit 'train\.py'"):
        exp.submit("train.py")


def test_run_resumes_from_another_runs_outputs_by_each_method_of_the_sdk(ws, tmp_path):
    """`_get_outputs_datapath()` gave no DataPath: the SDK's notebook on resuming stopped at `create_data_reference`."""
    write_tree(
        tmp_path / "src",
        {
            "train.py": "import argparse, pathlib\n"
            "parser = argparse.ArgumentParser()\n"
            "parser.add_argument('--resume-from')\n"
            "folder = parser.parse_args().resume_from\n"
            "step = int(pathlib.Path(folder, 'step.txt').read_text()) if folder else 0\n"
            "pathlib.Path('outputs').mkdir(exist_ok=True)\n"
            "pathlib.Path('outputs/step.txt').write_text(str(step + 1))\n"
        },
    )
    experiment = Experiment(ws, "e")
    first = experiment.submit(ScriptRunConfig("src", "train.py"))
    first.wait_for_completion()
    path = first._get_outputs_datapath()
    assert (path.datastore_name, path.path_on_datastore) == (
        "workspaceartifactstore",
        f"ExperimentRun/dcid.{first.id}/outputs",
    )
    reference = path.create_data_reference(datapath_compute_binding=DataPathComputeBinding(mode="mount"))
    by_configuration = ScriptRunConfig("src", "train.py", ["--resume-from", str(reference)])
    by_configuration.run_config.data_references = {reference.data_reference_name: reference.to_config()}
    ways = [
        by_configuration,
        ScriptRunConfig("src", "train.py", ["--resume-from", reference.as_download()]),
        ScriptRunConfig("src", "train.py", ["--resume-from", Dataset.File.from_files(path).as_mount()]),
        ScriptRunConfig("src", "train.py", resume_from=path),
        Estimator("src", compute_target="local", entry_script="train.py", resume_from=path),
    ]
    for run in [experiment.submit(way) for way in ways]:
        run.wait_for_completion()
        run.download_file("outputs/step.txt", str(tmp_path / "step.txt"))
        assert (tmp_path / "step.txt").read_text() == "2"
