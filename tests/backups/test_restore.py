"""What a restore refuses, and that a killed one goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil

import pytest

from paceline.backups import restore as restoring
from paceline.backups.create import create
from paceline.backups.manifest import BackupEntry, from_bytes, is_kept, link_target, to_bytes
from paceline.backups.place import open_backups, place
from paceline.backups.restore import restore, verify
from paceline.errors import DataError
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from tests.backups.conftest import RUN, ended_run, tree
from tests.helpers import make_run

HASH = "5e" * 32


@pytest.fixture
def near(tmp_path):
    return place(str(tmp_path / "near"))


@pytest.mark.promise("hostile-backup-refused")
@pytest.mark.parametrize(
    "entries",
    [
        [BackupEntry("file", "../out", sha256=HASH)],
        [BackupEntry("file", "/etc/passwd", sha256=HASH)],
        [BackupEntry("file", "runs/a/../../../out", sha256=HASH)],
        [BackupEntry("file", ".made-here", sha256=HASH)],
        [BackupEntry("file", "lib/0/paceline/__init__.py", sha256=HASH)],
        [BackupEntry("file", "ui/token", sha256=HASH)],
        [BackupEntry("file", "services/a/service.json", sha256=HASH)],
        [BackupEntry("file", "runs/a/secrets.json", sha256=HASH)],
        [BackupEntry("file", "runs/a/session/key", sha256=HASH)],
        [BackupEntry("file", "runs/.new-a/job.json", sha256=HASH)],
        [BackupEntry("file", "runs", sha256=HASH)],
        [BackupEntry("link", "runs", target="snapshots")],
        [BackupEntry("link", "runs/a/x", target="/etc")],
        [BackupEntry("link", "runs/a/x", target="../../../out")],
        [BackupEntry("link", "runs/a/x", target="../../ui/token")],
        [
            BackupEntry("link", "runs/a/b/c/x", target="../../../.."),
            BackupEntry("link", "runs/a/b/c/y", target="x/../../../etc"),
        ],
        [BackupEntry("link", "runs/a/x", target="../b"), BackupEntry("file", "runs/a/x/evil", sha256=HASH)],
        [BackupEntry("file", "runs/a/x", sha256=HASH), BackupEntry("file", "runs/a/x", sha256=HASH)],
        [BackupEntry("file", "runs/a/x", sha256="../../x")],
        [BackupEntry("file", "runs/a/x", sha256=HASH, size=-1)],
        [BackupEntry("file", "runs/a/x", sha256=HASH, size=True)],
        [BackupEntry("file", "runs/a/x", sha256=HASH, mode=0o4755)],
        [BackupEntry("file", "runs/a/x", sha256=HASH, mtime_ns=1 << 70)],
        [BackupEntry("socket", "runs/a/x")],
        [("file",)],
        [("file", ["runs"])],
        "none",
    ],
    ids=str,
)
def test_restore_refuses_a_backup_whose_file_list_has_an_invalid_entry(filled, near, tmp_path, entries):
    create(filled.path, near)
    data = to_bytes(entries) if isinstance(entries, list) else b'{"entries": 5}'
    sha256 = hashlib.sha256(data).hexdigest()
    (tmp_path / "near/contents" / sha256).write_bytes(data)
    (document,) = (tmp_path / "near/backups").iterdir()
    document.write_text(
        json.dumps({**json.loads(document.read_text()), "manifest": sha256, "manifest_bytes": len(data)})
    )
    before = tree(tmp_path)
    with pytest.raises(DataError):
        restore(filled.path, near, into=tmp_path / "back")
    assert tree(tmp_path) == before, "nothing was written"


def test_symlink_target_is_normalized_or_none_if_the_symlink_points_to_a_file_excluded_from_backups():
    assert link_target("runs/a/snapshot", "../../snapshots/5e") == "../../snapshots/5e"
    assert link_target("runs/a/logs/x", "../attempts/./1/../1/x") == "../attempts/1/x"
    assert link_target("runs/a/x", "../a/session/key") is None
    assert is_kept("snapshots/5e/secrets.json"), "names of a run's own files are free elsewhere"


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../x"},
        {"manifest": "../x"},
        {"files": -1},
        {"version": 2},
        {"host": 5},
        {"id": "20260101T000000Z-00000000"},
    ],
    ids=str,
)
def test_restore_refuses_a_backup_whose_json_description_has_an_invalid_value(filled, near, tmp_path, change):
    create(filled.path, near)
    (document,) = (tmp_path / "near/backups").iterdir()
    document.write_text(json.dumps({**json.loads(document.read_text()), **change}))
    with pytest.raises(DataError):
        restore(filled.path, near, into=tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.promise("damaged-backup-found-and-mended")
def test_restore_refuses_damaged_content_and_the_next_backup_repairs_it(filled, near, tmp_path):
    create(filled.path, near)
    with open_backups(filled.path, near) as backups:
        entries = {entry.name: entry for entry in backups.entries(backups.get(None))}
    content = tmp_path / "near/contents" / entries["data/table.csv"].sha256
    content.write_text("x,y\n")
    assert sorted(verify(filled.path, near)[1]) == ["data/again.csv", "data/table.csv"]
    with pytest.raises(DataError, match=r"'data/(table|again).csv' of backup .* is damaged"):
        restore(filled.path, near, into=tmp_path / "back")
    assert not [name for name in os.listdir(tmp_path / "back") if name != ".restoring"]
    assert create(filled.path, near, verify=True).stored == 1
    assert verify(filled.path, near)[1] == []
    restore(filled.path, near, into=tmp_path / "back")
    assert (tmp_path / "back/data/table.csv").read_text() == "a,b\n"


def test_truncated_file_in_the_backup_store_is_stored_again_by_the_next_backup(filled, near, tmp_path):
    create(filled.path, near)
    largest = max((tmp_path / "near/contents").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, 5)
    assert create(filled.path, near).stored == 1


@pytest.mark.promise("restore-replaces-nothing")
def test_restore_never_replaces_existing_files(filled, near, tmp_path):
    create(filled.path, near)
    before = tree(filled.path)
    with pytest.raises(DataError, match="already, and a restore replaces nothing"):
        restore(filled.path, near)
    assert tree(filled.path) == before
    # In a new workspace that already has datastores/lab.json, a restore keeps this file.
    shutil.move(filled.path, tmp_path / "lost")
    (filled.path / "datastores").mkdir(parents=True)
    (filled.path / "datastores/lab.json").write_text("mine")
    done = restore(filled.path, near)
    assert done.kept == ()
    assert (filled.path / "datastores/lab.json").read_text() == "mine"
    assert (filled.path / f"runs/{RUN}").is_dir()


def test_single_run_is_restored_with_its_children_and_snapshot(filled, near, tmp_path):
    ended_run(filled.path / "runs", f"{RUN}_0")
    other = ended_run(filled.path / "runs", "digits_1700000005_00000005")
    create(filled.path, near)
    before = tree(filled.path)
    for name in (f"runs/{RUN}", f"runs/{RUN}_0", "snapshots/5e"):
        shutil.rmtree(filled.path / name)
    done = restore(filled.path, near, run=RUN)
    files = [name for name, one in before.items() if isinstance(one[0], bytes) and not name.endswith("/lock")]
    assert done.files == len([name for name in files if name.startswith((f"runs/{RUN}", "snapshots/5e"))])
    assert {name for name in before if not name.endswith("/lock")} <= set(tree(filled.path))
    assert other.path.is_dir()
    with pytest.raises(DataError, match="has no run"):
        restore(filled.path, near, run="digits_17")


@pytest.mark.promise("killed-restore-goes-on")
@pytest.mark.parametrize("moved", [0, 1, 4])
def test_restore_interrupted_while_moving_files_is_completed_by_the_next_restore(
    filled, near, tmp_path, monkeypatch, moved
):
    create(filled.path, near)
    real, left = os.rename, [moved]

    def rename(source, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(restoring.os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            restore(filled.path, near, into=tmp_path / "back")
    assert not (tmp_path / "back/runs").exists(), "runs come last"
    monkeypatch.setattr(restoring.Blobs, "fetch", lambda *_: pytest.fail("everything was fetched"))
    restore(filled.path, near, into=tmp_path / "back")
    restore_of = set(tree(tmp_path / "back"))
    with open_backups(filled.path, near) as backups:
        assert {entry.name for entry in backups.entries(backups.get(None))} <= restore_of
    assert ".restoring" not in restore_of


def test_restore_interrupted_after_fetching_is_completed_without_fetching_again(filled, near, tmp_path, monkeypatch):
    create(filled.path, near)
    with monkeypatch.context() as patch:
        patch.setattr(restoring, "_build", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            restore(filled.path, near, into=tmp_path / "back")
    (tmp_path / "near/contents").rename(tmp_path / "near/moved")
    fetched = []
    monkeypatch.setattr(restoring.Blobs, "has", lambda *_: True)
    monkeypatch.setattr(restoring.Blobs, "_job", lambda self, sha256, target: fetched.append(sha256))
    (tmp_path / "near/contents").mkdir()
    with open_backups(filled.path, near) as backups:
        manifest = backups.get(None).manifest
    shutil.copy(tmp_path / "near/moved" / manifest, tmp_path / "near/contents" / manifest)
    restore(filled.path, near, into=tmp_path / "back")
    assert fetched == []
    assert (tmp_path / "back/data/table.csv").read_text() == "a,b\n"


def test_run_backed_up_while_running_is_restored_as_failed_with_the_resume_command(workspace, near, tmp_path):
    run = f"digits_1700000000_{os.urandom(4).hex()}"  # a name of its own, because all tests share the folder of scratch folders
    folder, fd = make_run(workspace.path / "runs", run, states.RUNNING)
    record = store.stored(folder)
    store.replace_state(folder, dataclasses.replace(record, scratch_dir=str(folder.scratch)))
    folder.scratch.mkdir()
    try:
        create(workspace.path, near)
        assert restore(workspace.path, near, into=tmp_path / "back").ended == (run,)
        assert folder.scratch.is_dir(), "the original goes on"
    finally:
        folder.scratch.rmdir()
        os.close(fd)
    restored = store.stored(RunFolder(tmp_path / f"back/runs/{run}"))
    assert (restored.status, restored.failure.see) == ("Failed", f"paceline rerun --resume {run}")
    assert restored.scratch_dir is None


def test_backup_file_list_is_equal_after_encoding_as_bytes_and_decoding():
    entries = [
        BackupEntry("folder", "runs"),
        BackupEntry("file", "runs/a/\udcff", 0o600, 5, 7, HASH, is_shared=True),
        BackupEntry("link", "runs/a/b", target="\udcff"),
    ]
    assert from_bytes(to_bytes(entries), "here") == entries
