from __future__ import annotations

import pytest

from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.core.runconfig import MpiConfiguration
from paceline.compat.azureml.exceptions import TrainingException, UserErrorException
from paceline.compat.azureml.submission import prepared
from paceline.compat.azureml.train.estimator import Estimator, Gloo, Mpi, ParameterServer, PyTorch, SKLearn, TensorFlow


def found(ws, estimator):
    return prepared(estimator.script_run_config(ws), ws)


def test_pytorch_estimator_of_the_2018_documentation_runs_without_gpus(ws):
    """As the SDK's own page had it, with a datastore itself among its parameters, on a machine without GPUs."""
    estimator = PyTorch(
        source_directory="./src",
        compute_target="local",
        entry_script="train.py",
        script_params={"--data_dir": ws.get_default_datastore(), "--epochs": 30, "--verbose": ""},
        node_count=2,
        process_count_per_node=1,
        distributed_backend="mpi",
        use_gpu=True,
    )
    made = found(ws, estimator)
    job = made.job
    assert (job.node_count, job.process_count_per_node, job.distributed_backend, job.framework) == (
        2,
        1,
        "mpi",
        "pytorch",
    )
    words = ("--data_dir", "$AZUREML_DATAREFERENCE_workspaceblobstore", "--epochs", "30", "--verbose")
    assert job.arguments == words
    if not job.use_gpu:
        assert "run on its CPUs" in made.notes[0]


def test_script_params_of_submit_override_those_of_the_estimator(ws):
    estimator = Estimator("src", compute_target="local", entry_script="train.py", script_params={"--a": 1, "--b": 2})
    assert found(ws, estimator.with_overrides(script_params={"--b": 3})).job.arguments == ("--a", "1", "--b", "3")
    assert found(ws, estimator).job.arguments == ("--a", "1", "--b", "2")
    with pytest.raises(UserErrorException, match="node_count"):
        estimator.with_overrides(node_count=2)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (PyTorch, {"distributed_training": MpiConfiguration(2)}, ("mpi", 1, 2)),
        (Estimator, {"distributed_training": Mpi(2), "node_count": 2}, ("mpi", 2, 2)),
        (PyTorch, {"distributed_backend": "gloo", "node_count": 2}, ("gloo", 2, 1)),
        (PyTorch, {"distributed_training": Gloo(), "node_count": 2}, ("gloo", 2, 1)),
        (TensorFlow, {"distributed_training": ParameterServer(2, 1), "node_count": 2}, ("ps", 2, 1)),
    ],
    ids=["configuration", "Mpi", "gloo", "Gloo", "ps"],
)
def test_distribution_options_set_backend_and_counts(ws, kind, options, expected):
    job = found(ws, kind("src", compute_target="local", entry_script="train.py", **options)).job
    assert (job.distributed_backend, job.node_count, job.process_count_per_node) == expected


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (PyTorch, {"compute_target": None}, "compute target or vm size"),
        (PyTorch, {"node_count": 0, "distributed_backend": "mpi"}, "node_count=0"),
        (PyTorch, {"node_count": 2}, "need distributed_backend"),
        (PyTorch, {"distributed_backend": "ps"}, "ps"),
        (SKLearn, {"distributed_backend": "mpi"}, "mpi"),
        (PyTorch, {"distributed_backend": "mpi", "distributed_training": Mpi()}, "use only one"),
        (PyTorch, {"user_managed": True, "pip_packages": ["x"]}, "user_managed"),
        (PyTorch, {"environment_definition": Environment("x"), "pip_packages": ["x"]}, "says it all"),
        (PyTorch, {"environment_definition": Environment("x"), "use_gpu": True}, "says it all"),
        (PyTorch, {"use_docker": False, "custom_docker_image": "x"}, "use_docker=False"),
        (PyTorch, {"conda_dependencies_file": "x.yml", "pip_packages": ["x"]}, "into the file"),
        (PyTorch, {"script_params": ["--x"]}, "not a dict"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_estimator_refuses_invalid_options(ws, kind, options, said):
    with pytest.raises(TrainingException, match=said):
        kind("src", **{"compute_target": "local", "entry_script": "train.py", **options})


def test_estimator_with_an_unknown_parameter_raises_type_error():
    with pytest.raises(TypeError, match="'epochs'"):
        PyTorch("src", compute_target="local", epochs=3)


def test_packages_are_accepted_in_every_parameter_spelling(ws, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/reqs.txt").write_text("einops==0.8.0\n# no\n")
    for name in ("pip_requirements_file", "pip_requirements_file_path"):
        estimator = PyTorch(
            "src", compute_target="local", entry_script="t.py", pip_packages=["tqdm"], **{name: "reqs.txt"}
        )
        assert set(found(ws, estimator).job.environment.pip_packages) >= {"einops==0.8.0"}
    assert PyTorch.get_supported_versions()
    assert PyTorch("src", compute_target="local", entry_script="t.py").conda_dependencies is not None
