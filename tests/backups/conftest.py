"""Servers of datastores, and a workspace that has something of each kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import paceline as pl
from paceline.data.stores.datastore import Datastore
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.schedules.schedule import Schedule
from tests.data.conftest import (
    OBJECT_STORES,
    OTHER_STORES,
    _azure,
    _gcs,
    _s3,
    bucket,
    s3_once,
    s3_store,
    server_of,
    sshd,
    workspace,
)
from tests.helpers import make_run, write_tree

__all__ = ["_azure", "_gcs", "_s3", "bucket", "s3_once", "sshd", "workspace"]

RUN = "digits_1700000000_00000001"


@pytest.fixture(params=["local", "s3", *OTHER_STORES, "sftp"])
def lab(request, workspace, tmp_path):
    """A store "lab" of each kind."""
    if request.param in OBJECT_STORES:
        server = server_of(request)
        server.bucket(request.getfixturevalue("bucket"))
        return s3_store(workspace, server.url, f"{request.getfixturevalue('bucket')}/team")
    if request.param == "sftp":
        sshd = request.getfixturevalue("sshd")
        return Datastore.register(workspace, "lab", sshd.url(tmp_path / "far"), options=sshd.options())
    return Datastore.register(workspace, "lab", tmp_path / "near")


@pytest.fixture
def filled(workspace, tmp_path):
    """A workspace with an ended run, its snapshot, a model, a dataset, a schedule, a template and data."""
    snapshot = write_tree(
        workspace.path / "snapshots" / "5e", {"train.py": "print(1)", "poetry.lock": "", "sub/a.py": ""}
    )
    folder = ended_run(workspace.path / "runs", RUN)
    folder.snapshot.symlink_to(os.path.relpath(snapshot, folder.path))
    write_tree(
        folder.path, {"outputs/model.pt": os.urandom(3 << 20), "attempts/1/rank_0.log": "one\ntwo\n", "work/left": ""}
    )
    (folder.logs / "rank_0.log").symlink_to("../attempts/1/rank_0.log")
    write_tree(workspace.path, {"data/table.csv": "a,b\n", "data/again.csv": "a,b\n"})
    pl.Model.register(workspace, write_tree(tmp_path / "made", {"weights": b"w" * 2000}), "digits")
    workspace.schedules.save(Schedule(name="nightly", file="/job.yaml", cron="@daily"), ["digits_1_00000001"])
    job = write_tree(tmp_path / "jobs", {"job.yaml": "entry_script: train.py"}) / "job.yaml"
    workspace.templates.save("digits", job)
    pl.Dataset.File.from_files(str(workspace.path / "data" / "table.csv")).register(workspace, "table")
    return workspace


def ended_run(runs_dir: Path, run_id: str) -> RunFolder:
    folder, fd = make_run(runs_dir, run_id)
    store.change(folder, store.stored(folder), states.COMPLETED, exit_code=0)
    os.close(fd)
    return folder


def tree(top: Path) -> dict[str, tuple[bytes | str | None, int | None]]:
    """What a folder has: name -> content of a file, target of a link, None for a folder; and permissions."""
    found: dict[str, tuple[bytes | str | None, int | None]] = {}
    for path in sorted(top.rglob("*")):
        content: bytes | str | None = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        found[path.relative_to(top).as_posix()] = (content, None if path.is_symlink() else path.stat().st_mode)
    return found
