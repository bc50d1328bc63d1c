"""The first process of index 0 keeps the run's files on the volume, or prints them into the pod's log."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.remote.replica import changes
from paceline.remote.wire import Frames
from paceline.runs import states, store
from paceline.targets.kubernetes import pod
from paceline.targets.kubernetes.hub import Pulled
from paceline.targets.kubernetes.pod import PodLeader, link_to_volume
from paceline.targets.kubernetes.ticket import EXIT_AGAIN, LOG_BYTES, PodTicket, parts_in
from tests.helpers import make_run


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodLeader:
    """The first process of a pod whose run and volume are below `tmp_path`."""
    monkeypatch.setattr(pod, "TOP", str(tmp_path))
    monkeypatch.setattr(pod, "VOLUME", str(tmp_path / "volume"))
    folder, fd = make_run(tmp_path / "workspace" / "w" / "runs", status=states.RUNNING)
    os.close(fd)
    texts = {"run_id": folder.run_id, "job": "j", "workspace": "w", "key": secrets.token_hex(32), "library": "l"}
    described = PodTicket(**texts, port=0, node_count=1, gang_wait_s=300.0, silence_s=15.0, volume="shared")
    return PodLeader(described, "", "", {})


def test_renamed_output_of_a_pod_is_also_renamed_on_the_volume_by_the_next_copy(
    leader: PodLeader, tmp_path: Path
) -> None:
    kept = tmp_path / "volume" / "runs" / leader._ticket.run_id
    leader._folder.outputs.mkdir(exist_ok=True)
    (leader._folder.outputs / "old").write_text("1")
    leader._keep()
    assert (kept / "outputs" / "old").read_text() == "1"
    (leader._folder.outputs / "old").rename(leader._folder.outputs / "new")

    leader._keep()

    assert os.listdir(kept / "outputs") == ["new"]
    assert os.listdir(kept.parent) == [kept.name]
    assert store.stored(leader._folder).warnings == ()


def test_files_that_cannot_be_written_to_the_volume_are_reported_as_a_warning(
    leader: PodLeader, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "runs").write_text("not a folder")

    leader._keep()

    (warning,) = store.stored(leader._folder).warnings
    assert warning.startswith("The run's files could not be copied to the volume shared: ")
    assert not leader._is_kept


def test_environments_and_caches_created_in_a_pod_are_stored_on_the_volume(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()

    link_to_volume(str(tmp_path), str(tmp_path / "volume"))

    (tmp_path / "environments" / "key").mkdir()
    (tmp_path / "home" / ".cache" / "pip").mkdir()
    assert (tmp_path / "volume" / "environments" / "key").is_dir()
    assert (tmp_path / "volume" / "home" / ".cache" / "pip").is_dir()


# --- files in the pod's log


def names_in(log: str) -> list[str]:
    """Return the name of each file of which a pod's log has a piece, in their order."""
    return [
        header["file"]
        for _, data in parts_in(log.splitlines())
        for header, _ in Frames().feed(data)
        if "file" in header
    ]


def write(leader: PodLeader, **sizes: int) -> None:
    """Write random user files, which can't be compressed, into the folder `outputs`."""
    leader._folder.outputs.mkdir(exist_ok=True)
    for name, size in sizes.items():
        (leader._folder.outputs / name).write_bytes(os.urandom(size))


@pytest.fixture
def live(leader: PodLeader, monkeypatch: pytest.MonkeyPatch) -> PodLeader:
    """The first process of a pod whose log is read during the run. Each pass of its loop prints the changes."""
    monkeypatch.setattr(changes, "QUIET_S", 0.0)
    monkeypatch.setattr(pod, "_LIVE_S", -1.0)
    monkeypatch.setattr(pod, "_TICK_S", 0.0)
    monkeypatch.setattr(pod, "START", "/nowhere")
    leader._ticket = replace(leader._ticket, live=True, volume="")
    return leader


def watch(leader: PodLeader, pulled: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first process look at the run twice: it prints files that have rested since the first look."""
    looks = iter([False, False, True])
    monkeypatch.setattr(pod, "has_reaped", lambda _: next(looks))
    leader._watch(pulled)


def test_files_printed_during_a_run_leave_half_of_the_logs_room_for_the_files_at_its_end(
    live: PodLeader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = Pulled(live._folder, pod._LIVE_BYTES)
    pulled.skip_present()
    write(live, first=LOG_BYTES // 4, second=LOG_BYTES // 4)
    watch(live, pulled, monkeypatch)
    write(live, large=LOG_BYTES // 2 - 4096, small=1)
    watch(live, pulled, monkeypatch)
    during = {*names_in(capsys.readouterr().out)}
    assert {name for name in during if name.startswith("outputs/")} == {"outputs/first", "outputs/second"}

    live._print_rest(pulled, has_ended=True)

    after = names_in(capsys.readouterr().out)
    assert {name for name in after if name.startswith("outputs/")} == {"outputs/large", "outputs/small"}
    assert store.stored(live._folder).warnings == ()


def test_file_too_large_for_the_pods_log_is_never_printed_and_the_record_warns_of_it(
    live: PodLeader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = Pulled(live._folder, pod._LIVE_BYTES)
    pulled.skip_present()
    write(live, small=1, large=LOG_BYTES + (1 << 16))
    live._folder.rank_log(1, 0).parent.mkdir(parents=True)
    live._folder.rank_log(1, 0).write_text("a line")

    watch(live, pulled, monkeypatch)
    live._print_rest(pulled, has_ended=True)

    (warning,) = store.stored(live._folder).warnings
    assert warning.startswith(
        "1 files of the run did not come back, such as 'outputs/large': they do not fit into the pod's log"
    )
    log = capsys.readouterr().out
    names = names_in(log)
    assert {"outputs/small", "attempts/1/rank_0.log"} <= {*names}
    assert names[-1] == "state.json"
    assert len(log) < LOG_BYTES


def test_large_file_in_the_working_directory_is_named_in_the_warning(
    live: PodLeader, capsys: pytest.CaptureFixture[str]
) -> None:
    live._folder.work.mkdir()
    (live._folder.work / "large").write_bytes(os.urandom(LOG_BYTES + (1 << 16)))
    store.write(live._folder, replace(store.stored(live._folder), status=states.COMPLETED))

    live._print_rest(Pulled(live._folder, pod._LIVE_BYTES), has_ended=True)

    (warning,) = store.stored(live._folder).warnings
    assert "such as 'work/large'" in warning


# --- the end of a pod before its supervisor runs


def test_pod_that_kubernetes_ends_before_its_supervisor_starts_exits_without_a_supervisor(
    leader: PodLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod.signal, "signal", lambda *_: None)
    monkeypatch.setattr(leader, "_fetch", lambda: True)
    monkeypatch.setattr(leader._hub, "begin", lambda: None)
    monkeypatch.setattr(leader, "_note_lost_attempts", lambda: leader._forward(15, None))
    monkeypatch.setattr(pod.subprocess, "Popen", lambda *_, **__: pytest.fail("the supervisor was started"))

    assert leader.run() == EXIT_AGAIN


def test_sigterm_during_the_start_of_the_supervisor_is_passed_on(
    leader: PodLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader._forward(15, None)
    leader._supervisor = 1 << 30
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(pod.processes, "send", lambda *what: sent.append(what))

    watch(leader, Pulled(leader._folder), monkeypatch)

    assert sent
    assert {*sent} == {(1 << 30, 15)}
