"""The folder of a checkpoint is complete or absent, whenever who writes it is killed. Needs no torch."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.parallel.errors import ParallelError
from tests.late import late

NAMES = ("plain", "with space", "täglich\n2", "'a\"=0\"'", "step_3", ".hidden", "-rf")

folders = late("paceline.parallel.checkpoint.folder")


def write(path: Path, text: str) -> Any:
    """A save of which everything is written, but for its name."""
    saving = folders.Saving(path)
    (saving.folder / "part").write_text(text)
    (saving.folder / ".metadata").write_text("")
    return saving


def text_at(path: Path) -> str | None:
    found = folders.find(path)
    return None if found is None else (found / "part").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_folder_exists_only_after_its_commit(tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep" / name
    saving = write(path, "1")
    assert text_at(path) is None
    saving.commit()
    assert text_at(path) == "1"
    assert os.listdir(path.parent) == [name]
    assert sorted(os.listdir(path)) == [".metadata", "part"]


def test_committed_checkpoint_replaces_the_former_one(tmp_path: Path) -> None:
    for text in "123":
        saving = write(tmp_path / "a", text)
        assert text_at(tmp_path / "a") == (None if text == "1" else str(int(text) - 1))
        saving.commit()
    assert text_at(tmp_path / "a") == "3"
    assert os.listdir(tmp_path) == ["a"]


def test_abandoned_checkpoint_leaves_the_committed_one_and_no_other_files(tmp_path: Path) -> None:
    write(tmp_path / "a", "1").commit()
    write(tmp_path / "a", "2").abandon()
    assert text_at(tmp_path / "a") == "1"
    assert os.listdir(tmp_path) == ["a"]


def calls_of_a_save(monkeypatch: pytest.MonkeyPatch, path: Path) -> int:
    """How many changes a save makes to the file system, which is how often it can be killed between two."""
    return len(traced(monkeypatch, lambda: write(path, "2").commit(), None))


CHANGES = ("mkdir", "rename", "unlink", "rmdir", "open", "fsync")


def traced(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], die_before: int | None) -> list[str]:
    """The changes that the action makes; before the `die_before`-th this process is killed."""
    done: list[str] = []

    def wrap(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            if len(done) == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(name)
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, wrap(name))
        action()
    return done


@pytest.mark.promise("checkpoint-complete-absent-whoever-killed")
def test_kill_at_any_point_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "count" / "a", "1").commit()
    count = calls_of_a_save(monkeypatch, tmp_path / "count" / "a")
    assert count > 8
    seen = []
    for number in range(count):
        path = tmp_path / str(number) / "a"
        write(path, "1").commit()
        pid = os.fork()
        if pid == 0:
            traced(monkeypatch, lambda path=path: write(path, "2").commit(), number)  # type: ignore[misc]
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"before change {number} of {count} it was to be killed"
        seen.append(text_at(path))
        assert seen[-1] in ("1", "2")
        # The next save succeeds and removes all remains, including an old folder without a lock.
        for left in path.parent.iterdir():
            os.utime(left, (0, 0))
        write(path, "3").commit()
        assert text_at(path) == "3"
        assert os.listdir(path.parent) == ["a"]
    assert seen == sorted(seen), "once it is there, it stays"
    assert set(seen) == {"1", "2"}


def test_running_save_of_another_process_is_not_removed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from paceline.parallel.checkpoint.folder import Saving\n"
        "saving = Saving(Path(sys.argv[1])); print(saving.folder.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        write(tmp_path / "b", "1").commit()
        assert sorted(os.listdir(tmp_path)) == [name, "b"]
        other.kill()
    write(tmp_path / "b", "2").commit()
    assert os.listdir(tmp_path) == ["b"]


def test_cleanup_removes_only_folders_of_interrupted_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCKED_WITHIN_S", 600.0)
    for name in ("step_1.saving-01234567", ".a.saving-0123", ".a.saving-0123456g", ".a"):
        (tmp_path / name).mkdir()
    (tmp_path / ".b.saving-01234567").mkdir()
    os.utime(tmp_path / ".b.saving-01234567", (0, 0))
    (tmp_path / ".b.saving-89abcdef").mkdir()
    write(tmp_path / "c", "1").commit()
    assert sorted(os.listdir(tmp_path)) == [
        *(".a", ".a.saving-0123", ".a.saving-0123456g"),
        *(".b.saving-89abcdef", "c", "step_1.saving-01234567"),
    ]


@pytest.mark.parametrize("kind", ["file", "link to nothing", "folder with files"])
def test_path_that_is_no_checkpoint_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link to nothing":
        path.symlink_to("nothing")
    else:
        path.mkdir()
        (path / "mine").write_text("")
    with pytest.raises(ParallelError, match="is there and is not a checkpoint"):
        folders.Saving(path)
    assert os.listdir(tmp_path) == ["a"]


def test_newest_checkpoint_has_the_highest_step(tmp_path: Path) -> None:
    assert folders.newest(tmp_path / "none") is None
    assert folders.newest(tmp_path) is None
    for step in (9, 10, 2):
        write(folders.step_path(tmp_path, step), str(step)).commit()
    (tmp_path / "step_11").mkdir()
    (tmp_path / "step_x").mkdir()
    assert folders.newest(tmp_path) == tmp_path / "step_10"


def test_checkpoint_interrupted_before_its_rename_is_found(tmp_path: Path) -> None:
    """Killed between two renames: the former has been moved aside, the new one has no name yet."""
    write(folders.step_path(tmp_path, 4), "4").commit()
    os.rename(tmp_path / "step_4", tmp_path / ".step_4.former")
    assert folders.newest(tmp_path) == tmp_path / "step_4"
    assert text_at(tmp_path / "step_4") == "4"


def test_checkpoint_folder_is_locked_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    saving = write(tmp_path / "a", "1")
    fd = os.open(saving.folder / "lock", os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
        saving.abandon()


def test_missing_checkpoint_dir_environment_variable_raises_parallel_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ParallelError, match="PACELINE_CHECKPOINT_DIR"):
        folders.steps_dir()
    monkeypatch.setenv("PACELINE_CHECKPOINT_DIR", str(tmp_path))
    assert folders.steps_dir() == tmp_path
