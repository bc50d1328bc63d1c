"""Environments under a name, in versions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.environments.environment import Environment
from paceline.errors import EnvironmentSpecError
from tests.helpers import start_python

MINE = Environment(name="mine", pip_packages=["einops"])


@pytest.fixture
def workspace(tmp_path):
    return SimpleNamespace(path=tmp_path / "work space")


def test_registering_an_unchanged_environment_keeps_its_version_and_a_changed_one_gets_a_new_one(workspace):
    assert MINE.register(workspace).version == 1
    assert MINE.register(workspace).version == 1
    changed = replace(MINE, pip_packages=("tqdm",))
    assert changed.register(workspace).version == 2
    assert MINE.register(workspace).version == 3
    assert Environment.get(workspace, "mine") == replace(MINE, version=3)
    assert Environment.get(workspace, "mine", 2) == replace(changed, version=2)


def test_environment_list_has_the_latest_version_of_each_name(workspace):
    assert Environment.list(workspace) == {}
    MINE.register(workspace)
    replace(MINE, layered=True).register(workspace)
    replace(MINE, name="another").register(workspace)
    assert {name: each.version for name, each in Environment.list(workspace).items()} == {"another": 1, "mine": 2}


def test_environment_without_a_name_can_not_be_registered(workspace):
    with pytest.raises(EnvironmentSpecError, match="has no name"):
        Environment(pip_packages=["einops"]).register(workspace)


def test_environment_with_a_secret_is_not_registered(workspace, tmp_path):
    """Regression: a secret in a variable was stored in the workspace's file, and `paceline env list --json` showed the
    secret."""
    for variables in ({"HF_TOKEN": "s3cr3t"}, {"DATABASE": "me:s3cr3t@host/db"}):
        with pytest.raises(EnvironmentSpecError, match=r"looks like a secret.*--env (HF_TOKEN|DATABASE)") as caught:
            Environment(name="mine", environment_variables=variables).register(workspace)
        assert "s3cr3t" not in str(caught.value)
    assert Environment.list(workspace) == {}


def test_get_refuses_an_unknown_environment_name_or_version(workspace):
    MINE.register(workspace)
    with pytest.raises(EnvironmentSpecError, match=r"no environment 'other' is registered in .*There are: mine"):
        Environment.get(workspace, "other")
    with pytest.raises(EnvironmentSpecError, match="has no version 7"):
        Environment.get(workspace, "mine", 7)
    with pytest.raises(EnvironmentSpecError, match="can't be an environment's name"):
        Environment.get(workspace, "../mine")


def test_damaged_environment_record_is_named_in_the_error(workspace):
    MINE.register(workspace)
    (workspace.path / "environments" / "registered" / "mine" / "1.json").write_text("{")
    with pytest.raises(EnvironmentSpecError, match=r"mine/1\.json' is not a registered environment any more"):
        Environment.get(workspace, "mine")


def test_concurrent_registrations_of_an_environment_get_different_versions(workspace):
    code = """
import sys
from pathlib import Path
from types import SimpleNamespace
from paceline.environments.environment import Environment
for number in range(5):
    made = Environment(name="mine", pip_packages=[f"p{sys.argv[2]}-{number}"]).register(SimpleNamespace(path=Path(sys.argv[1])))
    print(made.version)
"""
    processes = [start_python(code, workspace.path, number) for number in range(4)]
    found = [int(line) for process in processes for line in process.communicate(timeout=180)[0].split()]
    assert sorted(found) == list(range(1, 21))
    folder = workspace.path / "environments" / "registered" / "mine"
    assert sorted(os.listdir(folder)) == sorted([".last", *(f"{number}.json" for number in range(1, 21))])


def test_registering_in_an_unwritable_folder_raises_environment_spec_error(workspace):
    workspace.path.parent.mkdir(exist_ok=True)
    workspace.path.write_text("a file")
    with pytest.raises(EnvironmentSpecError, match="could not be registered: Not a directory"):
        MINE.register(workspace)


def test_from_existing_accepts_the_path_of_an_interpreter_or_a_venv(tmp_path):
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", tmp_path / "an env"], check=True)
    python = tmp_path / "an env" / "bin" / "python"
    for given in (python, tmp_path / "an env", str(tmp_path / "an env")):
        found = Environment.from_existing("mine", given)
        # The link is not resolved, because an interpreter belongs to an environment only by its own path.
        assert (found.python, found.user_managed, found.needs_build) == (str(python), True, False)


@pytest.mark.parametrize("name", ["nowhere", "a folder", "a file"])
def test_missing_interpreter_is_refused_by_from_existing(tmp_path, name):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").write_text("")
    with pytest.raises(EnvironmentSpecError, match=f"{name}'"):
        Environment.from_existing("mine", tmp_path / name)
