from __future__ import annotations

import datetime as dt
import inspect
import os
import sys
from pathlib import Path

import pytest

from paceline.data.datasets.dataset import Dataset
from paceline.data.stores.datastore import Datastore
from paceline.environments.environment import Environment
from paceline.errors import EnvironmentSpecError, JobError
from paceline.estimator import Estimator, PyTorch, SKLearn, TensorFlow, argument_words, interpreter, with_overrides
from paceline.job.data_reference import DataReference, Source
from paceline.job.job import Job
from paceline.workspace import Workspace
from tests.helpers import write_program, write_tree

MNIST = DataReference(name="mnist", sources=(Source(datastore="lab", path="mnist"),))

# Parameter -> its default in the Azure SDK, for all parameters that Paceline's estimators have too.
OF_ALL = {
    "compute_target": None,
    "entry_script": None,
    "script_params": None,
    "use_gpu": False,
    "conda_packages": None,
    "pip_packages": None,
    "conda_dependencies_file": None,
    "pip_requirements_file": None,
    "environment_variables": None,
    "inputs": None,
    "max_run_duration_seconds": None,
}
OF_DISTRIBUTED = {"node_count": 1, "process_count_per_node": 1, "distributed_backend": None}
OF_TENSORFLOW = {"worker_count": 1, "parameter_server_count": 1}
NAMES = [
    (Estimator, OF_ALL | OF_DISTRIBUTED),
    (PyTorch, OF_ALL | OF_DISTRIBUTED),
    (TensorFlow, OF_ALL | OF_DISTRIBUTED | OF_TENSORFLOW),
    (SKLearn, OF_ALL),
]
BACKENDS = {
    Estimator: ["mpi", "gloo", "nccl", "tensorflow"],
    PyTorch: ["mpi", "gloo", "nccl"],
    TensorFlow: ["mpi", "tensorflow", "ps"],
}


@pytest.mark.promise("estimators-sdk-s-names-defaults")
@pytest.mark.parametrize(("kind", "names"), NAMES)
def test_estimators_have_the_names_and_defaults_of_the_azure_sdk(kind, names):
    parameters = inspect.signature(kind).parameters
    assert {name: parameters[name].default for name in names} == names
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names)


@pytest.mark.parametrize("kind", [Estimator, PyTorch, TensorFlow, SKLearn])
def test_only_source_directory_is_a_positional_parameter(kind):
    with pytest.raises(TypeError):
        kind(".", "train.py")


@pytest.mark.parametrize("name", ["node_count", "process_count_per_node", "distributed_backend"])
def test_sklearn_refuses_parameters_for_several_processes(name):
    with pytest.raises(TypeError, match=name):
        SKLearn(entry_script="train.py", **{name: 1})


@pytest.mark.parametrize("nothing", ["", None])
def test_source_directory_defaults_to_the_working_directory(nothing):
    assert Estimator(nothing, entry_script="train.py").source_directory == "."


def test_a_source_directory_may_be_a_path():
    assert Estimator(Path("code"), entry_script="train.py").source_directory == "code"


def test_source_directory_that_is_no_path_is_refused():
    with pytest.raises(JobError, match="source_directory=5"):
        Estimator(5, entry_script="train.py")


def test_compute_target_object_becomes_its_name(tmp_path):
    target = Workspace(tmp_path / "ws").compute_targets["local"]
    assert Estimator(entry_script="train.py", compute_target=target).job().compute_target == "local"


def test_default_compute_target_is_local():
    assert Estimator(entry_script="train.py").job().compute_target == "local"


@pytest.mark.parametrize(
    ("kind", "framework"), [(Estimator, None), (PyTorch, "pytorch"), (TensorFlow, "tensorflow"), (SKLearn, "sklearn")]
)
def test_job_has_the_framework_of_its_estimator(kind, framework):
    assert kind(entry_script="train.py").job().framework == framework


# --- Distributed backends


@pytest.mark.parametrize(
    ("kind", "backend"), [(kind, backend) for kind, known in BACKENDS.items() for backend in known]
)
def test_each_estimator_stores_each_of_its_supported_backends_in_the_job(kind, backend):
    estimator = kind(entry_script="train.py", distributed_backend=backend, use_gpu=backend == "nccl")
    assert estimator.job().distributed_backend == backend


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (kind, backend)
        for kind, known in BACKENDS.items()
        for backend in ("mpi", "gloo", "nccl", "ps", "tensorflow", "smoke", "", 5)
        if backend not in known
    ],
)
def test_unsupported_backend_is_refused_with_the_supported_ones(kind, backend):
    with pytest.raises(JobError) as refused:
        kind(entry_script="train.py", distributed_backend=backend)
    assert f"distributed_backend={backend!r} is not a backend of {kind.__name__}" in str(refused.value)
    assert all(repr(known) in str(refused.value) for known in BACKENDS[kind])


@pytest.mark.promise("more-one-process-without-backend")
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("size", [{"node_count": 2}, {"process_count_per_node": 2}])
def test_several_processes_without_a_backend_are_refused(kind, size):
    with pytest.raises(JobError, match="2 processes, which need a distributed_backend"):
        kind(entry_script="train.py", **size)


@pytest.mark.promise("wrong-estimator-s-values-said")
@pytest.mark.parametrize(
    "wrong",
    [
        {"node_count": 0},
        {"process_count_per_node": 0},
        {"use_gpu": "yes"},
        {"max_run_duration_seconds": 0},
        {"environment_variables": {"A": 1}},
        {"environment_variables": ["A"]},
        {"entry_script": "/train.py"},
        {"compute_target": 5},
        {"inputs": [object()]},
        {"inputs": "mnist"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_error_for_a_wrong_estimator_argument_has_the_name_of_its_parameter(wrong):
    (name,) = wrong
    with pytest.raises(JobError, match=name):
        PyTorch(**({"entry_script": "train.py"} | wrong))


def test_estimator_without_an_entry_script_is_refused():
    with pytest.raises(JobError, match="entry_script is missing"):
        PyTorch()


def test_world_size_includes_parameter_servers():
    job = TensorFlow(
        entry_script="train.py", distributed_backend="ps", node_count=2, worker_count=3, parameter_server_count=2
    ).job()
    assert (job.world_size, job.worker_count, job.parameter_server_count) == (5, 3, 2)


def test_ps_backend_defaults_to_one_worker_and_one_server():
    assert TensorFlow(entry_script="train.py", distributed_backend="ps").job().world_size == 2


@pytest.mark.parametrize("backend", [None, "mpi", "tensorflow"])
def test_worker_count_is_refused_unless_the_backend_is_ps(backend):
    with pytest.raises(JobError, match=r"worker_count=4.*belong to 'ps'"):
        TensorFlow(entry_script="train.py", distributed_backend=backend, worker_count=4)


# --- Script arguments


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (None, ()),
        ({}, ()),
        ({"--epochs": 5, "--lr": 1e-3}, ("--epochs", "5", "--lr", "0.001")),
        ({"--z": 1, "--a": 2, "--m": 3}, ("--z", "1", "--a", "2", "--m", "3")),
        ({"--verbose": ""}, ("--verbose",)),
        ({"--verbose": "", "--epochs": 5}, ("--verbose", "--epochs", "5")),
        ({"": "data.csv"}, ("data.csv",)),
        ({"--data": Path("a b/c")}, ("--data", "a b/c")),
        ({"--flag": True}, ("--flag", "True")),
        ({"--name": "; rm -rf / 'ü\"\n"}, ("--name", "; rm -rf / 'ü\"\n")),
        ({"--zero": 0}, ("--zero", "0")),
    ],
)
def test_script_params_become_the_arguments_in_order(params, words):
    assert argument_words(params) == words
    assert Estimator(entry_script="train.py", script_params=params).job().arguments == words


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (["--epochs", 5], "is not a dict"),
        ("--epochs 5", "is not a dict"),
        ({5: "--epochs"}, "the name 5"),
        ({"--verbose": None}, 'For a bare flag write ""'),
        ({"--sizes": [1, 2]}, r"script_params\['--sizes'\]=\[1, 2\]"),
    ],
)
def test_invalid_script_params_are_refused(params, said):
    with pytest.raises(JobError, match=said):
        Estimator(entry_script="train.py", script_params=params)


@pytest.mark.parametrize("kind", [Estimator, PyTorch, TensorFlow, SKLearn])
def test_arguments_follow_script_params_unchanged(kind):
    given = ["fit", "--set", "a=1", "--set", "b=2", "--sizes", 64, 1.5, "", Path("a b/c"), "-", "--"]
    words = ("fit", "--set", "a=1", "--set", "b=2", "--sizes", "64", "1.5", "", "a b/c", "-", "--")
    assert kind(entry_script="train.py", arguments=given).job().arguments == words
    assert kind(entry_script="train.py", arguments=tuple(given)).job().arguments == words
    both = kind(entry_script="train.py", arguments=given, script_params={"--lr": 0.1, "--amp": ""})
    assert both.job().arguments == ("--lr", "0.1", "--amp", *words)
    assert kind(entry_script="train.py", arguments=[]).job().arguments == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--lr 2", r"arguments='--lr 2' is not a list. Write it as \['--lr', '2'\]"),
        ({"--lr": 2}, "is not a list.*a dict is script_params"),
        (b"ab", "arguments=b'ab' is not a list"),
        (5, "arguments=5 is not a list"),
        (["a", None], r"arguments\[1\]=None is not a string.*Leave it out"),
        (["--sizes", [1, 2]], r"arguments\[1\]=\[1, 2\] is not.*\*sizes"),
        ([b"x"], r"arguments\[0\]=b'x'"),
    ],
)
def test_invalid_arguments_are_refused(given, said):
    with pytest.raises(JobError, match=said):
        Estimator(entry_script="train.py", arguments=given)


def test_datastore_or_dataset_argument_is_mounted_as_a_folder(tmp_path):
    workspace = Workspace(tmp_path / "ws")
    (tmp_path / "store/train").mkdir(parents=True)
    (tmp_path / "store/train/a.txt").write_text("a")
    store = Datastore.register(workspace, "lab", tmp_path / "store")
    train = Dataset.File.from_files((store, "train"))

    job = Estimator(entry_script="train.py", script_params={"--data_dir": store}, arguments=[train, store]).job()
    mounted = (store.as_mount(), train.as_mount())
    assert job.inputs == mounted
    assert [one.mode for one in job.inputs] == ["mount", "mount"]
    assert job.arguments == ("--data_dir", str(mounted[0]), str(mounted[1]), str(mounted[0]))
    assert Estimator(entry_script="train.py", inputs=[store, train]).job().inputs == mounted


def test_data_reference_in_script_params_becomes_an_input_and_a_placeholder_argument():
    job = Estimator(entry_script="train.py", script_params={"--data": MNIST, "--lr": 1}, inputs=[MNIST]).job()
    assert job.arguments == ("--data", "$AZUREML_DATAREFERENCE_mnist", "--lr", "1")
    assert job.inputs == (MNIST,)


@pytest.mark.parametrize("inputs", ["mnist", MNIST, {"a": MNIST}])
def test_inputs_that_are_no_list_are_refused(inputs):
    with pytest.raises(JobError, match="is not a list"):
        Estimator(entry_script="train.py", inputs=inputs)


# --- Packages of the environment


@pytest.mark.parametrize("name", ["pip_packages", "conda_packages"])
@pytest.mark.parametrize("wrong", ["torch", 5, ["torch", 5], ["torch", ""], ["torch", "  "]], ids=str)
def test_packages_that_are_no_list_of_names_are_refused(name, wrong):
    with pytest.raises(JobError, match=name):
        Estimator(entry_script="train.py", **{name: wrong})


def test_packages_of_an_estimator_are_stored_in_its_job():
    estimator = Estimator(entry_script="train.py", pip_packages=["torch>=2", "numpy"], conda_packages=("cmake",))
    found = estimator.job().environment
    assert (found.pip_packages, found.conda_packages) == (("torch>=2", "numpy"), ("cmake",))


@pytest.mark.parametrize(
    ("kind", "layered"), [(Estimator, False), (PyTorch, True), (TensorFlow, True), (SKLearn, True)]
)
def test_only_framework_estimators_add_packages_to_those_of_the_interpreter_by_default(kind, layered):
    assert kind(entry_script="train.py", pip_packages=["einops"]).job().environment.layered is layered
    other = kind(entry_script="train.py", pip_packages=["einops"], layered=not layered)
    assert other.job().environment.layered is not layered


def test_environment_variables_of_the_estimator_override_those_of_its_environment():
    lab = Environment(environment_variables={"A": "lab", "B": "lab"})
    job = PyTorch(entry_script="train.py", environment_definition=lab, environment_variables={"A": "mine"}).job()
    assert job.environment_variables == {"A": "mine", "B": "lab"}


@pytest.mark.parametrize(
    "other", [{"pip_packages": ["a"]}, {"python": "python3"}, {"custom_docker_image": "b"}, {"user_managed": True}]
)
def test_environment_definition_with_package_options_is_refused(other):
    with pytest.raises(JobError, match=f"environment_definition together with {next(iter(other))}"):
        PyTorch(entry_script="train.py", environment_definition=Environment(), **other)


def test_environment_name_instead_of_an_environment_is_refused():
    with pytest.raises(JobError, match="environment_definition='lab' must be an Environment"):
        PyTorch(entry_script="train.py", environment_definition="lab")


@pytest.mark.parametrize(
    ("parameter", "text", "field"),
    [
        ("pip_requirements_file", "{}==1.0\n", "pip_requirements"),
        ("conda_dependencies_file", "dependencies: [{}=1.0]\n", "conda_packages"),
    ],
)
class TestRequirementFiles:
    def test_requirements_file_named_by_an_estimator_is_read_into_the_job(self, tmp_path, parameter, text, field):
        write_tree(tmp_path, {"code/needs.txt": text.format("torch")})
        estimator = Estimator("code", entry_script="train.py", **{parameter: "needs.txt"})
        assert "torch" in str(getattr(estimator.job().environment, field))

    def test_requirements_file_of_an_estimator_is_found_in_the_working_directory(
        self, tmp_path, parameter, text, field
    ):
        write_tree(tmp_path, {"code/train.py": "", "needs.txt": text.format("numpy")})
        estimator = Estimator("code", entry_script="train.py", **{parameter: "needs.txt"})
        assert "numpy" in str(getattr(estimator.job().environment, field))

    def test_requirements_file_in_the_source_directory_takes_precedence(self, tmp_path, parameter, text, field):
        write_tree(tmp_path, {"code/needs.txt": text.format("torch"), "needs.txt": text.format("numpy")})
        estimator = Estimator("code", entry_script="train.py", **{parameter: "needs.txt"})
        assert "torch" in str(getattr(estimator.job().environment, field))

    def test_missing_requirements_file_of_an_estimator_is_refused(self, parameter, text, field):
        with pytest.raises(JobError, match=f"{parameter}='needs.txt': no such file"):
            Estimator(entry_script="train.py", **{parameter: "needs.txt"})

    def test_binary_requirements_file_of_an_estimator_is_refused(self, tmp_path, parameter, text, field):
        write_tree(tmp_path, {"needs.txt": b"\xff\xfe\0t"})
        with pytest.raises(EnvironmentSpecError, match=r"needs\.txt"):
            Estimator(entry_script="train.py", **{parameter: "needs.txt"})


@pytest.mark.parametrize("packages", [{"conda_packages": ["cmake"]}, {"pip_packages": ["torch"]}])
def test_a_conda_file_together_with_packages_is_refused(tmp_path, packages):
    write_tree(tmp_path, {"env.yml": "dependencies: []\n"})
    with pytest.raises(JobError, match="conda_dependencies_file together with"):
        Estimator(entry_script="train.py", conda_dependencies_file="env.yml", **packages)


# --- The interpreter of a run


def test_interpreter_name_is_looked_up_on_path(tmp_path, monkeypatch):
    program = write_program(tmp_path / "bin/python9", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(program.parent))
    assert Estimator(entry_script="train.py", python="python9").job().environment.python == str(program)


def test_interpreter_symlink_of_a_virtual_environment_is_not_resolved(tmp_path):
    # Regression: Paceline resolved the link to the system's Python, which does not see the packages of the virtual
    # environment.
    link = tmp_path / "venv/bin/python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    assert interpreter(os.path.relpath(link)) == str(link)


def test_paths_of_the_script_and_the_interpreter_may_be_path_objects():
    job = PyTorch(entry_script=Path("train.py"), python=Path(sys.executable)).job()
    assert (job.entry_script, job.environment.python) == ("train.py", sys.executable)


@pytest.mark.parametrize(
    ("python", "said"), [("no-such-python", "no such program"), ("", "not a path"), (3.11, "not a path")]
)
def test_interpreter_that_is_not_found_or_not_a_path_is_refused(python, said):
    with pytest.raises(JobError, match=f"python={python!r} .*{said}"):
        PyTorch(entry_script="train.py", python=python)


def test_interpreter_of_an_image_is_not_resolved_locally():
    job = PyTorch(entry_script="train.py", python="python3.13", custom_docker_image="lab/torch").job()
    assert job.environment.python == "python3.13"


# --- Values that are replaced at submission


def test_script_params_and_inputs_may_be_overridden_at_submission():
    estimator = PyTorch(entry_script="train.py", script_params={"--lr": 1}, environment_variables={"A": "1"})
    other = with_overrides(estimator, {"script_params": {"--lr": 2}, "arguments": ["a"], "inputs": [MNIST]})
    assert (other.job().arguments, other.job().inputs) == (("--lr", "2", "a"), (MNIST,))
    assert (type(other), other.job().environment_variables) == (PyTorch, {"A": "1"})
    assert estimator.job().arguments == ("--lr", "1")


def test_estimator_creates_its_job_once(monkeypatch):
    made = []
    monkeypatch.setattr("paceline.estimator.Job", lambda **values: made.append(values) or Job(**values))
    estimator = PyTorch(entry_script="train.py", script_params={"--lr": 1}, inputs=[MNIST])
    assert estimator.job() is estimator.job()
    assert len(made) == 1


@pytest.mark.parametrize(
    ("change", "arguments", "node_count"),
    [
        (lambda estimator: setattr(estimator, "node_count", 2), ("--lr", "1", "a"), 2),
        (lambda estimator: estimator.script_params.update({"--lr": 2}), ("--lr", "2", "a"), 1),
        (lambda estimator: estimator.script_params.update({"--amp": ""}), ("--lr", "1", "--amp", "a"), 1),
        (lambda estimator: estimator.arguments.append("b"), ("--lr", "1", "a", "b"), 1),
        (lambda estimator: estimator.arguments.__setitem__(0, "b"), ("--lr", "1", "b"), 1),
    ],
    ids=["an attribute", "a parameter", "one more", "an argument", "another"],
)
def test_attribute_changed_after_construction_is_used(change, arguments, node_count):
    estimator = PyTorch(entry_script="train.py", script_params={"--lr": 1}, arguments=["a"], distributed_backend="gloo")
    change(estimator)
    assert (estimator.job().arguments, estimator.job().node_count) == (arguments, node_count)


def test_job_method_refuses_an_invalid_script_param_added_after_construction():
    estimator = PyTorch(entry_script="train.py", script_params={"--lr": 1})
    estimator.script_params["--sizes"] = [1, 2]
    for _ in range(2):
        with pytest.raises(JobError, match=r"script_params\['--sizes'\]=\[1, 2\] is not a string"):
            estimator.job()


def test_requirements_file_edited_after_construction_is_read_again(tmp_path):
    # In a notebook, users run the cell with the estimator once, correct the file, and run the submitting cell again.
    (tmp_path / "requirements.txt").write_text("einops==0.7\n")
    estimator = PyTorch(str(tmp_path), entry_script="train.py", pip_requirements_file="requirements.txt")
    (tmp_path / "requirements.txt").write_text("einops==0.8\n")
    assert "einops==0.8" in (estimator.job().environment.pip_requirements or "")


def test_override_of_a_parameter_other_than_arguments_inputs_or_script_params_is_refused():
    with pytest.raises(JobError, match="can't override node_count; it can override arguments, inputs, script_params"):
        with_overrides(PyTorch(entry_script="train.py"), {"node_count": 2})


def test_invalid_override_at_submission_is_refused():
    with pytest.raises(JobError, match="is not a dict"):
        with_overrides(PyTorch(entry_script="train.py"), {"script_params": "--lr 2"})


def test_restart_on_exception_without_max_restarts_is_refused():
    job = Estimator(entry_script="train.py", max_restarts=2, restart_on_exception=True).job()
    assert (job.max_restarts, job.restart_on_exception) == (2, True)
    assert not Estimator(entry_script="train.py").job().restart_on_exception
    with pytest.raises(JobError, match="restart_on_exception=True with max_restarts=0"):
        Estimator(entry_script="train.py", restart_on_exception=True)


def test_durations_may_be_written_as_text_or_timedelta() -> None:
    est = Estimator(
        entry_script="train.py",
        max_run_duration_seconds="1-12:00:00",
        grace_period_seconds=dt.timedelta(minutes=2),
    )

    assert (est.job().max_run_duration_seconds, est.job().grace_period_seconds) == (129600.0, 120.0)
    with pytest.raises(JobError, match="max_run_duration_seconds='soon': 'soon' is not a duration"):
        Estimator(entry_script="train.py", max_run_duration_seconds="soon")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("python a.py && echo $RANK", "python a.py && echo $RANK"),
        (["python", "a.py", "--name", "a b", "--rank", "$RANK"], "python a.py --name 'a b' --rank \"$RANK\""),
        (["python", "a.py", "&&", "echo", 5, "it's"], "python a.py && echo 5 'it'\"'\"'s'"),
    ],
    ids=["text", "words", "joined"],
)
def test_a_command_is_run_by_bash(command, line):
    job = Estimator(command=command).job()
    assert (job.entry_script, job.arguments) == ("bash", ("-c", line))


def test_datastore_reference_in_a_command_becomes_an_input():
    reference = DataReference(name="train", sources=(Source(path="/data"),))
    job = Estimator(command=["cat", reference]).job()
    assert job.inputs == (reference,)
    assert job.arguments == ("-c", 'cat "$AZUREML_DATAREFERENCE_train"')


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"command": "ls", "entry_script": "a.py"}, "together with"),
        ({"command": "ls", "arguments": ["x"]}, "together with"),
        ({"command": ""}, "is not a command"),
        ({"command": []}, "is not a command"),
        ({"command": 5}, "is not a command"),
        ({"command": ["ls", None]}, "None"),
    ],
)
def test_invalid_command_is_refused(values, said):
    with pytest.raises(JobError, match=said):
        Estimator(**values)
