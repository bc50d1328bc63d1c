"""Images of arrays that change while they are taken, by a fork, by a GPU's stream and by a copy."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.checkpoint import image
from paceline.checkpoint.image import Camera
from paceline.checkpoint.values import DenseArray
from tests.late import late

np = late("numpy")


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states are forked too, with any modules loaded in this process."""
    monkeypatch.setattr(image, "_LEAST_FORKED", 0)
    monkeypatch.setattr(image, "_MOST_TIMES", 1 << 40)
    monkeypatch.setattr(image, "_danger", lambda mappings: "")


@contextlib.contextmanager
def stopped_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The child waits before its first copy until the block ends."""
    read, write = os.pipe()
    pwrite, closerange = os.pwrite, os.closerange

    def waits(*given):
        os.read(read, 1)
        return pwrite(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", waits)
        # The child needs this test's pipe. So replace `closerange`, with which the child would close the pipe.
        patch.setattr(os, "closerange", lambda low, high: None)
        yield
    assert closerange is os.closerange
    os.write(write, b"1" * 100)
    os.close(read)
    os.close(write)


def bytes_of(taken):
    taken.wait()
    return bytes(taken.bytes())


def test_checkpoint_copied_by_a_forked_child_excludes_array_changes_made_after_the_fork(forks, monkeypatch):
    array, camera = np.arange(100_000.0), Camera()
    expected = b"head" + array.tobytes()
    with stopped_child(monkeypatch):
        taken = camera.take(b"head", [DenseArray("x", array)], None)
        array += 1
    assert (bytes_of(taken), taken.way) == (expected, "fork")


def test_memory_shared_with_other_processes_is_copied_before_the_fork(forks, monkeypatch):
    shared = np.frombuffer(mmap.mmap(-1, 1 << 16), dtype=np.float64)
    shared[:], own = 7, np.arange(5.0)
    expected = shared.tobytes() + own.tobytes()
    with stopped_child(monkeypatch):
        taken = Camera().take(b"", [DenseArray("shared", shared), DenseArray("own", own)], None)
        shared[:], own[:] = 8, 9
    assert (bytes_of(taken), taken.way) == (expected, "fork")


def test_forked_child_that_copies_a_checkpoint_closes_inherited_descriptors_and_blocks_signals(forks, monkeypatch):
    def notes(fd, view, offset):
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        # `os.listdir` opens this folder to read it, so its result has one more descriptor.
        os.write(fd, json.dumps([sorted(os.listdir("/proc/self/fd")), mask]).encode())
        return len(view)

    monkeypatch.setattr(os, "pwrite", notes)
    camera = Camera()
    taken = camera.take(b"", [DenseArray("x", np.zeros(1))], None)
    taken.wait()
    said, _ = json.JSONDecoder().raw_decode(os.pread(taken.memory.fd, 1000, 0).decode())
    # The child has three open descriptors: the copy of the state, the pipe for the result, and the folder that
    # `listdir` reads.
    assert len(said[0]) == 3
    assert {signal.SIGTERM, signal.SIGINT} <= set(said[1])


def test_forked_child_ends_if_its_parent_has_ended(tmp_path):
    """Regression: the child returned into the training script."""
    pid = os.fork()
    if pid == 0:
        try:
            read, write = os.pipe()
            os.close(read)
            image._copy_and_leave([], os.open(tmp_path, os.O_RDONLY), write, sorted((write - 1, write)), set())
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_checkpoint_is_copied_by_a_fork_in_a_process_with_more_than_1024_open_files(forks):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("needs a limit of 2,000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        array = np.ones(3)
        taken = Camera().take(b"", [DenseArray("x", array)], None)
        assert (bytes_of(taken), taken.way) == (array.tobytes(), "fork")
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_save_raises_if_the_forked_copy_process_is_killed_and_the_next_save_copies_without_a_fork(
    forks, monkeypatch, caplog
):
    camera, array = Camera(), np.ones(3)
    with stopped_child(monkeypatch):
        taken = camera.take(b"", [DenseArray("x", array)], None)
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
    with pytest.raises(OSError, match="the process that copies the state failed: it was killed"):
        taken.wait()
    again = camera.take(b"", [DenseArray("x", array)], None)
    assert (bytes_of(again), again.way) == (array.tobytes(), "copy")


def test_checkpoint_is_copied_without_a_fork_and_with_one_warning_if_a_device_file_is_memory_mapped(
    monkeypatch, caplog
):
    monkeypatch.setattr(image, "_LEAST_FORKED", 0)
    monkeypatch.setattr(image, "_MOST_TIMES", 1 << 40)
    monkeypatch.setattr(image, "_mappings", lambda: image._Mappings([], ["/dev/infiniband/uverbs0"]))
    camera, array = Camera(), np.ones(3)
    for _ in range(2):
        taken = camera.take(b"", [DenseArray("x", array)], None)
        assert (bytes_of(taken), taken.way) == (array.tobytes(), "copy")
    (record,) = caplog.records
    assert "/dev/infiniband/uverbs0 is mapped" in record.message


@pytest.mark.parametrize(("step_s", "way"), [(0.001, "copy"), (1000.0, "fork"), (None, "fork")])
def test_checkpoint_is_copied_by_a_fork_unless_a_step_is_shorter_than_the_copy(forks, step_s, way):
    taken = Camera().take(b"", [DenseArray("x", np.zeros(1 << 20))], step_s)
    taken.wait()
    assert taken.way == way


def test_only_shared_memory_mappings_of_a_process_are_listed_as_shared():
    shared = mmap.mmap(-1, 4096)
    private = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)
    found = image._mappings()
    places = [np.frombuffer(memory, dtype=np.uint8).ctypes.data for memory in (shared, private)]
    assert [any(begin <= place < end for begin, end in found.shared) for place in places] == [True, False]
    assert found.devices == []


def test_memory_buffer_of_a_written_checkpoint_is_reused_for_a_later_one():
    camera, array = Camera(), np.arange(10.0)
    first = camera.take(b"", [DenseArray("x", array)], None)
    second = camera.take(b"", [DenseArray("x", array)], None)
    assert second.memory is not first.memory, "the first is not yet written"
    camera.give_back(first)
    camera.give_back(second)
    third = camera.take(b"", [DenseArray("x", array + 1)], None)
    assert third.memory is first.memory
    assert bytes_of(third) == (array + 1).tobytes()


def test_memory_buffer_allocated_in_advance_is_used_for_the_next_checkpoint(forks):
    camera, array = Camera(), np.zeros(1 << 20)
    camera.prepare([DenseArray("x", array)])
    deadline = time.monotonic() + 120
    while camera._memory is None and time.monotonic() < deadline:
        time.sleep(0.01)
    prepared = camera._memory
    assert camera.take(b"", [DenseArray("x", array)], None).memory is prepared


@pytest.mark.parametrize("has_room", [True, False])
def test_gpu_tensors_are_copied_on_a_side_stream_while_training_continues_if_memory_suffices(monkeypatch, has_room):
    torch = pytest.importorskip("torch")
    calls = []

    class Stream:
        def __init__(self, name="beside"):
            self.name = name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            return SimpleNamespace(synchronize=lambda: calls.append("synchronize"))

    def clone(tensor):
        if not has_room:
            raise torch.OutOfMemoryError
        return tensor + 0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("training"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(image.SharedMemory, "pin", lambda memory: calls.append("pin"))
    arrays = [DenseArray("x", torch.arange(6.0).reshape(2, 3)), DenseArray("y", torch.tensor(True))]
    for array in arrays:
        array.is_on_gpu = True
    taken = Camera().take(b"head", arrays, None)
    assert (bytes_of(taken), taken.way) == (b"head" + np.arange(6, dtype="f4").tobytes() + b"\x01", "stream")
    waits = ["beside waits for training"] + ["training waits for beside"] * (not has_room)
    assert calls == ["pin", *waits, "synchronize"]
