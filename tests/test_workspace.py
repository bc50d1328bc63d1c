from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline import workspace_dir
from paceline.errors import JobError, RunNotFoundError, WorkspaceError
from paceline.workspace import Experiment, Workspace
from tests.helpers import make_job, write_tree

# --- Where a workspace is


@pytest.mark.promise("workspace-found-variable-configuration-folder")
def test_workspace_is_in_the_working_directory_by_default(tmp_path):
    assert Workspace.from_config().path == tmp_path / ".paceline"


def test_workspace_is_created_on_first_use_with_a_gitignore(tmp_path):
    workspace = Workspace.from_config()
    assert workspace.runs_dir.is_dir()
    assert (tmp_path / ".paceline/.gitignore").read_text() == "*\n"


@pytest.mark.promise("workspace-found-variable-configuration-folder")
def test_workspace_variable_overrides_the_configuration(tmp_path, monkeypatch):
    write_tree(tmp_path, {"paceline.toml": '[workspace]\npath = "team"\n'})
    monkeypatch.setenv("PACELINE_WORKSPACE", str(tmp_path / "mine"))
    assert Workspace.from_config().path == tmp_path / "mine"


def test_empty_workspace_variable_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_WORKSPACE", "")
    assert Workspace.from_config().path == tmp_path / ".paceline"


def test_tilde_in_the_workspace_variable_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PACELINE_WORKSPACE", "~/ws")
    assert Workspace.from_config().path == tmp_path / "home/ws"


@pytest.mark.promise("workspace-found-variable-configuration-folder")
@pytest.mark.parametrize(
    ("toml", "path"),
    [
        ('[workspace]\npath = "team/ws"\n', "team/ws"),
        ('[workspace]\npath = "../else"\n', "../else"),
        ("", ".paceline"),
        ("[workspace]\n", ".paceline"),
        ("[other]\nx = 1\n", ".paceline"),
    ],
)
def test_workspace_path_is_relative_to_the_folder_of_the_configuration_file(tmp_path, monkeypatch, toml, path):
    write_tree(tmp_path, {"a/paceline.toml": toml, "a/b/c/x": "", "paceline.toml": '[workspace]\npath = "far"\n'})
    monkeypatch.chdir(tmp_path / "a/b/c")
    assert Workspace.from_config().path == Path(f"{tmp_path}/a/{path}").resolve()


def test_configuration_given_as_a_file_or_folder_determines_the_workspace(tmp_path, monkeypatch):
    write_tree(tmp_path, {"conf/paceline.toml": '[workspace]\npath = "ws"\n'})
    monkeypatch.setenv("PACELINE_WORKSPACE", "elsewhere")
    assert Workspace.from_config("conf/paceline.toml").path == tmp_path / "conf/ws"
    assert Workspace.from_config(tmp_path / "conf").path == tmp_path / "conf/ws"


def test_missing_configuration_file_is_refused_and_no_workspace_is_created(tmp_path):
    with pytest.raises(WorkspaceError, match=r"missing\.toml"):
        Workspace.from_config("missing.toml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("workspace = [", "can't be read"),
        ("workspace = 5\n", "workspace=5 is not a table"),
        ('[workspace]\npth = "x"\n', "[workspace] has one key, path; found pth"),
        ('path = "x"\n', "outside of [workspace]"),
        ("[workspace]\npath = 5\n", "workspace.path=5 is not a path"),
        ('[workspace]\npath = ""\n', "workspace.path='' is not a path"),
        (b"\xff\xfe", "can't be read"),
    ],
)
def test_invalid_configuration_file_is_named_in_the_error(tmp_path, toml, said):
    write_tree(tmp_path, {"paceline.toml": toml})
    with pytest.raises(WorkspaceError) as refused:
        Workspace.from_config()
    assert said in str(refused.value)
    assert "paceline.toml" in str(refused.value)


def test_workspace_folder_that_cannot_be_created_is_refused(tmp_path):
    write_tree(tmp_path, {"file": ""})
    with pytest.raises(WorkspaceError, match=r"file.*can't be made.*PACELINE_WORKSPACE"):
        Workspace(tmp_path / "file")


@pytest.mark.parametrize(("path", "name"), [("team/.paceline", "team"), ("team/ws", "ws")])
def test_workspace_is_named_after_its_folder(tmp_path, path, name):
    assert Workspace(tmp_path / path).name == name


def test_handles_of_one_workspace_are_equal(tmp_path):
    one, other = Workspace(tmp_path / "ws"), Workspace("ws")
    assert one == other
    assert len({one, other, Workspace("else")}) == 2
    assert eval(repr(one)) == one


# --- Experiments of a workspace


@pytest.mark.parametrize("name", ["digits", "a", "9", "Digits_2-b", "x" * 200])
def test_experiment_accepts_a_name_of_letters_digits_dashes_and_underscores(tmp_path, name):
    assert Experiment(Workspace("ws"), name).name == name


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "_a", "-a", ".a", "a.b", "ü", "a\n", "x" * 201, None, 5])
def test_invalid_experiment_name_is_refused(tmp_path, name):
    with pytest.raises(WorkspaceError, match="starts with a letter or digit") as refused:
        Experiment(Workspace("ws"), name)
    assert repr(name) in str(refused.value)


def test_experiments_are_equal_by_workspace_and_name():
    workspace = Workspace("ws")
    assert Experiment(workspace, "a") == Experiment(Workspace("ws"), "a")
    assert len({Experiment(workspace, "a"), Experiment(workspace, "a"), Experiment(workspace, "b")}) == 2


def test_the_workspace_lists_experiments_that_have_a_run():
    workspace = Workspace("ws")
    assert workspace.experiments == {}
    for name in ("b", "a", "b"):
        Experiment(workspace, name).start_logging().complete()
    assert workspace.experiments == {"a": Experiment(workspace, "a"), "b": Experiment(workspace, "b")}


def test_the_workspace_finds_a_run_by_the_beginning_of_its_id():
    workspace = Workspace("ws")
    run = Experiment(workspace, "a").start_logging()
    run.complete()
    found = workspace.get_run(run.id[:-3])
    assert (found.id, found.experiment.name) == (run.id, "a")


def test_looking_up_an_unknown_run_raises_lookup_error():
    with pytest.raises(RunNotFoundError, match="no run 'a_1'"):
        Workspace("ws").get_run("a_1")


# --- Submission of jobs


@pytest.mark.parametrize("config", ["train.py", None, {"entry_script": "train.py"}, Workspace])
def test_submitting_a_non_estimator_is_refused(config):
    with pytest.raises(
        JobError, match=r"can't submit a .*Submit an Estimator, PyTorch, TensorFlow, SKLearn, Job, Sweep or Pipeline"
    ):
        Experiment(Workspace("ws"), "a").submit(config)


def test_submitting_a_job_without_a_source_directory_raises_job_error():
    with pytest.raises(JobError, match="source_directory"):
        Experiment(Workspace("ws"), "a").submit(make_job())


def test_folder_with_source_files_is_refused_as_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / ".git").mkdir()
    with pytest.raises(WorkspaceError, match=r"\(\.git, train\.py\), among which .* such as '.*/\.paceline'"):
        Workspace(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "train.py"]
    # A folder that is a workspace stays one, whatever files it gets.
    (tmp_path / "runs").mkdir()
    Workspace(tmp_path)


# --- Workspaces of other users


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A folder with a workspace and a configuration, which belong to another user than this one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    top = tmp_path / "scratch"
    (top / ".paceline").mkdir(parents=True)
    (top / "mine").mkdir()
    monkeypatch.setattr(workspace_dir.os, "geteuid", lambda: os.stat(tmp_path).st_uid)
    os.chown(top / ".paceline", 12345, -1)
    return top


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to another user")


@pytest.mark.promise("workspace-configuration-above-belongs-another")
@needs_root
def test_workspace_of_another_user_is_refused_until_it_is_trusted(foreign, monkeypatch):
    monkeypatch.chdir(foreign)
    with pytest.raises(WorkspaceError, match=r"belongs to user 12345.*paceline trust .*\.paceline"):
        Workspace.from_config(create=False)
    # A workspace that the user's own variable names is trusted.
    monkeypatch.setenv("PACELINE_WORKSPACE", str(foreign / ".paceline"))
    assert Workspace.from_config(create=False).path == foreign / ".paceline"
    monkeypatch.delenv("PACELINE_WORKSPACE")
    workspace_dir.trust(foreign / ".paceline")
    assert Workspace.from_config(create=False).path == foreign / ".paceline"


@pytest.mark.promise("workspace-configuration-above-belongs-another")
@needs_root
def test_configuration_of_another_user_is_ignored_until_trusted(foreign, monkeypatch, capsys):
    (foreign / "paceline.toml").write_text('[workspace]\npath = "planted"')
    (foreign / "config.json").write_text('{"workspace_name": "a driver of the Azure SDK has"}')
    os.chown(foreign / "paceline.toml", 12345, -1)
    os.chown(foreign / "config.json", 12345, -1)
    monkeypatch.chdir(foreign / "mine")
    assert Workspace.from_config(create=False).path == foreign / "mine" / ".paceline"
    assert "belongs to user 12345 and is passed over" in capsys.readouterr().err
    workspace_dir.trust(foreign)
    assert Workspace.from_config(create=False).path == foreign / "planted"


@needs_root
def test_trust_list_owned_by_another_user_is_ignored(foreign, monkeypatch):
    monkeypatch.chdir(foreign)
    workspace_dir.trust(foreign / ".paceline")
    os.chown(foreign.parent / "config/paceline/trusted", 12345, -1)
    with pytest.raises(WorkspaceError, match="belongs to"):
        Workspace.from_config(create=False)


def test_trusting_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(WorkspaceError, match="is not a folder"):
        workspace_dir.trust(tmp_path / "none")
