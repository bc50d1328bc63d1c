from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time

import pytest

from paceline.checkpoint import files
from paceline.checkpoint.files import CheckpointPart
from paceline.errors import CheckpointError


def write(folder, *parts):
    for part in parts:
        files.write_file(folder / part.name, {"$": "dict", "of": []}, [])


def test_checkpoint_is_ignored_until_the_parts_of_all_ranks_exist(tmp_path):
    write(
        tmp_path,
        CheckpointPart(1),
        *(CheckpointPart(2, rank, 3, "aa") for rank in range(3)),
        CheckpointPart(3, 0, 2, "aa"),
        CheckpointPart(3, 1, 2, "bb"),
    )
    (tmp_path / "checkpoint_4.safetensors.bak").write_text("")
    found = files.whole(files.parts_in(tmp_path))
    # Step 3 is missing, because its parts come from two different attempts.
    assert {step: [part.rank for part in parts] for step, parts in found.items()} == {1: [0], 2: [0, 1, 2]}
    assert files.parts_in(tmp_path / "missing") == []


def test_each_rank_removes_its_own_old_checkpoints_and_keeps_the_newest(tmp_path):
    write(
        tmp_path,
        *(CheckpointPart(step, rank, 2, "aa") for step in (1, 2, 3, 4) for rank in range(2)),
        CheckpointPart(5, 0, 2, "aa"),
    )
    files.remove_old(tmp_path, 2, rank=0, size=2)
    assert sorted(part.step for part in files.parts_in(tmp_path) if part.rank == 0) == [3, 4, 5]
    # A later attempt with one rank removes the old files of all ranks.
    write(tmp_path, CheckpointPart(6), CheckpointPart(7))
    files.remove_old(tmp_path, 1, rank=0, size=1)
    assert files.parts_in(tmp_path) == [CheckpointPart(7)]


def test_rank_keeps_its_three_newest_parts_while_parts_of_other_ranks_are_missing(tmp_path):
    write(tmp_path, CheckpointPart(1), *(CheckpointPart(step, 1, 2, "aa") for step in (2, 3, 4, 5)))
    files.remove_old(tmp_path, 1, rank=1, size=2)
    assert sorted(part.step for part in files.parts_in(tmp_path)) == [1, 3, 4, 5]


def test_names_that_no_save_writes_are_ignored(tmp_path):
    write(tmp_path, CheckpointPart(5))
    for name in ("checkpoint_00500", "checkpoint_9.part_7_of_2.aa", "checkpoint_9.part_0_of_0.aa", "checkpoint_\u0669"):
        (tmp_path / f"{name}.safetensors").touch()
    assert files.parts_in(tmp_path) == [CheckpointPart(5)]


def test_checkpoint_is_saved_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    write(tmp_path, CheckpointPart(1))
    assert files.parts_in(tmp_path) == [CheckpointPart(1)]


def test_leftovers_of_killed_saves_are_removed_but_not_running_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCKED_WITHIN_S", 600.0)
    left, held, new = (tmp_path / f".checkpoint_1.safetensors.saving-0000000{n}" for n in range(3))
    left.write_bytes(b"half")
    held.write_bytes(b"half")
    new.touch()
    with open(held) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        files.remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == [held, new]
    os.utime(new, (time.time() - 6000,) * 2)
    files.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"no!"]
)
def test_invalid_checkpoint_file_is_named_in_the_error(tmp_path, data):
    path = tmp_path / CheckpointPart(1).name
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checkpoint_1\.safetensors.*Remove it"):
        files.CheckpointFile(path)


@pytest.mark.parametrize("refuses", ["nothing", "flag", "write"])
@pytest.mark.parametrize("size", [0, 100, 4096, 3 * 4096 + 1])
def test_checkpoint_is_written_completely_even_if_the_file_system_refuses_o_direct(
    tmp_path, monkeypatch, refuses, size
):
    pwrite, calls, pieces = os.pwrite, fcntl.fcntl, []
    monkeypatch.setattr(files, "_LEAST_DIRECT", 0)
    monkeypatch.setattr(files, "_PIECE", 4096)

    def control(fd, command, flags=0):
        if refuses == "flag" and command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return calls(fd, command, flags)

    def write(fd, data, offset):
        if refuses == "write" and calls(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(files.fcntl, "fcntl", control)
    monkeypatch.setattr(os, "pwrite", write)
    memory = mmap.mmap(-1, 1 << 16)
    memory[:size] = bytes(number % 251 for number in range(size))
    files.write_image(tmp_path / "x", memoryview(memory)[:size], lambda: pieces.append(1))
    assert (tmp_path / "x").read_bytes() == memory[:size]
    assert len(pieces) == -(-size // 4096)
    assert os.listdir(tmp_path) == ["x"]


def test_io_error_while_writing_a_checkpoint_with_o_direct_is_raised_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LEAST_DIRECT", 0)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        files.write_image(tmp_path / "x", memoryview(mmap.mmap(-1, 8192)), lambda: None)
    assert os.listdir(tmp_path) == []
