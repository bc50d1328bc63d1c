"""Refusals before anything starts. Submissions that start are tested in tests/engines."""

from __future__ import annotations

import importlib
import os
import subprocess

import pytest

from paceline.environments.environment import Environment
from paceline.errors import JobError, LauncherError, SnapshotError, TargetError, WorkspaceError
from paceline.job.data_reference import DataReference, Source
from paceline.submit import SourceCopy, check, in_places_of, submit, take_snapshot, values_of
from paceline.targets.configured import Configured, add
from tests.helpers import make_job, write_program, write_tree


def refused(tmp_path, job, files=None, experiment="digits", **source):
    """Return the error that refuses this job. Fail if a run was made."""
    directory = write_tree(tmp_path / "code", files if files is not None else {"train.py": ""})
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller checks its text
        submit(job, SourceCopy(directory=directory, **source), tmp_path / "ws", experiment)
    assert not (tmp_path / "ws/runs").exists() or os.listdir(tmp_path / "ws/runs") == []
    return caught.value


def test_unknown_target_is_refused_with_the_existing_ones(tmp_path):
    error = refused(tmp_path, make_job(compute_target="moon"))
    assert isinstance(error, TargetError)
    assert "no compute target 'moon'. There are local" in str(error)


def test_more_gpus_than_there_are_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "0")
    error = refused(tmp_path, make_job(use_gpu=True, distributed_backend="nccl", process_count_per_node=2))
    assert isinstance(error, TargetError)
    assert "2 workers" in str(error)


def test_reserved_cores_are_refused_on_other_targets_than_local(tmp_path):
    add(tmp_path / "ws", Configured(name="lab", kind="ssh", settings={"hosts": ["a"]}))
    error = refused(tmp_path, make_job(compute_target="lab", cores=0))
    assert "cores=0: compute target 'lab' is of kind ssh" in str(error)


@pytest.mark.parametrize(
    ("given", "text"),
    [({"use_gpu": True, "gpu_share": 0.5}, "gpu_share=0.5"), ({"priority": "high"}, "priority='high'")],
)
def test_gpu_share_and_priority_are_refused_on_engines_with_their_own_queue(tmp_path, given, text):
    add(tmp_path / "ws", Configured(name="cluster", kind="slurm", settings={}))
    error = refused(tmp_path, make_job(compute_target="cluster", **given))
    assert isinstance(error, JobError)
    assert f"{text}: compute target 'cluster' is of kind slurm" in str(error)


@pytest.mark.promise("machine-lacks-said-submit-before")
def test_a_missing_mpirun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_MPIRUN", str(tmp_path / "mpirun"))
    error = refused(tmp_path, make_job(distributed_backend="mpi"))
    assert isinstance(error, LauncherError)


def test_a_wrong_experiment_name_is_refused(tmp_path):
    assert isinstance(refused(tmp_path, make_job(), experiment="../digits"), WorkspaceError)


def test_missing_script_is_refused_with_the_existing_ones(tmp_path):
    error = refused(tmp_path, make_job(), {"main.py": "", "util.py": "", "data.csv": ""})
    assert isinstance(error, JobError)
    assert "'train.py' is not in" in str(error)
    assert "main.py, util.py" in str(error)


def test_a_source_without_any_script_is_refused(tmp_path):
    assert "has no Python file" in str(refused(tmp_path, make_job(), {"data.csv": ""}))


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("outputs/train.py", {"outputs/train.py": ""}),
        (".git/train.py", {".git/train.py": ""}),
    ],
)
def test_a_script_that_the_snapshot_leaves_out_is_refused(tmp_path, script, files):
    error = refused(tmp_path, make_job(entry_script=script), files)
    assert isinstance(error, JobError)
    assert "left out of the snapshot" in str(error)


def test_source_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match="is not a folder"):
        submit(make_job(), SourceCopy(directory=tmp_path / "nowhere"), tmp_path / "ws", "digits")


def test_submitting_a_snapshot_that_no_longer_exists_is_refused(tmp_path):
    error = refused(tmp_path, make_job(), snapshot_id="0" * 64)
    assert isinstance(error, JobError)
    assert "is no longer in" in str(error)


# --- The interpreter of a run


def test_interpreter_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(JobError, match=r"python='/no/such/python' can't be run"):
        check(make_job(environment=Environment(python="/no/such/python")), tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 3.8", "is Python 3.8; workers need Python 3.10"),
        ("echo 2.7", "is Python 2.7"),
        ("exit 1", "is not a Python"),
        ("exit 0", "is not a Python"),
        ("echo hello", "workers need Python 3.10"),
    ],
)
def test_invalid_or_too_old_interpreter_is_refused(tmp_path, text, said):
    program = write_program(tmp_path / "python", f"#!/bin/sh\n{text}\n")
    with pytest.raises(JobError, match=said):
        check(make_job(environment=Environment(python=str(program))), tmp_path)


@pytest.mark.parametrize("version", ["3.10", "3.13", "4.0"])
def test_supported_interpreter_is_accepted(tmp_path, version):
    program = write_program(tmp_path / "python", f"#!/bin/sh\necho {version}\n")
    check(make_job(environment=Environment(python=str(program))), tmp_path)


class Asked:
    """A target that would supervise the run from this machine, and refuses it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def load_supervisor(self, run_dir, library, python) -> None:
        self.told.append(f"load {run_dir.parent.name}/{run_dir.name.partition('_')[0]}")

    def check(self, job) -> None:
        self.told.append("check")
        raise TargetError("no")

    def release(self, run_dir) -> None:
        self.told.append(f"release {run_dir.parent.name}/{run_dir.name.partition('_')[0]}")


def test_release_method_of_the_target_is_called_if_a_job_with_a_loaded_supervisor_is_refused(tmp_path, monkeypatch):
    target = Asked()
    monkeypatch.setattr("paceline.targets.configured.Configured.make", lambda self: target)
    refused(tmp_path, make_job())
    assert target.told == ["load runs/digits", "check", "release runs/digits"]


def test_run_placeholder_in_an_output_path_is_replaced_by_the_run_id() -> None:
    places = {"own": "models/{run}", "one": "models"}
    inputs = [DataReference(name=name, sources=(Source(path=path),), mode="upload") for name, path in places.items()]
    inputs.append(DataReference(name="read", sources=(Source(path="/data/{run}"),)))
    job = in_places_of(make_job(inputs=tuple(inputs)), "s_1_0", "{run}")
    assert [one.sources[0].path for one in job.inputs] == ["models/s_1_0", "models", "/data/{run}"]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"arguments": ("--a", "é" * 100_000)}, "arguments: number 2 has 200,000 bytes"),
        ({"environment_variables": {"BIG": "x" * 131_068}}, "environment_variables: BIG has 131,072 bytes"),
        ({"secrets": {"TOKEN": "env:TOKEN"}}, "the secret TOKEN has 200,006 bytes"),
    ],
    ids=["argument", "variable", "secret"],
)
def test_error_for_a_too_long_argument_or_variable_says_which_one(values, what):
    # Regression: the run was submitted, and then failed with "Argument list too long", which does not name the argument.
    with pytest.raises(JobError, match="at most 131,071") as caught:
        values_of(make_job(**values), {"TOKEN": "x" * 200_000})
    assert what in str(caught.value)
    assert len(str(caught.value)) < 400


def test_longest_argument_and_variable_of_linux_are_accepted():
    job = make_job(arguments=("x" * 131_071,), environment_variables={"BIG": "x" * 131_067})
    assert values_of(job, {}) == {}
    assert subprocess.run(["true", *job.arguments], env=dict(job.environment_variables), check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nothing", "send='nothing': '{source}' has no such file or folder. Give an existing path."),
        (".git", "can't be sent to other machines: a program's own. Name data that the script reads."),
        (".git/config", "a program's own"),
        ("env", "a virtual environment"),
        ("env/lib", "a virtual environment"),
        ("pipe", "neither a file nor a folder"),
        ("outputs", "'outputs' is the place of the run's own outputs"),
        ("outputs/1", "'outputs' is the place of the run's own outputs"),
        ("ws", "the workspace"),
    ],
)
def test_path_in_the_send_option_is_refused_with_the_reason_if_it_cannot_be_sent(tmp_path, path, said):
    files = {"train.py": "", ".git/config": "", "env/pyvenv.cfg": "", "env/lib": "", "outputs/1": "", "ws/a": ""}
    source = write_tree(tmp_path / "code", files)
    os.mkfifo(source / "pipe")
    with pytest.raises(JobError) as caught:
        submit(make_job(send=(path,)), SourceCopy(directory=source), source / "ws", "digits")
    assert said.format(source=source) in str(caught.value)
    assert not (source / "ws/runs").exists()


def test_link_option_for_the_outputs_folder_is_refused(tmp_path):
    """The run's own outputs would have gone into the user's folder."""
    error = refused(tmp_path, make_job(), {"train.py": "", "outputs/a": ""}, link=frozenset({"outputs"}))
    assert "link='outputs': 'outputs' is the place of the run's own outputs" in str(error)


def test_temporary_source_folder_is_copied_with_its_large_and_its_ignored_files(tmp_path, monkeypatch):
    # Regression: large files were stored as links to the temporary folder, and were lost with the folder. So a service
    # on another machine had no model.
    scan = importlib.import_module("paceline.snapshot.scan")  # the package has a function of this name too
    monkeypatch.setattr(scan, "_DATA_BYTES", 10)
    monkeypatch.setattr(scan, "MAX_BYTES", 20)
    made = write_tree(tmp_path / "made", {"train.py": "", "model.bin": "x" * 100, ".gitignore": "*.bin\n"})
    source = SourceCopy(directory=made, is_whole=True)
    taken = take_snapshot(make_job(), source, tmp_path / "ws")
    assert taken.files == {"train.py", "model.bin", ".gitignore"}
    assert taken.not_copied == ()
