"""Commands beside workers through a datastore: the files in the store, who may write there, and the remains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.data.stores.filesystem import Store
from paceline.data.stores.record import StoreRecord
from paceline.errors import RunStateError, TargetError, TransferError
from paceline.runs.folder import RunFolder
from paceline.targets.ray import channel as channel_module
from paceline.targets.ray.channel import Sealed, StoreChannel, StoreListener
from paceline.targets.ray.store_objects import put
from tests.helpers import make_run, wait_until
from tests.targets.answering import Answering, answering

KEY = "5e" * 32
REQUEST: Any = {"argv": ["echo"], "rank": 1, "terminal": None, "term": None}


class Both:
    """A run's folder here, the one that its supervisor has, and the store between them."""

    def __init__(self, top: Path) -> None:
        self.store = top / "store"
        self.record = StoreRecord(name="s", url=str(self.store))
        self.here, self.there = self._folder(top / "here"), self._folder(top / "there")
        self.here.exec_key.write_text(KEY)
        self.listener = StoreListener(self.record, self.there, KEY)

    @staticmethod
    def _folder(top: Path) -> RunFolder:
        folder, fd = make_run(top)
        os.close(fd)
        return RunFolder(folder.path.rename(top / "lab_1700000000_00000001"))

    def channel(self) -> StoreChannel:
        return StoreChannel(self.record, self.here)

    def left(self) -> list[str]:
        folders = (self.store, self.there.exec_requests, self.there.path / "attempts")
        walks = (os.walk(folder) for folder in folders)  # the folders may vanish meanwhile
        return [os.path.join(top, name) for walk in walks for top, _, names in walk for name in names]


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    # Look into the folder often. Only in a bucket, each look costs money.
    monkeypatch.setattr(channel_module, "_KNOCK_S", 3600.0)
    monkeypatch.setattr(channel_module, "_LOOK_S", 0.02)
    found = Both(tmp_path)
    yield found
    found.listener.close()


@pytest.fixture
def supervisor(both: Both) -> Iterator[Answering]:
    with answering(both.there) as found:
        yield found


def hear(channel: StoreChannel, what: str) -> list[Any]:
    found: list[Any] = []
    wait_until(lambda: found.extend(dict(told)[what] for told in channel.receive() if what in told) or found, what, 60)
    return found


def test_exec_messages_are_encrypted_in_the_datastore_and_removed_after_the_command_ended(
    both: Both, supervisor: Answering
) -> None:
    channel = both.channel()
    channel.begin(REQUEST)
    channel.send({"data": "cGFzc3dvcmQ="})
    assert hear(channel, "out") == ["cGFzc3dvcmQ="]
    assert supervisor.requests == [REQUEST]
    channel.send({"end": True})
    channel._pass_on()
    stored = b"".join(path.read_bytes() for path in both.store.rglob("*") if path.is_file())
    assert b"end" not in stored
    assert hear(channel, "exit") == [3]
    channel.close()
    wait_until(lambda: not both.left(), f"nothing is left: {both.left()}", 60)


def test_concurrent_exec_commands_receive_only_their_own_messages(both: Both, supervisor: Answering) -> None:
    ways = [both.channel() for _ in range(3)]
    for number, channel in enumerate(ways):
        channel.begin(REQUEST)
        channel.send({"data": str(number)})
    assert [hear(channel, "out") for channel in ways] == [["0"], ["1"], ["2"]]
    for channel in ways:
        channel.close()
    wait_until(lambda: not both.left(), f"nothing is left: {both.left()}", 60)
    assert supervisor.heard.count({"gone": True}) == 3


def test_exec_request_signed_with_another_key_or_name_runs_nothing(
    both: Both, supervisor: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(both.record) as store:
        for name, key in (("stranger", "ab" * 32), ("replayed", KEY)):
            Sealed(store, both.there.run_id, key, name, "in").put([REQUEST])
        # The signature covers the name, so a message under another name is refused.
        top = both.store / "paceline" / "runs" / both.there.run_id / "exec"
        (top / "other").mkdir()
        (top / "replayed" / "in_000000").rename(top / "other" / "in_000000")
        put(store, channel_module._knock(both.there.run_id), b"")
    channel = both.channel()
    channel.begin(REQUEST)
    channel.send({"data": "eA=="})
    assert hear(channel, "out") == ["eA=="]
    assert len(supervisor.requests) == 1, "the one that was asked for by whoever has the key"
    # Forged answers are ignored. If there is no valid answer for this time, an error is raised.
    monkeypatch.setattr(channel_module, "_SILENCE_S", 2.0)
    with Store(both.record) as store:
        forged = Sealed(store, both.here.run_id, "ab" * 32, channel._name, "out")
        forged.count = channel._out.count
        forged.put([{"out": "eA=="}])
    with pytest.raises(TransferError, match="is not signed with this run's key"):
        wait_until(channel.receive, "a word", 60)
    channel.close()


def test_refused_exec_request_returns_its_reason(both: Both, supervisor: Answering) -> None:
    channel = both.channel()
    channel.begin(REQUEST | {"argv": ["refused"]})
    assert hear(channel, "error") == ["rank 0 has ended"]
    channel.close()
    wait_until(lambda: not both.left(), f"nothing is left: {both.left()}", 60)


def test_exec_request_that_was_removed_from_the_store_is_sent_again(
    both: Both, supervisor: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_AGAIN_S", 0.1)
    monkeypatch.setattr(StoreChannel, "begin", lambda self, request: self._in.put([request]))
    channel = both.channel()
    channel.begin(REQUEST)
    channel.send({"end": True})
    assert hear(channel, "exit") == [3]
    channel.close()


def test_killed_exec_client_ends_its_command(
    both: Both, supervisor: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_SILENCE_S", 3.0)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom paceline.data.stores.record import StoreRecord\n"
        "from paceline.runs.folder import RunFolder\nfrom paceline.targets.ray.channel import StoreChannel\n"
        "channel = StoreChannel(StoreRecord(name='s', url=sys.argv[1]), RunFolder(Path(sys.argv[2])))\n"
        "channel.begin({'argv': ['echo'], 'rank': 0, 'terminal': None, 'term': None})\n"
        "channel.send({'data': 'eA=='})\nchannel._pass_on()\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(both.store), str(both.here.path)], check=False, timeout=120)
    wait_until(lambda: {"gone": True} in supervisor.heard, "the command was ended", 60)
    wait_until(lambda: not both.left(), f"nothing is left: {both.left()}", 60)


def test_end_of_run_closes_the_channel_and_leaves_no_files(both: Both, supervisor: Answering) -> None:
    channel = both.channel()
    channel.begin(REQUEST)
    channel.send({"data": "eA=="})
    hear(channel, "out")
    both.listener.close()
    wait_until(lambda: channel.receive() or channel.is_over, "the end is told", 60)
    channel.close()
    wait_until(lambda: not both.left(), f"nothing is left: {both.left()}", 60)


def test_missing_exec_key_raises_run_state_error(both: Both) -> None:
    both.here.exec_key.unlink()
    with pytest.raises(RunStateError, match=r"the key to its commands, \S+/exec_key, is not there, or another user's"):
        both.channel()


def test_exec_raises_target_error_if_the_cluster_lacks_the_cryptography_package(
    both: Both, supervisor: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "can_encrypt", lambda: False)
    monkeypatch.setattr(channel_module, "_SILENCE_S", 2.0)
    channel = both.channel()
    channel.begin(REQUEST)
    with pytest.raises(TargetError, match=r"the cluster's Python needs\s+cryptography. Install it there"):
        wait_until(channel.receive, "a word", 60)
    channel.close()
    assert not supervisor.requests
