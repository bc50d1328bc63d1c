"""States that are copied to the memory of another node: what arrives, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.system import spare_client, state_copies
from paceline.system.handshake import authenticate, tag
from paceline.system.memory import Memory
from paceline.system.state_copies import StateSender, receive_states

KEY = b"k" * 32
STATE: Any = {"folder": "/run/checkpoints", "step": 3, "rank": 1, "of": 2, "token": "0a1b2c3d"}


class Receiver:
    """A receiver of states on this machine, which answers in threads."""

    def __init__(self, path: Path) -> None:
        self.kept: list[tuple[Any, bytes]] = []
        self.told: list[str] = []
        self.spare = str(path / "spare_0")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        Path(spare_client.address_file(self.spare)).write_text(json.dumps(self.address))
        self.threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                connected, _ = self.listener.accept()
                arguments = (connected, KEY, STATE["folder"], self._keep, self.told.append)
                self.threads.append(threading.Thread(target=receive_states, args=arguments, daemon=True))
                self.threads[-1].start()
        except OSError:
            pass

    def _keep(self, state: Any, fd: int) -> None:
        self.kept.append((state, os.pread(fd, 1 << 30, 0)))
        os.close(fd)

    def settle(self) -> None:
        for thread in self.threads:
            thread.join(60)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(tmp_path)
    yield made
    made.listener.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copies, "_PIECE", 1000)


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 5000])
def test_copied_state_has_the_bytes_of_the_original(receiver: Receiver, small_pieces: None, size: int) -> None:
    sender, data = StateSender(), os.urandom(size)
    assert sender.send(receiver.spare, KEY, STATE, memoryview(data))
    assert sender.send(receiver.spare, KEY, STATE | {"step": 4}, memoryview(data))
    assert receiver.kept == [(STATE, data), (STATE | {"step": 4}, data)]
    assert len(receiver.threads) == 1
    assert receiver.told == []


def test_state_is_not_sent_before_the_address_of_the_receiving_node_is_known(tmp_path: Path) -> None:
    assert not StateSender().send(str(tmp_path / "spare_0"), KEY, STATE, memoryview(b"x"))


def test_state_from_a_worker_with_another_secret_is_refused(receiver: Receiver) -> None:
    assert not StateSender().send(receiver.spare, b"x" * 32, STATE, memoryview(b"data"))
    receiver.settle()
    assert receiver.kept == []
    assert len(receiver.told) == 1
    assert "a connection is refused: the handshake failed" in receiver.told[0]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"of": STATE, "size": 0}, "the size 0 is less than 1 byte"),
        ({"of": STATE, "size": -5}, "the size -5 is less than 1 byte"),
        ({"of": STATE, "size": 1 << 60}, "do not fit into the"),
        ({"of": STATE, "size": "5"}, "the message has other fields"),
        ({"of": STATE}, "the message has other fields"),
        ([], "the message has other fields"),
        ({"of": STATE | {"folder": "/etc"}, "size": 5}, "is not the run's folder of checkpoints"),
        ({"of": STATE | {"folder": "/run/checkpoints/other"}, "size": 5}, "is not the run's folder of checkpoints"),
        ({"of": STATE | {"token": "../../x"}, "size": 5}, "step, rank or token are out of range"),
        ({"of": STATE | {"token": ""}, "size": 5}, "step, rank or token are out of range"),
        ({"of": STATE | {"rank": 2}, "size": 5}, "step, rank or token are out of range"),
        ({"of": STATE | {"rank": -1}, "size": 5}, "step, rank or token are out of range"),
        ({"of": STATE | {"step": -1}, "size": 5}, "step, rank or token are out of range"),
        ({"of": STATE | {"step": True}, "size": 5}, "a state's field has another type"),
        ({"of": STATE | {"more": 1}, "size": 5}, "a state has other fields"),
    ],
)
def test_state_with_an_invalid_header_is_refused_before_its_bytes_are_sent(
    receiver: Receiver, header: object, reason: str
) -> None:
    with authenticate(socket.create_connection(receiver.address), KEY, is_client=True) as connection:
        connection.send_bytes(json.dumps(header).encode())
        assert reason in connection.recv_bytes().decode()
    receiver.settle()
    assert receiver.kept == []
    assert [reason in told for told in receiver.told] == [True]


def _send(receiver: Receiver, *messages: bytes, size: int = 5) -> None:
    header = json.dumps({"of": STATE, "size": size})
    with authenticate(socket.create_connection(receiver.address), KEY, is_client=True) as connection:
        connection.send_bytes(header.encode())
        assert connection.recv_bytes() == b""
        # The receiver may close the connection after a wrong tag, before the test has sent the bytes.
        with contextlib.suppress(ConnectionError):
            for message in messages:
                connection.send_bytes(message)
    receiver.settle()


def _tag(data: bytes, *, offset: int = 0, size: int = 5) -> bytes:
    return tag(KEY, f"state {json.dumps({'of': STATE, 'size': size})} at {offset}", data)


@pytest.mark.parametrize(
    "messages",
    [
        (_tag(b"12345"), b"12346"),  # a byte was changed
        (_tag(b"12345", offset=1), b"12345"),  # the tag is for another offset
        (_tag(b"12345", size=6), b"12345"),  # the tag is for another size
        (_tag(b"1234"), b"1234"),  # fewer bytes than requested
        (_tag(b"123456"), b"123456"),  # more bytes than requested
        (b"t" * 100, b"12345"),  # the tag itself has another length
    ],
)
def test_bytes_that_the_worker_has_not_signed_are_refused(receiver: Receiver, messages: tuple[bytes, ...]) -> None:
    _send(receiver, *messages)
    assert receiver.kept == []
    assert len(receiver.told) == 1
    assert receiver.told[0].startswith("a copy of a state is refused: ")


def test_incomplete_state_of_a_worker_killed_while_sending_is_dropped(receiver: Receiver, small_pieces: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    _send(receiver, _tag(b"x" * 1000, size=1500), b"x" * 1000, size=1500)
    assert (receiver.kept, receiver.told) == ([], [])
    assert len(os.listdir("/proc/self/fd")) == before


def test_sender_stops_after_repeated_refusals_with_one_warning(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_copies, "_PAUSE_S", 0.0)
    monkeypatch.setattr(state_copies, "memory", lambda: Memory(1 << 30, 1 << 20, ""))
    sender = StateSender()
    for _ in range(10):
        assert not sender.send(receiver.spare, KEY, STATE, memoryview(b"12345"))
    assert len(receiver.threads) == 5
    assert caplog.text.count("the last steps are not copied to another node: ") == 1
    assert "0 MiB, with 1024 MiB to spare, do not fit into the 1 MiB of free memory" in caplog.text


def test_sender_pauses_after_a_failure(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copies, "_PAUSE_S", 600.0)
    sender, address = StateSender(), Path(spare_client.address_file(receiver.spare))
    address.write_text("no JSON")
    assert not sender.send(receiver.spare, KEY, STATE, memoryview(b"12345"))
    address.write_text(json.dumps(receiver.address))
    assert not sender.send(receiver.spare, KEY, STATE, memoryview(b"12345"))
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 6000)
    assert sender.send(receiver.spare, KEY, STATE, memoryview(b"12345"))
