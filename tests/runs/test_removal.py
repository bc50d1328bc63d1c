from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import RunNotFoundError, RunStateError
from paceline.runs import remote_status, removal, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.run import Run
from paceline.system import files
from paceline.workspace import Experiment, Workspace
from tests.helpers import RUN_ID, make_run, write_tree


def ended(runs_dir: Path, run_id: str = RUN_ID, **values) -> RunFolder:
    folder, fd = make_run(runs_dir, run_id, states.COMPLETED, **values)
    os.close(fd)
    return folder


def test_ended_run_is_removed_with_all_its_files(tmp_path):
    runs_dir = tmp_path / "runs"
    scratch = tmp_path / "tmp" / RunFolder(runs_dir / RUN_ID).scratch.name
    folder = ended(runs_dir, scratch_dir=str(scratch))
    write_tree(folder.path, {"outputs/locked/deep/model.pt": b"1", "secrets.json": b"{}", "notes.jsonl": b""})
    write_tree(tmp_path, {f"tmp/{scratch.name}/socket": b"", "elsewhere/data": b"stays"})
    scratch.parent.chmod(0o1777)
    (folder.outputs / "link").symlink_to(tmp_path / "elsewhere")
    (folder.outputs / "locked/deep").chmod(0o500)
    (folder.outputs / "locked").chmod(0o500)
    runs_dir.chmod(0o755)
    removal.remove(folder)

    assert list(runs_dir.iterdir()) == []
    assert not scratch.exists()
    assert (tmp_path / "elsewhere/data").read_bytes() == b"stays"
    assert runs_dir.stat().st_mode & 0o777 == 0o755
    with pytest.raises(RunNotFoundError):
        removal.remove(folder)


@pytest.mark.promise("folders-record-names-only-scratch")
@pytest.mark.parametrize(
    "forged", ["of another name", "a link", "not in a temporary folder", "a file", "of another user"]
)
@pytest.mark.parametrize("removes", [removal.remove, store.remove_scratch])
def test_removal_keeps_a_folder_that_a_forged_run_record_names_as_its_scratch_folder(
    tmp_path, monkeypatch, forged, removes
):
    # Regression: `paceline rm` removed any folder that the record of a foreign run named as its scratch folder.
    name = RunFolder(tmp_path / RUN_ID).scratch.name
    top = tmp_path / "tmp"
    scratch = top / ("thesis" if forged == "of another name" else name)
    write_tree(tmp_path, {"mine/data": b"stays"})
    top.mkdir()
    top.chmod(0o755 if forged == "not in a temporary folder" else 0o1777)
    if forged == "a link":
        scratch.symlink_to(tmp_path / "mine")
    elif forged == "a file":
        scratch.touch()
    else:
        (tmp_path / "mine").rename(scratch)
    folder = ended(tmp_path / "runs", scratch_dir=str(scratch))
    if forged == "of another user":
        user = os.geteuid()
        monkeypatch.setattr(store.os, "geteuid", lambda: user + 1)
    removes(folder) if removes is removal.remove else removes(folder, store.stored(folder))
    assert os.path.lexists(scratch)
    assert forged == "a file" or [path.read_bytes() for path in tmp_path.rglob("data")] == [b"stays"]


def test_removal_of_a_running_run_is_refused_with_the_cancel_command(tmp_path):
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING)
    with pytest.raises(RunStateError, match=rf"is Running.*End it first: paceline cancel --wait {RUN_ID}"):
        removal.remove(folder)
    with pytest.raises(RunStateError):
        removal.remove(folder, force=True)
    os.close(fd)
    assert folder.state.exists()


def test_removal_of_a_locked_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(removal, "_LOCK_S", 0.05)
    folder, fd = make_run(tmp_path / "runs", status=states.COMPLETED)
    with pytest.raises(RunStateError, match="another process works on run"):
        removal.remove(folder)
    os.close(fd)
    removal.remove(folder)


def test_abandoned_run_is_ended_and_removed(tmp_path):
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING)
    os.close(fd)
    removal.remove(folder)
    assert not folder.path.exists()


def test_run_whose_engine_does_not_answer_is_removed_only_by_force(tmp_path, monkeypatch):
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING, owner={"host": "head", "pid": 1})
    os.close(fd)
    folder.engine.write_text('{"engine": "slurm", "job_id": "1"}')

    class Silent:
        def look(self, folder, record):
            return remote_status.JobStatus(state=remote_status.UNREACHABLE, message="slurmctld does not answer")

    monkeypatch.setattr(remote_status, "teller", lambda folder: Silent())
    with pytest.raises(RunStateError, match=r"may still run: slurmctld does not answer.*cancel --force"):
        removal.remove(folder)
    removal.remove(folder, force=True)
    assert store.ids(tmp_path / "runs") == []


@pytest.mark.promise("removal-killed-leaves-nothing-half")
def test_killed_removal_of_a_run_is_completed_by_the_next_cleanup_of_the_runs_folder(tmp_path):
    runs_dir = tmp_path / "runs"
    folder = ended(runs_dir)
    code = """
import sys, time, pathlib
from paceline.runs import removal
from paceline.runs.folder import RunFolder
def stop(path):
    (path / "state.json").unlink()
    print("half", flush=True)
    time.sleep(600)
removal.remove_tree = stop
removal.remove(RunFolder(pathlib.Path(sys.argv[1])))
"""
    with subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        assert store.ids(runs_dir) == []
        removal.sweep(runs_dir)
        assert len(list(runs_dir.iterdir())) == 1, "whoever removes it is let alone while it lives"
        process.send_signal(signal.SIGKILL)
    removal.sweep(runs_dir)
    assert list(runs_dir.iterdir()) == []


def test_old_folders_left_by_killed_submissions_are_deleted_unless_their_lock_is_held(tmp_path):
    runs_dir = tmp_path / "runs"
    for name in (".new-fresh", ".new-old", ".new-held", ".new-empty"):
        (runs_dir / name).mkdir(parents=True)
    for name in (".new-fresh", ".new-old", ".new-held"):
        (runs_dir / name / "lock").touch()
    fd = removal.locks.take(runs_dir / ".new-held/lock")
    for name in (".new-old", ".new-held", ".new-empty"):
        os.utime(runs_dir / name, (1, 1))
    removal.sweep(runs_dir)
    assert sorted(path.name for path in runs_dir.iterdir()) == [".new-fresh", ".new-held"]
    assert fd is not None
    os.close(fd)
    removal.sweep(tmp_path / "none")


def test_removing_a_run_with_files_of_another_user_raises_but_the_run_is_no_longer_listed(tmp_path, monkeypatch):
    folder = ended(tmp_path / "runs")

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path / "outputs/theirs"))

    monkeypatch.setattr(removal, "remove_tree", fail)
    with pytest.raises(RunStateError, match=r"are another user's, and stay: Permission denied: '.*outputs/theirs'"):
        removal.remove(folder)
    assert store.ids(tmp_path / "runs") == []


# --- Removal by the handle of a run


def test_delete_removes_the_run_and_optionally_its_children(tmp_path):
    experiment = Experiment(Workspace(tmp_path), "digits")
    folder = ended(tmp_path / "runs")
    child = ended(tmp_path / "runs", "digits_1700000001_00000002", parent_run_id=RUN_ID)
    ended(tmp_path / "runs", "digits_1700000002_00000003", parent_run_id=child.run_id)
    other = ended(tmp_path / "runs", "digits_1700000003_00000004")
    run = Run(experiment, folder.run_id)
    with pytest.raises(RunStateError, match="has 2 child runs"):
        run.delete()
    run.delete(children=True)
    assert store.ids(tmp_path / "runs") == [other.run_id]
    with pytest.raises(RunNotFoundError):
        run.record()


def test_nothing_is_deleted_if_a_child_run_is_running(tmp_path):
    experiment = Experiment(Workspace(tmp_path), "digits")
    folder = ended(tmp_path / "runs")
    _, fd = make_run(tmp_path / "runs", "digits_1700000001_00000002", states.RUNNING, parent_run_id=RUN_ID)
    with pytest.raises(RunStateError, match="is Running"):
        Run(experiment, folder.run_id).delete(children=True)
    assert len(store.ids(tmp_path / "runs")) == 2
    os.close(fd)


# --- Sizes of folders


def test_size_of_a_folder_counts_hard_linked_files_once(tmp_path):
    write_tree(tmp_path / "tree", {"a": b"12345", "b/c": b"123"})
    os.link(tmp_path / "tree/a", tmp_path / "tree/b/again")
    (tmp_path / "tree/link").symlink_to("/")
    assert files.tree_size(tmp_path / "tree") == 8
    assert files.tree_size(tmp_path / "none") == 0


def test_remove_tree_removes_a_folder_a_file_or_a_symlink_but_not_the_target_of_the_symlink(tmp_path):
    write_tree(tmp_path, {"tree/a/b": b"", "file": b"", "other/c": b""})
    (tmp_path / "link").symlink_to("other")
    for name in ("tree", "file", "link", "none"):
        files.remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_notebook_repr_of_a_run_is_escaped(tmp_path):
    folder, fd = make_run(tmp_path / "runs")
    record = store.stored(folder)
    report = store.FailureReport(cause="exception", message="<script>alert(1)</script>\x1b[2J")
    store.change(folder, record, states.FAILED, failure=report, ended_utc=record.created_utc)
    os.close(fd)
    run = Run(Experiment(Workspace(tmp_path), "digits"), folder.run_id)
    run.display_name = "<b>name"
    shown = run._repr_html_()

    assert "<script>" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in shown
    assert f"&lt;b&gt;name ({RUN_ID})" in shown
    assert ">Failed</b>" in shown
    assert folder.path.as_uri() in shown
    run.delete()
    assert "no readable record" in run._repr_html_()
