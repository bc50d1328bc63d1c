from __future__ import annotations

import json
import os
from dataclasses import fields
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.environments.environment import Environment
from paceline.errors import JobError
from paceline.job.data_reference import DataReference, Source
from paceline.job.job import BACKENDS, JOB_VERSION, RANK_VARIABLES, RUN_VARIABLES, Job
from tests.helpers import make_job


def data(name: str, path: str = "x", **values: object) -> DataReference:
    return DataReference(name=name, sources=(Source(datastore="lab", path=path),), **values)


REPLACE = {
    "on_failure": "replace",
    "max_restarts": 1,
    "distributed_backend": "gloo",
    "process_count_per_node": 2,
}
# Invalid values of a job -> parts of the error message: the value, then the rule or the next step.
WRONG = [
    ({"entry_script": ""}, ("entry_script is missing", "relative to source_directory")),
    ({"entry_script": None}, ("entry_script is missing", "relative to source_directory")),
    ({"entry_script": "/etc/train.py"}, ("'/etc/train.py'", "outside source_directory")),
    ({"entry_script": "../train.py"}, ("'../train.py'", "outside source_directory")),
    ({"entry_script": "a/../../train.py"}, ("'a/../../train.py'", "outside source_directory")),
    ({"entry_script": "", "entry_module": "pkg.2"}, ("'pkg.2'", "is not a module's name")),
    ({"entry_module": "pkg.train"}, ("'train.py'", "'pkg.train'", "only one can run")),
    (
        {"secrets": {"A": "env:B"}, "environment_variables": {"A": "1"}},
        ("secrets and environment_variables both set A",),
    ),
    ({"secrets": {"RANK": "env:B"}, "distributed_backend": "gloo"}, ("RANK", "the launcher sets")),
    ({"secrets": {"SLURM_JWT": "env:B"}}, ("SLURM_JWT", "Slurm reads itself")),
    ({"secrets": {"A": "hunter2"}}, ("named by its place", "not shown")),
    ({"secrets": ["A"]}, ("secrets=... is not a dict",)),
    ({"entry_script": "a\0b.py"}, (r"'a\x00b.py'", "NUL")),
    ({"arguments": "--epochs 5"}, ("'--epochs 5'", "strings")),
    ({"arguments": (5,)}, ("(5,)", "strings")),
    ({"arguments": ("a\0b",)}, (r"'a\x00b'", "NUL")),
    ({"node_count": 0}, ("node_count=0", "1 or more")),
    ({"node_count": True}, ("node_count=True", "integer of 1 or more")),
    ({"node_count": 2.0}, ("node_count=2.0", "integer")),
    ({"process_count_per_node": "4"}, ("process_count_per_node='4'", "integer of 1 or more")),
    ({"max_restarts": -1}, ("max_restarts=-1", "integer of 0 or more")),
    ({"distributed_backend": "smoke"}, ("'smoke'", "'mpi', 'gloo', 'nccl', 'ps', 'tensorflow'")),
    ({"node_count": 2}, ("node_count=2", "2 processes", "Choose 'mpi'")),
    ({"process_count_per_node": 3}, ("process_count_per_node=3", "3 processes", "Choose 'mpi'")),
    ({"distributed_backend": "nccl"}, ("'nccl'", "use_gpu=True", "'gloo'")),
    (
        {"distributed_backend": "mpi", "worker_count": 2},
        ("worker_count=2", "'mpi'", "belong to 'ps'"),
    ),
    ({"parameter_server_count": 1}, ("parameter_server_count=1", "belong to 'ps'")),
    ({"distributed_backend": "ps"}, ("parameter_server_count=0", "1 or more")),
    (
        {"distributed_backend": "ps", "parameter_server_count": 1, "worker_count": 0},
        ("worker_count=0", "integer of 1 or more"),
    ),
    (
        {"distributed_backend": "ps", "parameter_server_count": 1, "process_count_per_node": 2},
        ("process_count_per_node=2", "Leave process_count_per_node at 1"),
    ),
    (
        {"distributed_backend": "ps", "parameter_server_count": 1, "node_count": 3},
        ("node_count=3", "= 2", "Ask for fewer nodes"),
    ),
    ({"use_gpu": "yes"}, ("use_gpu='yes'", "use_gpu=True or use_gpu=False")),
    ({"use_gpu": 1}, ("use_gpu=1", "bool")),
    ({"compute_target": ""}, ("compute_target=''", "'local'")),
    ({"compute_target": 5}, ("compute_target=5", "'local'")),
    ({"environment": "torch"}, ("environment='torch'", "not an Environment")),
    ({"use_gpu": True, "gpu_share": 0}, ("gpu_share=0 ", "above 0 and up to 1")),
    ({"use_gpu": True, "gpu_share": 1.5}, ("gpu_share=1.5",)),
    ({"use_gpu": True, "gpu_share": float("nan")}, ("gpu_share=nan",)),
    ({"use_gpu": True, "gpu_share": "half"}, ("gpu_share='half'",)),
    ({"cores": -1}, ("cores=-1 is not an integer of 0 or more",)),
    ({"distributed_backend": "ncll"}, ("'ncll' is unknown. Did you mean 'nccl'? Choose one of",)),
    ({"gpu_share": 0.5}, ("gpu_share=0.5 without use_gpu=True",)),
    ({"gpu_visibility": "all"}, ("gpu_visibility='all'", "'worker' or 'node'")),
    ({"files": {"a": 1}}, ("files=", "dict of strings")),
    ({"files": {"../a": ""}}, ("'../a'", "below the script's")),
    ({"files": {"outputs/a": ""}}, ("'outputs/a'", "below the script's")),
    ({"inputs": ("mnist",)}, ("'mnist'", "is not data")),
    ({"inputs": (data("a"), data("a", path="b"))}, ("two inputs are called 'a'", "as_named_input")),
    (
        {"inputs": (data("a"),), "environment_variables": {"PACELINE_INPUT_a": "x"}},
        ("PACELINE_INPUT_a", "Remove one of them"),
    ),
    ({"inputs": (data("a", path_on_compute="../x"),)}, ("path_on_compute='../x'", "below the script's")),
    ({"inputs": (data("a", path_on_compute="/data"),)}, ("path_on_compute='/data'", "below the script's")),
    ({"inputs": (data("a", path_on_compute="outputs/x"),)}, ("path_on_compute='outputs/x'", "below the script's")),
    (
        {"inputs": (data("a", path_on_compute="x", partition="node"),)},
        ("path_on_compute='x'", "as_partition(by='node')"),
    ),
    ({"on_failure": "replase"}, ("on_failure='replase'", "'restart' or 'replace'")),
    ({"on_failure": "replace"}, ("on_failure='replace' with max_restarts=0", "max_restarts=3")),
    (
        REPLACE | {"distributed_backend": "mpi"},
        ("distributed_backend='mpi'", "it needs 'gloo'", "on_failure='restart'"),
    ),
    (REPLACE | {"node_count": (1, 2)}, ("node_count=1..2", "starts all workers again")),
    (REPLACE | {"process_count_per_node": 1}, ("with one worker", "no other worker")),
    (REPLACE | {"use_gpu": True}, ("on_failure='replace' with use_gpu=True", "CPUs only")),
    (REPLACE | {"entry_script": "run.sh"}, ("on_failure='replace' with entry_script='run.sh'", "Python")),
    (
        REPLACE | {"environment": Environment(docker_image="python:3.12")},
        ("on_failure='replace' with a container image", "start again together"),
    ),
    ({"environment_variables": ["A=1"]}, ("['A=1']", "dict of strings")),
    ({"environment_variables": {"A B": "1"}}, ("'A B'", "letters, digits and '_'")),
    ({"environment_variables": {"1A": "1"}}, ("'1A'", "letters, digits and '_'")),
    ({"environment_variables": {"": "1"}}, ("''", "letters, digits and '_'")),
    ({"environment_variables": {"A": 1}}, ("['A']=1", "Write it as '1'")),
    ({"environment_variables": {"A": "x\0"}}, ("['A']", "without NUL")),
    ({"max_run_duration_seconds": 0}, ("max_run_duration_seconds=0", "above 0")),
    ({"max_run_duration_seconds": -1}, ("max_run_duration_seconds=-1", "above 0")),
    ({"max_run_duration_seconds": float("nan")}, ("nan", "above 0")),
    ({"max_run_duration_seconds": float("inf")}, ("inf", "above 0")),
    ({"max_run_duration_seconds": "60"}, ("'60'", "number of seconds")),
    ({"grace_period_seconds": -0.5}, ("-0.5", "0 or more")),
    ({"grace_period_seconds": True}, ("True", "number of seconds")),
    ({"grace_period_seconds": None}, ("grace_period_seconds=None", "0 or more")),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[said[0] for _, said in WRONG])
def test_job_with_an_invalid_value_is_refused_with_the_value_and_the_rule(values, said):
    with pytest.raises(JobError) as refused:
        make_job(**values)
    for part in said:
        assert part in str(refused.value)


def test_job_error_is_a_value_error():
    with pytest.raises(ValueError, match="node_count=0"):
        make_job(node_count=0)


@pytest.mark.promise("one-process-without-backend-variable")
@pytest.mark.parametrize("name", sorted({*RANK_VARIABLES, "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"}))
def test_job_may_set_rank_variables_only_without_a_launcher(name):
    with pytest.raises(JobError, match=f"sets {name}, which the launcher sets for each worker"):
        make_job(environment_variables={name: "0"}, distributed_backend="gloo")
    # Regression: `--env RANK=-1` was refused, although scripts set RANK=-1 to show that no launcher has started them.
    assert make_job(environment_variables={name: "-1"}).environment_variables == {name: "-1"}


@pytest.mark.parametrize("name", sorted(RUN_VARIABLES))
def test_variable_that_paceline_sets_for_workers_is_refused(name):
    with pytest.raises(JobError, match=f"sets {name}, which Paceline sets for each worker"):
        make_job(environment_variables={name: "0"})


def test_arguments_given_as_a_list_are_refused_with_a_hint_at_tuples():
    # Regression: the error for arguments=['--a'] said that ['--a'] "is not a list of strings", although it is a list.
    with pytest.raises(JobError, match="tuple"):
        make_job(arguments=["--a"])


@pytest.mark.parametrize(
    ("values", "world_size", "launcher", "uses_tf_config"),
    [
        ({}, 1, "processes", False),
        ({"distributed_backend": "gloo"}, 1, "processes", False),
        ({"distributed_backend": "gloo", "node_count": 2, "process_count_per_node": 4}, 8, "processes", False),
        ({"distributed_backend": "mpi", "node_count": 3}, 3, "mpi", False),
        ({"distributed_backend": "nccl", "use_gpu": True, "process_count_per_node": 8}, 8, "processes", False),
        ({"distributed_backend": "tensorflow", "node_count": 2}, 2, "processes", True),
        ({"distributed_backend": "ps", "parameter_server_count": 1}, 2, "processes", True),
        (
            {"distributed_backend": "ps", "worker_count": 3, "parameter_server_count": 2, "node_count": 2},
            5,
            "processes",
            True,
        ),
    ],
)
def test_backend_and_process_count_of_a_job_determine_world_size_and_launcher(
    values, world_size, launcher, uses_tf_config
):
    job = make_job(**values)
    assert (job.world_size, job.launcher, job.uses_tf_config) == (world_size, launcher, uses_tf_config)


def test_job_is_immutable(tmp_path):
    job = make_job()
    with pytest.raises(AttributeError):
        job.node_count = 2


def test_later_change_of_a_given_dict_does_not_change_the_job():
    variables = {"SEED": "1"}
    job = make_job(environment_variables=variables)
    variables["SEED"] = "2"
    assert job.environment_variables == {"SEED": "1"}


def test_environment_variables_of_a_job_may_be_any_mapping():
    job = make_job(environment_variables=MappingProxyType({"SEED": "1"}))
    assert job.to_json()["environment_variables"] == {"SEED": "1"}


# A shell can pass any bytes except NUL as an argument.
words = st.binary().map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
environments = st.builds(
    Environment,
    python=st.none() | st.just("/usr/bin/python3"),
    layered=st.booleans(),
    pip_packages=st.lists(st.sampled_from(["torch>=2", "einops"]), unique=True).map(tuple),
    environment_variables=st.dictionaries(st.just("A"), st.text(st.characters(codec="utf-8", exclude_characters="\0"))),
)
inputs = st.builds(
    DataReference,
    name=st.from_regex(r"\A[a-z_][a-z0-9_]{0,5}\Z"),
    sources=st.builds(
        Source, datastore=st.none() | st.just("lab"), path=st.text(st.characters(codec="utf-8", exclude_characters="*"))
    ).map(lambda source: (source,)),
    mode=st.sampled_from(["mount", "download", "upload", "direct"]),
    overwrite=st.booleans(),
    fingerprint=st.none() | st.just("0" * 64),
)
seconds = st.floats(min_value=0.001, max_value=1e9) | st.integers(1, 10**9)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    backend = draw(st.sampled_from([None, *BACKENDS]))
    values = {"distributed_backend": backend, "use_gpu": draw(st.booleans()) or backend == "nccl"}
    if backend == "ps":
        values["worker_count"] = draw(st.none() | st.integers(1, 5))
        values["parameter_server_count"] = draw(st.integers(1, 5))
        values["node_count"] = draw(st.integers(1, 2))
    elif backend is not None:
        values["node_count"] = draw(st.integers(1, 9))
        values["process_count_per_node"] = draw(st.integers(1, 9))
    return Job(
        **values,
        entry_script=draw(st.sampled_from(["train.py", "a b/ü.py", "-x.py", "'; rm -rf.py"])),
        arguments=tuple(draw(st.lists(words))),
        framework=draw(st.sampled_from([None, "pytorch", "tensorflow", "sklearn"])),
        environment=draw(environments),
        gpu_visibility=draw(st.sampled_from(["worker", "node"])),
        environment_variables=draw(st.dictionaries(st.from_regex(r"\AX_[A-Za-z0-9_]*\Z"), words, max_size=3)),
        inputs=tuple(draw(st.lists(inputs, max_size=3, unique_by=lambda reference: reference.name))),
        max_run_duration_seconds=draw(st.none() | seconds),
        grace_period_seconds=draw(st.just(0) | seconds),
        max_restarts=draw(st.integers(0, 100)),
    )


@pytest.mark.promise("job-goes-json-back-unchanged")
@given(jobs())
@settings(max_examples=50)
def test_job_is_equal_after_conversion_to_json_and_back(job):
    text = json.dumps(job.to_json())
    assert Job.from_json(json.loads(text)) == job


def test_json_of_a_job_has_every_field_and_a_version():
    assert set(make_job().to_json()) == {field.name for field in fields(Job)} | {"version"}
    assert make_job().to_json()["version"] == JOB_VERSION


def test_job_json_of_version_1_is_read_and_its_packages_and_inputs_are_ignored():
    old = {
        "version": 1,
        "entry_script": "train.py",
        "python": "/usr/bin/python3",
        "pip_packages": ["einops"],
        "inputs": ["x"],
    }
    found = Job.from_json(old)
    assert (found.environment, found.inputs) == (Environment(python="/usr/bin/python3"), ())


@pytest.mark.parametrize("version", [0, 3, None, "1"])
def test_job_json_of_an_unknown_version_is_refused(version):
    with pytest.raises(JobError, match=rf"job version {version!r}, but this Paceline reads version {JOB_VERSION}"):
        Job.from_json({**make_job().to_json(), "version": version})


def test_job_json_without_a_version_is_refused():
    data = make_job().to_json()
    del data["version"]
    with pytest.raises(JobError, match="job version None"):
        Job.from_json(data)


def test_unknown_field_in_job_json_is_refused_and_the_error_lists_the_known_fields():
    with pytest.raises(JobError, match=r"unknown job fields \['flavour'\]; known are .*'node_count'"):
        Job.from_json({**make_job().to_json(), "flavour": "mint"})


def test_job_loaded_from_json_is_validated():
    with pytest.raises(JobError, match="node_count=0"):
        Job.from_json({**make_job().to_json(), "node_count": 0})


def test_a_job_from_json_without_a_script_is_refused():
    with pytest.raises(JobError, match="entry_script"):
        Job.from_json({"version": JOB_VERSION})
