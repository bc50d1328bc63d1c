"""Files of run configurations: saved ones can be loaded, and those that the SDK has written as well."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from paceline.compat.azureml.core.conda_dependencies import CondaDependencies
from paceline.compat.azureml.core.runconfig import RunConfiguration
from paceline.compat.azureml.exceptions import UserErrorException


def test_run_configuration_round_trips_through_a_file(tmp_path):
    config = RunConfiguration("train.py", ["--lr", 0.1], "TensorFlow", "ParameterServer")
    config.target, config.node_count, config.max_run_duration_seconds = "cluster", 3, 60
    config.environment.name = "mine"
    config.environment.python.user_managed_dependencies = True
    config.environment.python.conda_dependencies = CondaDependencies.create(pip_packages=["tqdm"])
    config.environment.environment_variables = {"A": "1"}
    config.environment.docker.enabled, config.environment.docker.base_image = True, "mine:1"
    config.mpi.process_count_per_node = 2
    config.tensorflow.worker_count, config.tensorflow.parameter_server_count = 3, 0
    config.pytorch.communication_backend, config.pytorch.process_count = "Gloo", 6
    config.save(str(tmp_path), "cpu")
    found = RunConfiguration.load(str(tmp_path), "cpu")
    assert (tmp_path / ".azureml" / "cpu.runconfig").is_file()
    assert found._saved() == config._saved()
    assert found.tensorflow.parameter_server_count == 0
    dependencies = found.environment.python.conda_dependencies
    assert dependencies is not None
    assert list(dependencies.pip_packages) == ["tqdm"]
    RunConfiguration.delete(str(tmp_path), "cpu")
    with pytest.raises(UserErrorException, match="there is no run configuration"):
        RunConfiguration.load(str(tmp_path), "cpu")


def test_missing_and_empty_keys_of_a_runconfig_file_get_defaults(tmp_path):
    file = tmp_path / "old.runconfig"
    file.write_text(
        "script: train.py\narguments:\ntarget: ''\nframework: Python\nnodeCount: 2\nmpi:\nhistory: {outputCollection: true}\n"
        "environment:\n  python: {interpreterPath: '', condaDependenciesFile: conda.yml}\n  docker: {baseImage: }\n"
    )
    (tmp_path / "conda.yml").write_text("dependencies: [python=3.8, {pip: [einops]}]\n")
    found, usual = RunConfiguration.load(str(file)), RunConfiguration()
    assert (found.script, found.arguments, found.target, found.node_count) == ("train.py", [], "local", 2)
    assert found.mpi.process_count_per_node == 1
    assert found.environment.python.interpreter_path == "python"
    assert found.environment.environment_variables == usual.environment.environment_variables
    assert found.environment.docker.base_image == usual.environment.docker.base_image
    dependencies = found.environment.python.conda_dependencies
    assert dependencies is not None
    assert list(dependencies.pip_packages) == ["einops"]


def test_yaml_numbers_and_bools_in_names_and_variables_become_text(tmp_path):
    """A name such as 2020 was a number, which ended the submission; variables that were no dict could not be saved."""
    file = tmp_path / "old.runconfig"
    file.write_text("environment:\n  name: 2020\n  environmentVariables: {EPOCHS: 3, FAST: true}\n")
    environment = RunConfiguration.load(str(file)).environment
    assert (environment.name, environment.environment_variables) == ("2020", {"EPOCHS": "3", "FAST": "True"})
    config = RunConfiguration("train.py")
    config.environment.environment_variables = MappingProxyType({"A": "1"})  # type: ignore[assignment]
    config.save(str(tmp_path), "cpu")
    assert RunConfiguration.load(str(tmp_path), "cpu").environment.environment_variables == {"A": "1"}


def test_loading_invalid_yaml_raises_user_error_exception(tmp_path):
    """Regression: YAML's own exception is not a ValueError, so it reached the user instead of a UserErrorException."""
    for name in ("bad.runconfig", "bad.yml"):
        (tmp_path / name).write_text("script: [train.py\n")
    with pytest.raises(UserErrorException, match="can't be read"):
        RunConfiguration.load(str(tmp_path / "bad.runconfig"))
    with pytest.raises(UserErrorException, match="is not YAML"):
        CondaDependencies(str(tmp_path / "bad.yml"))
