from __future__ import annotations

import json

import pytest

import paceline
from paceline import workspace_dir
from paceline.compat.azureml.core.experiment import Experiment
from paceline.compat.azureml.core.workspace import Workspace
from paceline.compat.azureml.exceptions import UserErrorException, WorkspaceException
from paceline.workspace_dir import configured
from tests.helpers import write_tree

NAMES = {"subscription_id": "0-1", "resource_group": "group", "workspace_name": "team"}
CONFIG = json.dumps(NAMES)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_WORKSPACE", raising=False)
    return tmp_path


def names(ws):
    return ws.subscription_id, ws.resource_group, ws.name


@pytest.mark.parametrize("place", ["config.json", ".azureml/config.json", "aml_config/config.json"])
def test_nearest_config_json_selects_the_workspace(here, monkeypatch, place):
    (here / place).parent.mkdir(exist_ok=True)
    (here / place).write_text(json.dumps(NAMES))
    (here / "notebooks/deep").mkdir(parents=True)
    monkeypatch.chdir(here / "notebooks/deep")
    ws = Workspace.from_config()
    assert names(ws) == ("0-1", "group", "team")
    # All folders below the project use the same workspace, as there is one workspace in Azure.
    assert ws.path == here / ".paceline"
    # A run that is looked up by its id also belongs to the named workspace.
    with Experiment(ws, "named").start_logging(snapshot_directory=None, outputs=False) as run:
        assert names(ws.get_run(run.id).experiment.workspace) == names(ws)
    assert repr(ws) == "Workspace.create(name='team', subscription_id='0-1', resource_group='group')"


def test_project_json_of_2018_selects_the_workspace(here):
    (here / "aml_config").mkdir()
    scope = "/subscriptions/0-1/resourceGroups/group/providers/x/workspaces/team/projects/p"
    (here / "aml_config/project.json").write_text(json.dumps({"Scope": scope}))
    assert names(Workspace.from_config()) == ("0-1", "group", "team")


def test_workspace_without_a_config_is_the_local_one(here):
    ws = Workspace.from_config()
    assert all(isinstance(text, str) and text for text in (ws.name, ws.location, ws.subscription_id, ws.resource_group))
    assert ws.path == here / ".paceline"
    assert ws.get_details()["name"] == ws.name


def test_config_json_of_another_program_is_ignored(here):
    (here / "config.json").write_text('{"model": "bert"}')
    assert Workspace.from_config().name == here.name


@pytest.mark.parametrize("content", ["{", "[]", '{"subscription_id": "x"}'])
def test_invalid_config_file_given_by_path_raises_an_error(here, content):
    (here / "my.json").write_text(content)
    with pytest.raises(UserErrorException, match=r"my\.json"):
        Workspace.from_config("my.json")


def test_workspace_requested_by_any_valid_name_is_the_local_workspace_of_this_machine(here):
    named = Workspace("0-1", "group", "corp")
    assert (named.name, named.path) == ("corp", Workspace.get("other").path)
    assert named.get_mlflow_tracking_uri() == f"paceline://{named.path}"
    with pytest.raises(WorkspaceException, match="can't be a workspace's name"):
        Workspace.get("no name!")


def test_created_workspace_is_found_again_until_deleted(here):
    made = Workspace.create(
        "team", subscription_id="0-1", resource_group="group", location="eastus2", show_output=False
    )
    assert names(Workspace("0-1", "group", "team")) == names(made) == names(Workspace.get("team"))
    assert Workspace.get("team").location == "eastus2"
    with pytest.raises(WorkspaceException, match="exists already"):
        Workspace.create("team", show_output=False)
    Workspace.create("team", exist_ok=True, show_output=False)
    made.write_config()
    assert names(Workspace.from_config()) == names(made)
    made.delete()
    assert Workspace.list("0-1") == {}


def test_workspace_attributes_can_be_called_as_in_2018(ws):
    assert ws.compute_targets() == ws.compute_targets == {}
    assert set(ws.datastores) >= {"workspaceblobstore", "workspacefilestore"}
    assert ws.get_default_compute_target("CPU").name == "cpu-cluster"
    assert ws.experiments == {}


def test_secret_files_are_readable_only_by_their_owner(ws):
    vault = ws.get_default_keyvault()
    vault.set_secret("token", "abc")
    assert (vault.get_secret("token"), vault.get_secret("other")) == ("abc", None)
    assert vault.list_secrets() == [{"name": "token"}]
    (file,) = (ws.path / "azureml/secrets").glob("*")
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(UserErrorException, match="letters"):
        vault.set_secret("../x", "abc")
    vault.delete_secret("token")
    assert vault.get_secret("token") is None


def test_setup_and_get_or_create_return_the_workspace(ws):
    assert Workspace.setup().path == ws.path
    made = Workspace._get_or_create("team", subscription_id="s", resource_group="g")
    assert (made.name, made.subscription_id) == ("team", "s")
    assert Workspace._get_or_create(name="team").path == made.path


@pytest.mark.parametrize(
    ("files", "workspace"),
    [
        ({".azureml/config.json": CONFIG}, ".paceline"),
        ({"aml_config/config.json": CONFIG}, ".paceline"),
        ({"config.json": CONFIG}, ".paceline"),
        ({"config.json": CONFIG, "jobs/paceline.toml": ""}, "jobs/.paceline"),
        ({"config.json": CONFIG, "paceline.toml": '[workspace]\npath = "runs"\n'}, "runs"),
        ({"jobs/config.json": CONFIG, "paceline.toml": ""}, ".paceline"),
        ({"config.json": '{"model": 1}'}, "jobs/deep/.paceline"),
        ({}, "jobs/deep/.paceline"),
    ],
    ids=["azureml", "aml_config", "beside", "toml-below", "toml-beside", "toml-above", "of another program", "none"],
)
def test_submission_script_in_a_subfolder_uses_the_same_workspace_as_the_paceline_command(
    here, monkeypatch, files, workspace
):
    """`paceline data add NAME ...`, which an error of the driver recommended, had no effect: it took another folder."""
    write_tree(here, {"jobs/deep/driver.py": "", **files})
    monkeypatch.chdir("jobs/deep")
    expected = here / workspace
    assert configured() == expected
    assert paceline.Workspace.from_config().path == expected
    assert Workspace.from_config().path == Workspace.from_config(path=".").path == Workspace.get("any").path == expected
    monkeypatch.setenv("PACELINE_WORKSPACE", str(here / "named"))
    assert Workspace.from_config().path == configured() == here / "named"


def test_config_json_of_another_user_is_ignored_with_a_hint(here, monkeypatch, capsys):
    write_tree(here, {".azureml/config.json": CONFIG, "jobs/driver.py": ""})
    monkeypatch.chdir("jobs")
    monkeypatch.setattr(workspace_dir, "is_own", lambda path: path.name != "config.json")
    assert Workspace.from_config().path == configured() == here / "jobs" / ".paceline"
    assert f"paceline trust {here}" in capsys.readouterr().err
