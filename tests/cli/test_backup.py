"""`paceline backup`: made, listed, verified, restored and removed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, cli

__all__ = ["cli"]


@pytest.mark.promise("backup-restores-workspace")
def test_lost_workspace_is_restored_from_its_backup_by_the_command_line(cli: Cli) -> None:
    cli("run", cli.script("print('one')"))
    (run_id,) = cli.run_ids()
    near = str(cli.folder / "near/backups")
    assert "there is no backup" in cli("backup", "list", near).stdout.lower()
    made = cli.json("backup", "create", near)
    assert (made["removed"], made["left_out"]) == ([], [])
    assert [row["id"] for row in cli.json("backup", "list", near)] == [made["backup"]["id"]]
    assert cli.json("backup", "list", str(cli.folder / "near")) == []
    assert cli.json("backup", "verify", near)["damaged"] == []
    os.rename(cli.folder / ".paceline", cli.folder / "lost")

    told = cli("backup", "restore", near).stdout
    assert "paceline trust" in told
    assert "you have not made the workspace" in cli("run", "src/train.py", code=2).stderr
    cli("trust", ".paceline")
    assert "one" in cli("logs", run_id).stdout
    assert "already, and a restore replaces nothing" in cli("backup", "restore", near, code=2).stderr
    found = cli.json("backup", "restore", near, "--into", "other", "--run", run_id)
    assert (found["folder"], found["ended"]) == (str(cli.folder / "other"), [])
    cli("run", "src/train.py")

    second = cli("backup", "create", near, "--keep", 1).stdout
    assert f"Removed {made['backup']['id']}" in second
    content = cli.folder / "near/backups/contents" / hashlib.sha256(b"print('one')").hexdigest()
    content.write_bytes(b"")
    assert "/train.py\n" in cli("backup", "verify", near, code=1).stdout
    (row,) = cli.json("backup", "list", near)
    assert "name backups to remove, or give --keep N" in cli("backup", "remove", near, code=2).stderr
    assert cli.json("backup", "remove", near, row["id"])["removed"] == [row["id"]]
    assert not list((cli.folder / "near/backups/contents").iterdir())


def test_backup_command_fails_if_the_workspace_or_backup_is_missing_or_the_destination_is_invalid(
    cli: Cli, tmp_path: Path
) -> None:
    assert "there is nothing to back up" in cli("backup", "create", str(tmp_path / "near"), code=2).stderr
    assert "There is none" in cli("backup", "restore", str(tmp_path / "near"), code=2).stderr
    assert "is not a place of backups" in cli("backup", "list", "a b", code=2).stderr
    assert not (tmp_path / ".paceline").exists()
