"""States in the memory of a process that outlives the training: kept, given back, and bounded in time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import checkpoint
from paceline.checkpoint import neighbour, saving
from paceline.checkpoint.neighbour import Neighbour, write_kept
from paceline.node.states import StateKeeper
from paceline.system import kept_states, listening, spare_client
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
    # Later steps are copied into the memory of an earlier step, so there is only one copy of the state.
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
    # Paceline learns the time of a step at the second call. Copying then takes too large a share of a step, so step 3
    # is not copied.
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
    # Two steps of each rank are kept, so the third step of a rank replaces its first one.
    state |= {"step": 6, "rank": 0}
    assert kept_states.keep(path, state, memory(b"")) == [4]
    # A second copy of step 6 replaces the first copy of step 6, and step 5 is kept. A state of another number of ranks
    # replaces both steps.
    assert kept_states.keep(path, state, memory(b"")) == [6]
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


def test_ranks_share_a_process_that_holds_their_states_unless_each_machine_has_its_own_process():
    several = {"PACELINE_SPARE": "/x/spare_%", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert not neighbour.has_shared_spare(several)
    assert neighbour.has_shared_spare(several | {"LOCAL_WORLD_SIZE": "2"})
    assert neighbour.has_shared_spare(several | {"PACELINE_SPARE": "/x/spare_0"})
    assert not neighbour.has_shared_spare({})


def begin_keeper(path, folder):
    """Let a node's keeper answer at its socket and at a port, which is returned."""
    keeper = StateKeeper(bytes.fromhex("ab" * 32), str(folder))
    own = spare_client.listen(spare_client.socket_of(spare_client.keeper_of(path)))
    server = listening.listen_at("127.0.0.1", 0, 8)
    for listener, serve in ((own, keeper.answer), (server, keeper.receive)):
        threading.Thread(target=listening.accept_each, args=(listener, serve), daemon=True).start()
    return server.getsockname()[1]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of two nodes' keepers. This process is rank 0, on the first node."""
    monkeypatch.setattr(saving, "_neighbour", Neighbour())
    monkeypatch.setattr(neighbour, "_SHARE", 1e9)
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    paths = [str(tmp_path / f"spare_{node}") for node in (0, 1)]
    begin_keeper(paths[0], tmp_path / "saved")
    port = begin_keeper(paths[1], tmp_path / "saved")
    Path(spare_client.address_file(paths[0])).write_text(json.dumps(["127.0.0.1", port]))
    variables = {
        "PACELINE_SPARE": str(tmp_path / "spare_%"),
        "PACELINE_STATES_KEY": "ab" * 32,
        "PACELINE_CHECKPOINT_DIR": str(tmp_path / "saved"),
        "PACELINE_RUN_DIR": str(tmp_path),
        "PACELINE_ATTEMPT": "1",
        **{"NODE_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2"},
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return [spare_client.keeper_of(path) for path in paths]


def test_state_copied_to_a_second_machine_can_be_written_to_disk_from_either_machines_memory(nodes, tmp_path):
    array = np.arange(100_000.0)
    for step in (1, 2, 3):
        array += 1
        save({"x": array, "step": step}, step, None)
    assert (tmp_path / "attempts" / "1" / "kept_0.json").exists()
    assert checkpoint.latest(tmp_path / "saved") is None
    for path in nodes:
        assert write_kept(path, tmp_path / "saved", [1]) == []
        assert write_kept(path, tmp_path / "saved", [0, 1]) == [3]
        found = checkpoint.latest(tmp_path / "saved")
        assert (found.step, found.state["step"]) == (3, 3)
        assert (found.state["x"] == array).all()
        # The written file must equal a checkpoint of the same state that save() writes.
        [written] = (tmp_path / "saved").iterdir()
        saved = tmp_path / "other"
        checkpoint.save({"x": array, "step": 3}, 3, folder=saved, asynchronous=False)
        assert written.read_bytes() == (saved / written.name).read_bytes()
        written.unlink()


def test_older_states_in_memory_are_not_written_beside_a_newer_checkpoint(nodes, tmp_path):
    save({"n": 1}, 1, None)
    checkpoint.save({"n": 2}, 2, folder=tmp_path / "saved", asynchronous=False)
    assert write_kept(nodes[1], tmp_path / "saved", [0]) == []


def test_two_machine_run_keeps_states_of_its_checkpoint_folder_but_not_of_other_folders_in_memory(nodes, tmp_path):
    save({"n": 1}, 1, None)
    save({"n": 2}, 2, tmp_path / "own")
    assert write_kept(nodes[0], tmp_path / "own", [0]) == []
    assert write_kept(nodes[0], tmp_path / "saved", [0]) == [1]


def test_state_is_kept_on_its_own_machine_if_the_address_of_the_next_machine_is_unknown(nodes, tmp_path):
    Path(spare_client.address_file(str(tmp_path / "spare_0"))).unlink()
    save({"n": 1}, 1, None)
    assert write_kept(nodes[1], tmp_path / "saved", [0]) == []
    assert write_kept(nodes[0], tmp_path / "saved", [0]) == [1]


def test_invalid_checkpoint_in_memory_is_reported_and_not_written_to_disk(nodes, tmp_path, capsys):
    state = {"folder": str(tmp_path / "saved"), "step": 1, "rank": 0, "of": 1, "token": "aa"}
    kept_states.keep(nodes[0], state, memory(b"no checkpoint"))
    assert write_kept(nodes[0], tmp_path / "saved", [0]) == []
    assert not (tmp_path / "saved").exists()
    assert "a state in memory is left out: the checkpoint" in capsys.readouterr().out


def test_parts_in_the_memory_of_two_machines_form_a_checkpoint(nodes, tmp_path):
    for rank, path in enumerate(nodes):
        image = tmp_path / f"image_{rank}"
        checkpoint.save({"rank": rank}, 5, folder=image, asynchronous=False)
        state = {"folder": str(tmp_path / "saved"), "step": 5, "rank": rank, "of": 2, "token": "aa"}
        kept_states.keep(path, state, memory((image / "checkpoint_5.safetensors").read_bytes()))
        assert write_kept(path, tmp_path / "saved", [rank]) == [5]
    found = checkpoint.latest(tmp_path / "saved")
    assert [part["rank"] for part in found.parts] == [0, 1]


def test_invalid_requests_to_the_process_that_keeps_states_get_no_answer_and_one_report_per_kind(nodes, capfd):
    for request in ({"state": "keep", "of": {}}, {"state": "give"}, {}):
        for _ in range(2):
            with connect(nodes[0]) as connection:
                text = json.dumps(request).encode()
                connection.sendall(LENGTH.pack(len(text)) + text)
                assert connection.recv(100) == b""
    assert capfd.readouterr().out.count("states in memory: a request is refused: ") == 3


def test_process_that_keeps_states_serves_its_own_node_if_it_cannot_listen_for_other_nodes(tmp_path):
    path, report = str(tmp_path / "spare_0"), tmp_path / "report.json"
    argv = [sys.executable, "-m", "paceline.node.states", path, "192.0.2.1", str(tmp_path / "saved"), str(report)]
    environment = {**os.environ, spare_client.KEY_VARIABLE: "ab" * 32}
    keeper = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert "no copies from another node, since 192.0.2.1 is no address here" in keeper.stdout.readline()
        state = {"folder": str(tmp_path / "saved"), "step": 1, "rank": 0, "of": 1, "token": "aa"}
        assert kept_states.keep(spare_client.keeper_of(path), state, memory(b"x")) == []
        assert not report.exists()
    finally:
        keeper.kill()
        keeper.communicate()
