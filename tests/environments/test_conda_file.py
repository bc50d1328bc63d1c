"""conda's environment.yml."""

from __future__ import annotations

import pytest

from paceline.environments.environment import Environment
from paceline.errors import EnvironmentSpecError
from tests.helpers import write_tree

FILE = """
name: ignored
prefix: /ignored
channels:
  - conda-forge
  - ./local channel
dependencies:
  - python=3.11
  - numpy >=2
  - pip:
      - einops
      - -r more.txt
      - --extra-index-url https://host/simple
variables:
  LEVEL: 3
"""


def test_a_file_becomes_an_environment(tmp_path):
    write_tree(tmp_path, {"environment.yml": FILE, "more.txt": "tqdm\n-c limits.txt\n", "limits.txt": "tqdm<5\n"})
    assert Environment.from_conda_specification("mine", tmp_path / "environment.yml") == Environment(
        name="mine",
        conda_packages=["python=3.11", "numpy >=2"],
        conda_channels=["conda-forge", str(tmp_path / "local channel")],
        pip_requirements="einops\ntqdm\n--extra-index-url https://host/simple\n",
        pip_constraints=["tqdm<5"],
        environment_variables={"LEVEL": "3"},
    )


def test_pip_packages_alone_need_no_conda(tmp_path):
    (tmp_path / "e.yml").write_text("dependencies: [{pip: [einops]}]")
    found = Environment.from_conda_specification("mine", tmp_path / "e.yml")
    assert (found.uses_conda, found.needs_build) == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no packages"),
        ("name: x", "names no packages"),
        ("- a\n- b", "names no packages"),
        ("dependencies: [a", "is not YAML"),
        ("dependencies: numpy", "dependencies is 'numpy', not a list"),
        ("dependencies: [3.11]", "dependencies has 3.11"),
        ("dependencies: [{conda: [a]}]", r"dependencies has \{'conda'"),
        ("dependencies: [{pip: einops}]", r"dependencies has \{'pip'"),
        ("dependencies: [{pip: [3]}]", "under pip has 3"),
        ("dependencies: [{pip: [a b]}]", r"e\.yml, pip: 'a b': 'a b' is not a requirement"),
        ("dependencies: [a]\nchannels: conda-forge", "channels is 'conda-forge', not a list"),
        ("dependencies: [a]\nchannels: [3]", "channels has 3"),
        ("dependencies: [a]\nchanels: [x]", r"has \['chanels'\]; known are"),
        ("dependencies: [a]\nvariables: [x]", "variables is not a mapping"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_entry(tmp_path, text, message):
    (tmp_path / "e.yml").write_text(text)
    with pytest.raises(EnvironmentSpecError, match=message) as caught:
        Environment.from_conda_specification("mine", tmp_path / "e.yml")
    assert "e.yml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        EnvironmentSpecError, match=r"the conda environment file '.*nowhere.yml' can't be read: No such file"
    ):
        Environment.from_conda_specification("mine", tmp_path / "nowhere.yml")
