"""Which workspace a command means: PACELINE_WORKSPACE, the nearest paceline.toml, or ./.paceline."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import read, states, store
from paceline.runs.record import utc_now
from paceline.services.record import DesiredState, ServiceRecord
from paceline.system.files import write_json
from paceline.workspace import Workspace
from tests.cli.conftest import Cli
from tests.helpers import make_run, write_tree


def folder_of(cli: Cli, cwd: Path | None = None, **env: str) -> Path:
    """The workspace in which a run lands."""
    cli("run", "-q", cli.folder / cli.script(""), cwd=cwd, env=env)
    (state,) = cli.folder.rglob("state.json")
    return state.parent.parent.parent


def test_workspace_is_created_in_the_working_directory_by_default(cli: Cli) -> None:
    (cli.folder / "here").mkdir()

    assert folder_of(cli, cli.folder / "here") == cli.folder / "here" / ".paceline"
    assert (cli.folder / "here" / ".paceline" / ".gitignore").read_text() == "*\n"


def test_nearest_configuration_sets_the_workspace_of_subfolders(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text('[workspace]\npath = "team runs"\n')
    (cli.folder / "deep" / "er").mkdir(parents=True)

    assert folder_of(cli, cli.folder / "deep" / "er") == cli.folder / "team runs"


def test_paceline_toml_without_a_path_sets_the_workspace_to_the_default_folder_next_to_the_file(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text("")
    (cli.folder / "deep").mkdir()

    assert folder_of(cli, cli.folder / "deep") == cli.folder / ".paceline"


def test_workspace_variable_overrides_the_configuration(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text('[workspace]\npath = "configured"\n')

    assert folder_of(cli, PACELINE_WORKSPACE=str(cli.folder / "named")) == cli.folder / "named"


def test_empty_workspace_variable_is_ignored(cli: Cli) -> None:
    assert folder_of(cli, PACELINE_WORKSPACE="") == cli.folder / ".paceline"


def test_invalid_paceline_toml_is_refused_with_its_path(cli: Cli) -> None:
    (cli.folder / "paceline.toml").write_text("path = [\n")
    done = cli("list", code=2)

    assert f"'{cli.folder / 'paceline.toml'}' can't be read: " in done.stderr
    assert "Fix it or remove it." in done.stderr


def test_paceline_command_started_by_a_script_uses_the_workspace_of_the_scripts_run(cli: Cli) -> None:
    # The script runs in a copy of its source folder, deep inside the workspace.
    script = cli.script(
        f"""
        import subprocess
        subprocess.run([{cli.argv()[0]!r}, "list"], check=True)
        """
    )
    done = cli("run", "-q", script)

    assert [line.split()[0] for line in done.stdout.splitlines()] == ["RUN", *cli.run_ids()]


@pytest.fixture
def planted(cli: Cli) -> Path:
    """The folder `evil`, with a workspace whose records name a program that notes its calls in `ran`."""
    program = cli.folder / "program"
    program.write_text(f"#!/bin/sh\necho $0 >>{cli.folder}/ran\n")
    program.chmod(0o755)
    workspace = Workspace(cli.folder / "evil/.paceline")
    owner = {**store.owner(), "python": str(program)}
    kinds: dict[str, dict[str, Any]] = {"sweep": {"sweep": {"policy": None}}, "pipeline": {"pipeline": {"steps": []}}}
    for kind, said in kinds.items():
        run_id = f"{kind}_1700000000_00000001"
        _, fd = make_run(workspace.runs_dir, run_id, states.RUNNING, kind=kind, owner=owner, **said)
        os.close(fd)
    folder, fd = make_run(workspace.runs_dir, "far_1700000000_00000001", states.RUNNING, target="lab")
    os.close(fd)
    write_json(folder.engine, {"engine": "slurm", "job_id": "1", "mirrored": True})
    settings = {"login": "head", "folder": "/scratch", "ssh_options": [f"ProxyCommand={program}"]}
    lab = {"name": "lab", "kind": "slurm", "settings": settings}
    write_json(folder.target, lab)
    write_tree(workspace.path, {"compute/lab.json": json.dumps(lab)})
    record = ServiceRecord(name="web", created_utc=utc_now(), since_utc=utc_now(), owner=owner)
    write_tree(
        workspace.path / "services/web",
        {"service.json": json.dumps(record.to_json()), "wanted.json": json.dumps(DesiredState(serial=1).to_json())},
    )
    write_tree(cli.folder / "evil", {"train.py": ""})
    return cli.folder / "evil"


SHOWING = [
    *(["list"], ["list", "--json"], ["status", "far_"], ["show", "sweep_"], ["show", "far_"], ["logs", "far_"]),
    *(["metrics", "far_"], ["files", "far_"], ["service", "list"], ["service", "show", "web"]),
]
ACTING = [
    *(["run", "train.py"], ["submit", "train.py"], ["cancel", "far_"], ["exec", "far_", "--", "ls"], ["rm", "far_"]),
    *(["rerun", "far_"], ["stacks", "far_"], ["service", "stop", "web"], ["ui"], ["compute", "list"]),
    *(["sweep", "stop", "sweep_"], ["prune", "--yes"], ["env", "build", "--pip", "six"]),
]


@pytest.mark.promise("workspace-came-archive-clone-copy")
def test_runs_of_a_copied_workspace_are_shown_without_starting_programs_named_in_its_records(
    cli: Cli, planted: Path
) -> None:
    # Regression: records in an unpacked workspace named programs as interpreter and ProxyCommand, and `paceline list`
    # ran both programs.
    shutil.copytree(planted, cli.folder / "unpacked", symlinks=True)
    for words in SHOWING:
        done = cli(*words, cwd=cli.folder / "unpacked")
        assert "NotResponding" in done.stdout or "paceline trust" not in done.stdout
    assert "paceline trust" in cli("status", "far_", cwd=cli.folder / "unpacked").stdout
    for words in ACTING:
        assert "you have not made the workspace" in cli(*words, cwd=cli.folder / "unpacked", code=2).stderr
    assert not (cli.folder / "ran").exists()

    # After `paceline trust` the planted programs are started, which shows that the planted records are valid.
    cli("trust", cli.folder / "unpacked/.paceline")
    cli("list", cwd=cli.folder / "unpacked")
    assert (cli.folder / "ran").exists()


@pytest.mark.promise("workspace-came-archive-clone-copy")
@pytest.mark.parametrize("moved", ["another/name", "renamed"])
def test_runs_start_in_the_workspace_of_a_moved_project_but_rm_is_refused_in_a_copied_workspace(
    cli: Cli, moved: str
) -> None:
    (cli.folder / "project").mkdir()
    cli("run", "-q", cli.folder / cli.script(""), cwd=cli.folder / "project")
    (cli.folder / moved).parent.mkdir(exist_ok=True)
    (cli.folder / "project").rename(cli.folder / moved)
    cli("run", "-q", cli.folder / "src/train.py", cwd=cli.folder / moved)
    # A copy of a trusted workspace is a different folder, so it is not trusted.
    shutil.copytree(cli.folder / moved, cli.folder / "copy", symlinks=True)
    assert "an archive, a clone or a copy" in cli("rm", "train", cwd=cli.folder / "copy", code=2).stderr
    # A workspace that the user names in PACELINE_WORKSPACE is trusted.
    cli("list", cwd=cli.folder / "copy", env={"PACELINE_WORKSPACE": ".paceline"})
    cli("run", "-q", cli.folder / "src/train.py", cwd=cli.folder / "copy", env={"PACELINE_WORKSPACE": ".paceline"})


def test_run_in_a_workspace_that_this_user_has_not_used_yet_needs_the_variable_paceline_workspace(cli: Cli) -> None:
    cli("run", "-q", cli.script(""))
    fresh = {"XDG_STATE_HOME": str(cli.folder / "fresh")}
    assert "PACELINE_WORKSPACE" in cli("run", "src/train.py", env=fresh, code=2).stderr
    cli("run", "-q", "src/train.py", env={**fresh, "PACELINE_WORKSPACE": str(cli.folder / ".paceline")})


def test_run_succeeds_without_a_writable_state_folder_in_a_new_workspace_or_one_set_by_a_variable(cli: Cli) -> None:
    (cli.folder / "file").touch()
    nowhere = {"XDG_STATE_HOME": str(cli.folder / "file")}
    cli("run", "-q", cli.script(""), env=nowhere)
    assert "Completed" in cli("list", env=nowhere).stdout
    cli("run", "-q", "src/train.py", env={**nowhere, "PACELINE_WORKSPACE": ".paceline"})


@pytest.mark.promise("looking-group-s-workspace-starts")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to another user")
def test_run_records_of_another_user_are_shown_without_starting_the_programs_that_they_name(
    cli: Cli, planted: Path
) -> None:
    # Regression: a member of a group stored a record that named a program as the run's interpreter. Each other user who
    # listed the group's runs then started this program.
    records = [
        *planted.rglob("job.json"),
        *planted.rglob("state.json"),
        *planted.rglob("target.json"),
        *planted.rglob("service.json"),
    ]
    for record in records:
        os.chown(record, 12345, -1)
    for words in SHOWING:
        cli(*words, cwd=planted)
    assert "another user" in cli("exec", "far_", "--", "ls", cwd=planted, code=1).stderr
    read.request_cancel(store.find(planted / ".paceline/runs", "far_"), by="a member")
    assert not (cli.folder / "ran").exists()
    for record in records:
        os.chown(record, 0, -1)
    cli("list", cwd=planted)
    assert (cli.folder / "ran").exists()
