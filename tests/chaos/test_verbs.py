"""SIGKILL and full disks at each step of delete, restore, import and `paceline.init`.

A child process is killed before its n-th change of the file system, for every third n until the verb comes to its end, and for
every n with `make chaos`. In a round with a full disk, the n-th change and all later ones fail instead.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import paceline
from paceline.errors import PacelineError
from paceline.runs import read, series, states, store, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.runs.removal import NEW
from paceline.runs.search.index import find_runs
from paceline.system.files import names_in
from paceline.trackers.imports import import_runs
from tests.helpers import RUN_ID, make_run
from tests.trackers.imports.stores import mlflow_lines, mlflow_run

#: The audit events of changes in the file system are in CHANGES. Of these, NEED_SPACE has the changes that fail on a
#: full disk.
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime"}
NEED_SPACE = {"os.mkdir", "os.link", "os.symlink"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
TRIALS = [f"{RUN_ID}_1", f"{RUN_ID}_2"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def interrupted(work: Callable[[], object], step: int, *, is_full: bool = False) -> bool:
    """Run `work` in a child that is killed at this step, or whose disk is full from there on.

    Return whether the child has come so far.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.addaudithook(_Hook(step, writer, is_full=is_full))
            work()
            code = 0
        except (PacelineError, OSError):
            # These exceptions report a full disk. Any other exception is a defect.
            code = 0 if is_full else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        came = bool(pipe.read())
    status = os.waitpid(pid, 0)[1]
    assert (os.WIFSIGNALED(status) and came and not is_full) or os.WEXITSTATUS(status) == 0
    return came


class _Hook:
    """An audit hook that counts changes of the file system."""

    def __init__(self, step: int, writer: int, *, is_full: bool) -> None:
        self._left, self._writer, self._is_full = step, writer, is_full

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        is_write = event == "open" and isinstance(args[2], int) and bool(args[2] & WRITES)
        if not is_write and event not in (NEED_SPACE if self._is_full else CHANGES):
            return
        self._left -= 1
        if self._left == 0:
            os.write(self._writer, b"x")
        if self._left <= 0 and self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def content(folder: RunFolder, *ours: str) -> dict[str, str]:
    """Return a digest of each file of a run, without locks and files whose name begins with `ours`."""
    ours = (folder.lock.name, "notes.lock", *ours)
    files = [path for path in sorted(folder.path.rglob("*")) if path.is_file() and not path.name.startswith(ours)]
    return {str(path.relative_to(folder.path)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def ended(workspace: Path, run_id: str, **values: object) -> RunFolder:
    folder, fd = make_run(workspace / "runs", run_id, states.COMPLETED, **values)
    (folder.outputs / "model").write_text(run_id)
    tags_and_properties.set_tags(folder.notes, {"team": "vision"})
    os.close(fd)
    return folder


def steps(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Yield the number of each round, from 1, and a workspace of its own."""
    for step in range(1, 500, 1 if os.environ.get("PACELINE_PROOF") else 3):
        workspace = tmp_path / f"w{step}"
        (workspace / "runs").mkdir(parents=True)
        yield step, workspace
    pytest.fail("the verb has no end")


def places(workspace: Path) -> dict[str, dict[str, str]]:
    """Return the content of each run, which is in the list or in the trash."""
    folders = [RunFolder(workspace / "runs" / run_id) for run_id in store.ids(workspace / "runs")]
    folders += [run.folder for run in trash.deleted(workspace)]
    assert len({folder.run_id for folder in folders}) == len(folders)
    return {folder.run_id: content(folder, "deleted.json", ".deleted.json.") for folder in folders}


def left_over(workspace: Path) -> list[str]:
    return [name for top in ("runs", "trash") for name in names_in(workspace / top) if name.startswith(".")]


@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "full disk"])
def test_sweep_keeps_all_files_if_its_deletion_or_restore_is_interrupted(tmp_path: Path, is_full: bool) -> None:
    for step, workspace in steps(tmp_path):
        runs_dir, sweep = workspace / "runs", ended(workspace, RUN_ID)
        folders = [sweep, *(ended(workspace, trial, parent_run_id=RUN_ID) for trial in TRIALS)]
        whole = {folder.run_id: content(folder) for folder in folders}
        came = interrupted(partial(trash.delete, runs_dir, [sweep]), step, is_full=is_full)
        assert places(workspace) == whole
        if store.ids(runs_dir):
            trash.delete(runs_dir, [RunFolder(runs_dir / run_id) for run_id in store.ids(runs_dir)])
        assert store.ids(runs_dir) == []
        came |= interrupted(partial(trash.restore, workspace, RUN_ID), step, is_full=is_full)
        assert places(workspace) == whole
        for run in trash.deleted(workspace):
            trash.restore(workspace, run.run_id) if trash.find(workspace, run.run_id) else None
        assert (sorted(store.ids(runs_dir)), places(workspace)) == (sorted(whole), whole)
        assert left_over(workspace) == []
        if not came:
            return


def test_deletion_killed_at_any_step_leaves_the_run_whole_or_gone(tmp_path: Path) -> None:
    for step, workspace in steps(tmp_path):
        folder = ended(workspace, RUN_ID)
        whole = content(folder)
        trash.delete(workspace / "runs", [folder])
        (run,) = trash.deleted(workspace)
        came = interrupted(partial(trash.purge, run), step)
        assert list(places(workspace).values()) in ([], [whole])
        trash.expire(workspace)
        assert left_over(workspace) == []
        if not came:
            return


@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "full disk"])
def test_mlflow_import_interrupted_at_any_step_is_completed_by_the_next_import(tmp_path: Path, is_full: bool) -> None:
    old = tmp_path / "mlruns"
    mlflow_run(
        old,
        "aa",
        metrics={"loss": mlflow_lines(1.0, 0.5)},
        params={"lr": "0.1"},
        tags={"team": "vision"},
        files={"model/weights.txt": "weights", "log.txt": "done"},
    )
    mlflow_run(old, "bb", tags={"mlflow.parentRunId": "aa"}, metrics={"loss": mlflow_lines(2.0)})
    import_runs("mlflow", old, workspace=tmp_path / "whole")
    whole = _imported(tmp_path / "whole")
    for step, workspace in steps(tmp_path):
        came = interrupted(partial(import_runs, "mlflow", old, workspace=workspace), step, is_full=is_full)
        # Every run that is listed must be complete, although the next import has not yet imported the other runs.
        there = set(store.ids(workspace / "runs"))
        for facts in find_runs(workspace / "runs"):
            there.discard(facts.run_id)
            if not is_full:
                assert (facts.status, facts.metrics["loss"].count) == (states.COMPLETED, 2 - bool(facts.parent))
        assert there == set()
        import_runs("mlflow", old, workspace=workspace)
        assert _imported(workspace) == whole
        assert left_over(workspace) == []
        if not came:
            return


def _imported(workspace: Path) -> dict[str, object]:
    """Return the values, files and notes of each imported run."""
    found: dict[str, object] = {}
    for run_id in store.ids(workspace / "runs"):
        folder = RunFolder(workspace / "runs" / run_id)
        files = {name: digest for name, digest in content(folder).items() if name.startswith("outputs")}
        values = {name: one.values for name, one in series.read(folder.metrics).items()}
        notes = tags_and_properties.read(folder.notes)
        found[run_id] = (values, files, notes.tags, notes.properties, notes.name, read.record(folder).status)
    return found


@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "full disk"])
def test_paceline_init_that_is_killed_or_meets_a_full_disk_leaves_a_readable_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    def program() -> None:
        os.chdir(tmp_path)
        paceline.init({"lr": 0.1}, tags={"team": "vision"})
        paceline.log({"loss": 0.5})
        paceline.finish()

    for step, workspace in steps(tmp_path):
        monkeypatch.setenv("PACELINE_WORKSPACE", str(workspace))
        came = interrupted(program, step, is_full=is_full)
        facts = find_runs(workspace / "runs")
        assert len(facts) == len(store.ids(workspace / "runs"))
        assert all(one.is_terminal for one in facts)
        assert [one.status for one in facts if not came] in ([], [states.COMPLETED])
        # A killed start leaves a hidden folder, which is not a run. Commands that list runs remove such a folder an
        # hour later.
        assert all(name.startswith(NEW) for name in left_over(workspace))
        assert not interrupted(program, 10_000)
        assert states.COMPLETED in [one.status for one in find_runs(workspace / "runs")]
        if not came:
            return
