"""States in the memory of a process that outlives the training: kept, given back, and bounded in time."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import checkpoint
from paceline.checkpoint import neighbour, saving
from paceline.checkpoint.neighbour import Neighbour
from paceline.system import kept_states
from paceline.system.spare_client import LENGTH, connect
from paceline.worker import spare
from tests.late import late

np = late("numpy")


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kept_states.KeptStates]:
    """A spare's side, which answers in a thread."""
    path = str(tmp_path / "spare_0")
    kept = kept_states.KeptStates()
    monkeypatch.setattr(spare, "_states", kept)
    monkeypatch.setattr(saving, "_neighbour", Neighbour())
    monkeypatch.setattr(neighbour, "_SHARE", 1e9)
    monkeypatch.setenv("PACELINE_SPARE", path)
    listener, is_over = spare._listen(f"{path}.socket"), threading.Event()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                if is_over.is_set():
                    return
                spare._answer(connection, listener)

    thread = threading.Thread(target=serve)
    thread.start()
    yield kept
    is_over.set()
    with socket.socket(socket.AF_UNIX) as last:
        last.connect(f"{path}.socket")
        thread.join(60)
    listener.close()
    kept.close()


def save(state, step, folder, **options):
    checkpoint.save(state, step, every=options.pop("every", 1000), folder=folder, **options)
    if (handing := saving._neighbour._handing) is not None:
        handing.join(60)


def test_training_resumes_from_the_last_step_kept_in_memory(states, tmp_path):
    array = np.zeros(1000)
    for step in range(1, 6):
        array += 1
        save({"x": array, "step": step}, step, tmp_path)
    found = checkpoint.latest(tmp_path)
    assert (found.step, found.state["step"], set(found.state["x"])) == (5, 5, {5.0})
    assert checkpoint.latest(tmp_path).parts[0]["step"] == 5
    assert not list(tmp_path.glob("checkpoint*"))
    # Two images serve all steps.
    assert len(saving._neighbour._images) == 1


def test_newer_checkpoint_on_disk_is_preferred_to_states_in_memory(states, tmp_path):
    save({"n": 1}, 1, tmp_path)
    save({"n": 2}, 2, tmp_path, every=2)
    checkpoint.wait()
    found = checkpoint.latest(tmp_path)
    assert (found.state, [path.parent for path in found.paths]) == ({"n": 2}, [tmp_path])
    assert checkpoint.latest(tmp_path / "other") is None


def test_states_of_very_short_steps_are_rarely_copied_to_memory(states, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbour, "_SHARE", 1e-9)
    monkeypatch.setattr(saving, "_returned", None)
    for step in (1, 2, 3):
        save({"n": step}, step, tmp_path)
    # How long a step takes is known from the second call on.
    assert checkpoint.latest(tmp_path).step == 2
    every = saving._neighbour._every
    assert (every > 1000, bin(every).count("1")) == (True, 1)


def memory(text):
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


def test_step_in_memory_is_used_only_if_all_ranks_have_kept_it(states, tmp_path):
    path = os.environ["PACELINE_SPARE"]
    for step, rank in ((4, 0), (4, 1), (5, 0)):
        state = {"folder": str(tmp_path), "step": step, "rank": rank, "of": 2, "token": "t"}
        assert kept_states.keep(path, state, memory(b"%d of %d" % (step, rank))) == []
    step, fds = neighbour.newest(tmp_path)
    assert (step, [os.pread(fd, 100, 0) for fd in fds]) == (4, [b"4 of 0", b"4 of 1"])
    # The third step of a rank takes the place of the first, and another number of ranks that of all.
    state |= {"step": 6, "rank": 0}
    assert kept_states.keep(path, state, memory(b"")) == [4]
    assert kept_states.keep(path, state | {"of": 1}, memory(b"")) == [6, 5]
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "request_",
    [
        {"state": "keep", "of": {}},
        {"state": "keep", "of": {"folder": 1, "step": 1, "rank": 0, "of": 1, "token": ""}},
        {"state": "keep", "of": {"folder": "", "step": 1, "rank": 0, "of": 1, "token": ""}},
        {"state": "give"},
    ],
)
def test_invalid_request_to_the_process_that_keeps_states_in_memory_gets_an_error(states, request_):
    with connect(os.environ["PACELINE_SPARE"]) as connection:
        text = json.dumps(request_).encode()
        connection.sendall(LENGTH.pack(len(text)) + text)
        assert "error" in json.loads(connection.makefile("rb").readline())
    assert states._states == []


def test_training_continues_if_the_process_that_keeps_states_in_memory_has_ended(states, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(neighbour, "_PAUSE_S", 0.0)
    monkeypatch.setattr(kept_states, "keep", lambda *_: (_ for _ in ()).throw(OSError(0, "the warm process ended")))
    for step in range(1, 10):
        save({"n": step}, step, tmp_path)
    assert caplog.text.count("are not kept in memory beside the checkpoints: the warm process ended") == 1
    assert checkpoint.latest(tmp_path) is None


def test_ranks_on_several_machines_keep_no_states_in_memory():
    several = {"PACELINE_SPARE": "/x/spare_%", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert not neighbour.has_shared_spare(several)
    assert neighbour.has_shared_spare(several | {"LOCAL_WORLD_SIZE": "2"})
    assert neighbour.has_shared_spare(several | {"PACELINE_SPARE": "/x/spare_0"})
    assert not neighbour.has_shared_spare({})
