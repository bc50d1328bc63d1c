"""The trash: a deleted run moves as a whole, comes back as a whole, and goes for good after a week."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from paceline.errors import PacelineError, RunNotFoundError, RunStateError
from paceline.pruning import PrunePolicy, prune
from paceline.pruning.snapshots import unused
from paceline.runs import read, states, store, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.runs.run import Run
from paceline.workspace import Experiment, Workspace
from tests.helpers import RUN_ID, make_run

TRIALS = [f"{RUN_ID}_1", f"{RUN_ID}_2"]


def ended(workspace: Path, run_id: str = RUN_ID, **values: object) -> RunFolder:
    folder, fd = make_run(workspace / "runs", run_id, states.COMPLETED, **values)
    os.close(fd)
    return folder


def deleted_ids(workspace: Path) -> list[str]:
    return [run.run_id for run in trash.deleted(workspace)]


def age(workspace: Path, run_id: str, time_utc: object) -> None:
    mark = RunFolder(workspace / "trash" / run_id).deleted
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "time_utc": time_utc}))


def test_deleted_run_is_restored_with_all_its_files_and_its_state(tmp_path: Path) -> None:
    folder = ended(tmp_path)
    (folder.outputs / "model").write_bytes(b"1")
    tags_and_properties.set_name(folder.notes, "display_name", "best")
    before = sorted(path.name for path in folder.path.iterdir())
    assert trash.delete(folder.path.parent, [folder]) == [RUN_ID]
    assert store.ids(tmp_path / "runs") == []
    (run,) = trash.deleted(tmp_path)
    assert (run.name, run.with_run) == ("best", RUN_ID)
    assert run.deleted_by
    assert run.kept_until_utc > run.deleted_utc
    with pytest.raises(RunNotFoundError):
        trash.delete(folder.path.parent, [folder])
    assert trash.restore(tmp_path, "best") == [folder]
    assert sorted(path.name for path in folder.path.iterdir()) == before
    assert (folder.outputs / "model").read_bytes() == b"1"
    assert read.record(folder).status == states.COMPLETED
    assert trash.deleted(tmp_path) == []


def test_restoring_a_sweep_restores_only_the_trials_that_were_deleted_with_it(tmp_path: Path) -> None:
    sweep = ended(tmp_path)
    for trial in TRIALS:
        ended(tmp_path, trial, parent_run_id=RUN_ID)
    other = ended(tmp_path, "digits_1700000003_00000004")
    alone = RunFolder(tmp_path / "runs" / TRIALS[0])
    trash.delete(tmp_path / "runs", [alone])
    # The second trial is named twice, by its sweep and by itself, and is moved once.
    moved = trash.delete(tmp_path / "runs", [sweep, RunFolder(tmp_path / "runs" / TRIALS[1])])
    assert moved == [TRIALS[1], RUN_ID]
    assert store.ids(tmp_path / "runs") == [other.run_id]
    # The trial that was deleted separately stays deleted.
    assert [folder.run_id for folder in trash.restore(tmp_path, RUN_ID)] == [RUN_ID, TRIALS[1]]
    assert deleted_ids(tmp_path) == [TRIALS[0]]


def test_deleting_a_sweep_with_a_running_trial_is_refused_with_the_cancel_command(tmp_path: Path) -> None:
    sweep = ended(tmp_path)
    _, fd = make_run(tmp_path / "runs", TRIALS[0], states.RUNNING, parent_run_id=RUN_ID)
    with pytest.raises(RunStateError, match=f"paceline cancel --wait {TRIALS[0]}"):
        trash.delete(tmp_path / "runs", [sweep])
    assert len(store.ids(tmp_path / "runs")) == 2
    assert trash.deleted(tmp_path) == []
    os.close(fd)


def test_deleting_an_ended_trial_of_a_running_sweep_is_refused(tmp_path: Path) -> None:
    _, fd = make_run(tmp_path / "runs", RUN_ID, states.RUNNING, kind="sweep", sweep={})
    trial = ended(tmp_path, TRIALS[0], parent_run_id=RUN_ID)
    with pytest.raises(RunStateError, match=f"belongs to the sweep {RUN_ID}, which is Running"):
        trash.delete(tmp_path / "runs", [trial])
    assert trial.path.is_dir()
    os.close(fd)
    # A child can be deleted although its parent was removed.
    alone = ended(tmp_path, "digits_1700000003_00000004", parent_run_id="digits_1600000000_00000001")
    assert trash.delete(tmp_path / "runs", [alone]) == [alone.run_id]


@pytest.mark.parametrize("purger", ["delete", "prune"])
def test_next_delete_or_prune_purges_runs_that_were_deleted_more_than_a_week_ago(tmp_path: Path, purger: str) -> None:
    old, new = ended(tmp_path), ended(tmp_path, "digits_1700000003_00000004")
    trash.delete(tmp_path / "runs", [old, new])
    age(tmp_path, old.run_id, "2026-01-01T00:00:00.000Z")
    if purger == "prune":
        prune(tmp_path, PrunePolicy(), dry_run=True)
        assert len(deleted_ids(tmp_path)) == 2
        prune(tmp_path, PrunePolicy())
    else:
        trash.delete(tmp_path / "runs", [])
    assert deleted_ids(tmp_path) == [new.run_id]
    assert os.listdir(tmp_path / "trash") == [new.run_id]


@pytest.mark.parametrize("time_utc", [None, 7, "soon", "9999-12-31T23:59:59Z", ["x"], "2026-01-01T00:00:00"])
def test_run_with_a_damaged_deletion_time_is_kept_in_the_trash(tmp_path: Path, time_utc: object) -> None:
    trash.delete(tmp_path / "runs", [ended(tmp_path)])
    age(tmp_path, RUN_ID, time_utc)
    trash.expire(tmp_path)
    assert deleted_ids(tmp_path) == [RUN_ID]
    RunFolder(tmp_path / "trash" / RUN_ID).deleted.write_text("{")
    assert deleted_ids(tmp_path) == [RUN_ID]
    assert len(trash.restore(tmp_path, RUN_ID)) == 1


def test_delete_refuses_a_symlinked_run_folder_and_the_trash_ignores_symlinks(tmp_path: Path) -> None:
    elsewhere = ended(tmp_path / "other")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / RUN_ID).symlink_to(elsewhere.path)
    with pytest.raises(RunStateError, match=r"is a link to .* the trash keeps folders only"):
        trash.delete(tmp_path / "runs", [RunFolder(tmp_path / "runs" / RUN_ID)])
    (tmp_path / "trash").mkdir(exist_ok=True)
    (tmp_path / "trash" / RUN_ID).symlink_to(elsewhere.path)
    assert deleted_ids(tmp_path) == []
    assert trash.find(tmp_path, RUN_ID) is None
    assert elsewhere.path.is_dir()


def test_snapshot_of_a_deleted_run_is_listed_as_unused_only_after_the_run_is_purged(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / ("ab" * 32)
    snapshot.mkdir(parents=True)
    os.utime(snapshot, (1, 1))
    folder = ended(tmp_path, snapshot_id=snapshot.name)
    trash.delete(tmp_path / "runs", [folder])
    assert unused(tmp_path) == []
    trash.purge(trash.deleted(tmp_path)[0])
    assert [name for name, _ in unused(tmp_path)] == [snapshot.name]


def test_restore_of_a_missing_ambiguous_or_existing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="in the trash, which keeps deleted runs for 7 days"):
        trash.restore(tmp_path, RUN_ID)
    trash.delete(tmp_path / "runs", [ended(tmp_path), ended(tmp_path, "digits_1700000003_00000004")])
    with pytest.raises(RunNotFoundError, match="2 deleted runs are called 'digits'"):
        trash.restore(tmp_path, "digits")
    ended(tmp_path)
    with pytest.raises(RunStateError, match="there is a run of this id"):
        trash.restore(tmp_path, RUN_ID)
    # Delete a second run of this id, such as a trial that its sweep has started again. Only the later one is kept.
    trash.delete(tmp_path / "runs", [RunFolder(tmp_path / "runs" / RUN_ID)])
    assert sorted(deleted_ids(tmp_path)) == sorted([RUN_ID, "digits_1700000003_00000004"])


def test_concurrent_deletions_and_renames_of_one_run_leave_it_restorable(tmp_path: Path) -> None:
    folder = ended(tmp_path)
    outcomes: list[object] = []

    def attempt() -> None:
        try:
            outcomes.append(trash.delete(tmp_path / "runs", [folder]))
        except PacelineError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    while folder.path.exists():
        try:
            tags_and_properties.set_name(folder.notes, "display_name", "late")
        except FileNotFoundError:
            break
    for thread in threads:
        thread.join()
    assert outcomes.count([RUN_ID]) == 1
    assert outcomes.count(RunNotFoundError) == 3
    assert deleted_ids(tmp_path) == [RUN_ID]
    (restored,) = trash.restore(tmp_path, RUN_ID)
    assert read.record(restored).status == states.COMPLETED


def test_workspace_lists_and_restores_deleted_runs(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with Experiment(workspace, "digits").start_logging() as run:
        run.log("loss", 0.5)
    run.delete()
    assert [deleted.run_id for deleted in workspace.deleted_runs] == [run.id]
    (restored,) = workspace.restore(run.id)
    assert isinstance(restored, Run)
    restored.delete(purge=True)
    assert workspace.deleted_runs == []
