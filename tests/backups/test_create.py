"""What a backup has: everything of a workspace but its secrets, sent once, in a valid state while runs go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.backups import create as making
from paceline.backups import manifest
from paceline.backups.create import create
from paceline.backups.place import open_backups, place
from paceline.backups.restore import restore, verify
from paceline.compat.azureml.core.keyvault import Keyvault
from paceline.data.transfer import blobs
from paceline.errors import DataError
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.services import keys
from paceline.services.folder import ServiceFolder
from paceline.system.files import append_line, write_json
from paceline.ui.guard import Token
from tests.backups.conftest import RUN, ended_run, tree
from tests.helpers import make_run, write_tree

LAB = place("lab")


def kept(workspace):
    """The part of the workspace that a backup has."""
    never = ("lock", ".scans", ".parts", ".lock", "lib", ".backup", ".lock-timer", ".made-here", ".gitignore")
    found = tree(workspace.path)
    return {
        name: one
        for name, one in found.items()
        if not (name.endswith(".lock") and not name.startswith("snapshots/")) and name.split("/")[-1] not in never
    }


@pytest.mark.promise("backup-restores-workspace")
def test_restored_workspace_equals_the_original_and_backup_of_unchanged_files_stores_nothing(filled, lab, tmp_path):
    first = create(filled.path, LAB)
    assert first.left_out == ()
    again = create(filled.path, LAB)
    assert (again.stored, again.stored_bytes) == (0, 0)
    assert verify(filled.path, LAB) == (again.backup, [])
    done = restore(filled.path, LAB, into=tmp_path / "back")
    assert (done.ended, done.kept) == ((), ())
    assert tree(tmp_path / "back") == kept(filled)
    blob, version = tmp_path / "back/models/.blobs", tmp_path / "back/models/digits/1"
    linked = {path.stat().st_ino for path in blob.rglob("*") if path.is_file()}
    assert linked <= {path.stat().st_ino for path in version.rglob("*")}, "a model's file has its content once"


def test_each_folder_of_a_workspace_is_in_a_backup_or_left_out_on_purpose():
    """Schedules and templates were missing: their folders are newer than the list of a backup's folders."""
    left_out = {"engines", "lib", "services", "trash", "ui"}
    used = {
        name
        for path in Path(making.__file__).parents[1].rglob("*.py")
        for name in re.findall(r'workspace_dir / "(\w+)"', path.read_text())
    }
    assert used - left_out <= manifest.KEPT.keys() <= used
    assert not left_out & manifest.KEPT.keys()


def test_second_backup_sends_only_changed_files(filled, tmp_path):
    near = place(str(tmp_path / "near"))
    create(filled.path, near)
    (filled.path / "data/table.csv").write_text("a,c\n")
    made = create(filled.path, near)
    assert (made.stored, made.stored_bytes) == (1, 4)


@pytest.mark.promise("backup-has-no-secret")
def test_no_secret_of_a_workspace_is_in_its_backup(filled, tmp_path):
    secret = "s3cr3t-of-the-lab-0123456789"
    folder, fd = make_run(filled.path / "runs", "digits_1700000009_00000009", states.RUNNING)
    write_json(folder.secrets, {"HF_TOKEN": secret})
    for path in (
        folder.exec_key,
        folder.exec_requests / "a/words",
        folder.session / "key",
        folder.path / ".incoming/x",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secret)
    service = ServiceFolder(filled.path / "services/digits")
    service.path.mkdir(parents=True)
    keys.make(service)
    write_tree(service.path, {"revisions/1/revision.json": secret, "server/config.json": secret})
    Keyvault(filled).set_secret("token", secret)
    token = Token(filled.path).text
    found = [secret.encode(), token.encode(), *(key.encode() for key in keys.read(service))]
    assert all(any(one in path.read_bytes() for path in filled.path.rglob("*") if path.is_file()) for one in found)
    create(filled.path, place(str(tmp_path / "near")))
    os.close(fd)
    stored = [path.read_bytes() for path in (tmp_path / "near").rglob("*") if path.is_file()]
    assert len(stored) > 10
    assert not [one for one in found if any(one in content for content in stored)]


@pytest.mark.promise("backup-while-runs-go-on")
def test_backup_made_while_a_run_writes_files_restores_complete_log_lines_and_records(workspace, tmp_path):
    folder, fd = make_run(workspace.path / "runs", RUN, states.RUNNING)
    log, stop = folder.path / "attempts/1/rank_0.log", threading.Event()
    log.parent.mkdir(parents=True)

    def go_on():
        number = 0
        while not stop.is_set():
            number += 1
            append_line(folder.events, {"number": number, "text": "x" * (number % 97)})
            with open(log, "ab", buffering=0) as file:
                file.write(b"half a line, ")
                file.write(b"and its end\n")
            (folder.checkpoints / f"{number}.pt").write_bytes(b"%d" % number)
            (folder.checkpoints / f"{number - 3}.pt").unlink(missing_ok=True)
            record = store.stored(folder)
            store.replace_state(folder, record)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        while not (folder.checkpoints / "9.pt").exists():
            time.sleep(0.001)
        made = [create(workspace.path, place(str(tmp_path / "near"))).backup for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert len({backup.manifest for backup in made}) == 5, "the run went on"
    for number, backup in enumerate(made):
        done = restore(workspace.path, place(str(tmp_path / "near")), backup.id, into=tmp_path / f"back-{number}")
        assert done.ended == (RUN,)
        back = RunFolder(tmp_path / f"back-{number}/runs/{RUN}")
        record = store.stored(back)
        assert (record.status, record.failure.cause) == ("Failed", "restored")
        assert backup.id in record.failure.message
        lines = [json.loads(line) for line in back.events.read_text().splitlines()]
        numbers = [line["number"] for line in lines if "number" in line]
        assert numbers == list(range(1, len(numbers) + 1))
        text = (back.path / "attempts/1/rank_0.log").read_text()
        assert text.splitlines() == ["half a line, and its end"] * text.count("\n")
        assert text.endswith("\n")
        assert list(back.checkpoints.iterdir()), "the removed checkpoints have later ones"
    os.close(fd)
    assert store.stored(folder).status == "Running"


def test_backup_stores_the_newer_checkpoint_if_an_older_one_is_deleted_during_the_backup(
    workspace, tmp_path, monkeypatch
):
    folder, fd = make_run(workspace.path / "runs", RUN, states.RUNNING)
    old, new = folder.checkpoints / "1.pt", folder.checkpoints / "2.pt"
    old.write_text("old")
    real = making._Copy._entry

    def entry(self, name, **how):
        if name.endswith("1.pt"):
            new.write_text("new")
            old.unlink()
        return real(self, name, **how)

    monkeypatch.setattr(making._Copy, "_entry", entry)
    create(workspace.path, place(str(tmp_path / "near")))
    os.close(fd)
    restore(workspace.path, place(str(tmp_path / "near")), into=tmp_path / "back")
    assert [path.name for path in (tmp_path / f"back/runs/{RUN}/checkpoints").iterdir()] == ["2.pt"]


def test_large_file_that_changes_while_it_is_sent_is_never_stored_under_a_wrong_hash(filled, tmp_path, monkeypatch):
    large, real, changes = filled.path / f"runs/{RUN}/outputs/model.pt", blobs.put_files, [b"1", b"2"]

    def put(store, path, files, progress=None, **how):
        if any(file == large for _, file in files) and changes:
            large.write_bytes(changes.pop() * (3 << 20))
        return real(store, path, files, progress, **how)

    monkeypatch.setattr(blobs, "put_files", put)
    create(filled.path, place(str(tmp_path / "near")))
    assert not changes
    assert verify(filled.path, place(str(tmp_path / "near")))[1] == []
    restore(filled.path, place(str(tmp_path / "near")), into=tmp_path / "back")
    assert (tmp_path / f"back/runs/{RUN}/outputs/model.pt").read_bytes() == large.read_bytes()


def test_backup_skips_and_reports_pipes_and_symlinks_to_secrets_or_out_of_the_workspace(filled, tmp_path):
    outputs = filled.path / f"runs/{RUN}/outputs"
    (outputs / "passwords").symlink_to("/etc/passwd")
    (outputs / "page").symlink_to("../../../ui/token")
    (outputs / "here").symlink_to(outputs / "model.pt")
    os.mkfifo(outputs / "pipe")
    made = create(filled.path, place(str(tmp_path / "near")))
    assert [name.rpartition("/")[2] for name, _ in made.left_out] == ["page", "passwords", "pipe"]
    restore(filled.path, place(str(tmp_path / "near")), into=tmp_path / "back")
    assert os.readlink(tmp_path / f"back/runs/{RUN}/outputs/here") == "model.pt"


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.backups.create import create
from paceline.backups.place import place
from paceline.data.transfer import upload
real, left = upload._put_again, int(sys.argv[3])
def put(store, file, path, *rest):
    global left
    real(store, file, path, *rest)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
upload._put_again = put
create(Path(sys.argv[1]), place(sys.argv[2]))
"""


@pytest.mark.promise("killed-backup-is-none")
def test_killed_backup_is_not_listed_and_its_files_are_reused_by_the_next_backup(filled, tmp_path):
    near = tmp_path / "near"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ends = []
    for count in (1, 4, 5, 10_000):
        words = [sys.executable, "-c", KILLED, str(filled.path), str(near), str(count)]
        ends.append(subprocess.run(words, env=environment, check=False).returncode)
        with open_backups(filled.path, place(str(near))) as backups:
            assert len(backups.all()) == (ends[-1] == 0)
    assert ends == [-signal.SIGKILL] * 3 + [0]
    assert verify(filled.path, place(str(near)))[1] == []
    restore(filled.path, place(str(near)), into=tmp_path / "back")
    assert tree(tmp_path / "back") == kept(filled)
    assert not (filled.path / ".backup/copies").exists()


@pytest.mark.promise("backup-removal-keeps-shared-content")
def test_keep_limit_removes_old_backups_but_no_content_that_newer_backups_use(filled, lab, tmp_path):
    first = create(filled.path, LAB)
    table = filled.path / "data/table.csv"
    table.write_text("a,b,c\n")
    second = create(filled.path, LAB, keep=1)
    assert second.removed == (first.backup.id,)
    # Only the first backup's list of files is freed, because the second backup still contains all of the first backup's contents.
    assert second.freed_bytes == first.backup.manifest_bytes
    (filled.path / "data/again.csv").unlink()
    third = create(filled.path, LAB, keep=1)
    assert third.freed_bytes == second.backup.manifest_bytes + len("a,b\n")
    assert verify(filled.path, LAB)[1] == []
    restore(filled.path, LAB, into=tmp_path / "back")
    assert tree(tmp_path / "back") == kept(filled)
    with pytest.raises(DataError, match="there is no backup"):
        restore(filled.path, LAB, first.backup.id, into=tmp_path / "other")


def test_backup_fails_if_a_running_process_holds_the_lock_but_ignores_the_lock_of_an_ended_process(filled, tmp_path):
    near = place(str(tmp_path / "near"))
    create(filled.path, near)
    expected = pytest.raises(DataError, match=rf"pid {os.getpid()} .* works on the backups")
    with open_backups(filled.path, near) as backups, backups.locked(), expected:
        create(filled.path, near)
    lock = tmp_path / "near/lock.json"
    assert not lock.exists()
    with open_backups(filled.path, near) as backups, backups.locked():
        held = json.loads(lock.read_text())
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    lock.write_text(json.dumps({**held, "pid": child.pid}))
    assert create(filled.path, near).stored == 0


def test_removing_a_backup_fails_and_deletes_nothing_if_the_file_list_of_another_backup_is_damaged(filled, tmp_path):
    near = place(str(tmp_path / "near"))
    first = create(filled.path, near).backup
    (filled.path / "data/table.csv").write_text("changed")
    second = create(filled.path, near).backup
    (tmp_path / "near/contents" / first.manifest).write_text("[]")
    before = tree(tmp_path / "near/contents")
    expected = pytest.raises(DataError, match=f"the list of files of backup {first.id} .* is damaged")
    with open_backups(filled.path, near) as backups, backups.locked() as check_lock, expected:
        backups.remove([second], check_lock)
    assert tree(tmp_path / "near/contents") == before


def test_backup_destination_inside_or_above_the_workspace_is_refused(filled):
    for folder, why in (
        (filled.path / "data/backups", "is in the workspace itself"),
        (filled.path.parent, "has the workspace"),
    ):
        with pytest.raises(DataError, match=why):
            create(filled.path, place(str(folder)))
    with pytest.raises(DataError, match="is in the workspace itself"):
        create(filled.path, place("default"))


def test_run_removed_during_a_backup_is_left_out(filled, tmp_path, monkeypatch):
    gone = ended_run(filled.path / "runs", "digits_1700000005_00000005")
    real = making._Copy._entry

    def entry(self, name, **how):
        found = real(self, name, **how)
        if name.endswith("00000005/state.json"):
            os.rename(gone.path, tmp_path / "gone")
        return found

    monkeypatch.setattr(making._Copy, "_entry", entry)
    create(filled.path, place(str(tmp_path / "near")))
    restore(filled.path, place(str(tmp_path / "near")), into=tmp_path / "back")
    assert os.listdir(tmp_path / "back/runs") == [RUN]


def test_run_submitted_during_a_backup_is_left_out_with_its_snapshot_but_a_new_child_is_kept(
    filled, tmp_path, monkeypatch
):
    """The backup had the run, but not the snapshot: it listed the snapshots before, and the runs after the submission."""
    later, child = "digits_1700000005_00000005", f"{RUN}_0"
    real = making._Copy._entry

    def entry(self, name, **how):
        if name == "snapshots/5e/train.py":
            write_tree(filled.path / "snapshots/6f", {"train.py": "print(2)"})
            for run_id, snapshot in ((later, "6f"), (child, "5e")):
                ended_run(filled.path / "runs", run_id).snapshot.symlink_to(f"../../snapshots/{snapshot}")
        return real(self, name, **how)

    monkeypatch.setattr(making._Copy, "_entry", entry)
    create(filled.path, place(str(tmp_path / "near")))
    restore(filled.path, place(str(tmp_path / "near")), into=tmp_path / "back")
    assert {run.name: (run / "snapshot/train.py").is_file() for run in (tmp_path / "back/runs").iterdir()} == {
        RUN: True,
        child: True,
    }


#: Kind of an entry -> a function that makes the entry at a path; or None in the place of a path of a workspace.
MAKE = {
    "file": lambda path, _: path.write_text("x"),
    "file of a far time": lambda path, _: (path.write_text("x"), os.utime(path, (1 << 40, 1 << 40))),
    "file of an old time": lambda path, _: (path.write_text("x"), os.utime(path, (-5, -5))),
    "empty folder": lambda path, _: path.mkdir(),
    "folder": lambda path, _: write_tree(path, {"a": "x", "b/c": "y"}),
    "relative link to a folder": lambda path, top: path.symlink_to(os.path.relpath(top / "snapshots/5e", path.parent)),
    "relative link to a file": lambda path, top: path.symlink_to(
        os.path.relpath(top / "snapshots/5e/train.py", path.parent)
    ),
    "crooked link": lambda path, top: path.symlink_to(
        f"./{os.path.relpath(top, path.parent)}/./snapshots/../snapshots/5e/"
    ),
    "absolute link": lambda path, top: path.symlink_to(top / "snapshots/5e"),
    "link to a top folder": lambda path, top: path.symlink_to(os.path.relpath(top / "snapshots", path.parent)),
    "link to the workspace": lambda path, top: path.symlink_to(os.path.relpath(top, path.parent)),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link to its folder": lambda path, _: path.symlink_to("."),
    "absolute link out": lambda path, _: path.symlink_to("/etc/passwd"),
    "relative link out": lambda path, top: path.symlink_to(os.path.relpath(top.parent / "out", path.parent)),
    "dangling link": lambda path, top: path.symlink_to(os.path.relpath(top / "snapshots/none", path.parent)),
    "dangling link out": lambda path, _: path.symlink_to("/none"),
    "link with odd characters": lambda path, top: path.symlink_to(
        os.path.relpath(top / "snapshots/5e/\n\udcff\\", path.parent)
    ),
    "pipe": lambda path, _: os.mkfifo(path),
}
PLACES = (
    *("templates", "views", "datasets"),
    *("data/new", "environments/registered", "snapshots/new", "models/new", f"runs/{RUN}/outputs/new", "data/in/new"),
    *("data/a\nb", "data/ ", "data/\udcff\udc80", "data/-x\\y*?", "data/é\u202e", "data/.hidden", f"data/{'n' * 255}"),
)


@pytest.mark.parametrize("kind", MAKE)
def test_each_entry_of_a_workspace_is_restored_or_reported_as_left_out(workspace, tmp_path, kind):
    write_tree(workspace.path, {"snapshots/5e/train.py": "print(1)"})
    ended_run(workspace.path / "runs", RUN)
    paths, near = [workspace.path / name for name in PLACES], place(str(tmp_path / "near"))
    for path in paths:
        if path.is_dir():
            path.rmdir()
        path.parent.mkdir(parents=True, exist_ok=True)
        MAKE[kind](path, workspace.path)

    made = create(workspace.path, near)

    assert verify(workspace.path, near)[1] == []
    restore(workspace.path, near, into=tmp_path / "back")
    left_out, back = dict(made.left_out), tmp_path / "back"
    assert left_out.keys() <= {*PLACES}
    inside = [below for path in paths if kind == "folder" for below in path.rglob("*")]
    for path in (*paths, *inside):
        name = path.relative_to(workspace.path).as_posix()
        other = back / name
        if name in left_out:
            assert left_out[name]
            assert not os.path.lexists(other)
        elif path.is_symlink():
            assert os.path.normpath(other.parent / os.readlink(other)).startswith(f"{back}/")
            assert os.path.realpath(other).replace(str(back), str(workspace.path)) == os.path.realpath(path)
        elif path.is_dir():
            assert other.is_dir()
        else:
            assert other.read_text() == path.read_text()
    # Later commands can read the backup too.
    assert create(workspace.path, near, keep=1).removed == (made.backup.id,)
