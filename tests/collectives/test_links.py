from __future__ import annotations

import socket
import sys
import threading

import pytest

from paceline.collectives import links

TOKEN = b"t" * 32


@pytest.fixture
def pair():
    with links.listen("127.0.0.1") as server:
        one = links.connect("127.0.0.1", server.getsockname()[1], TOKEN, 1, 60)
        other = links.accept(server, TOKEN, [1], 60)[1]
    yield one, other
    one.close()
    other.close()


def take(link):
    while (message := link.receive()) is None:
        links.wait([link], 5)
    return message


def test_messages_sent_over_a_link_arrive_whole_and_in_order(pair):
    one, other = pair
    sent = [b"", b"a", b"\x00" * 70000, b"end"]
    for message in sent:
        one.send(message)
    assert [take(other) for _ in sent] == sent
    assert other.receive() is None


def test_simultaneous_large_sends_do_not_deadlock(pair):
    big = b"x" * (32 << 20)
    for link in pair:
        link.send(big)
    assert all(link.has_unsent() for link in pair)
    came: dict[int, bytes] = {}
    while len(came) < 2:
        for number, link in enumerate(pair):
            message = link.receive()
            if message is not None:
                came[number] = message
    assert came == {0: big, 1: big}


def test_concurrent_sends_on_one_link_keep_messages_whole(pair):
    """A rank's own work sends while another thread says why the engine gives up: their bytes came mixed, or the second
    thread died of "Existing exports of data"."""
    one, other = pair
    failed: list[BaseException] = []

    def send(letter: bytes) -> None:
        try:
            for length in range(1, 400):
                one.send(letter * length * 40)
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        senders = [threading.Thread(target=send, args=(letter,)) for letter in (b"a", b"b", b"c")]
        for sender in senders:
            sender.start()
        came = []
        while len(came) < 3 * 399 and not failed:
            one.flush()
            if (message := other.receive()) is not None:
                came.append(message)
        for sender in senders:
            sender.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    for letter in (b"a", b"b", b"c"):
        assert [message for message in came if message[:1] == letter] == [letter * n * 40 for n in range(1, 400)]


def test_receiving_from_a_closed_peer_raises_eof_error_after_its_last_message_was_read(pair):
    one, other = pair
    one.send(b"last")
    one.close()
    assert take(other) == b"last"
    with pytest.raises(EOFError):
        take(other)


@pytest.mark.promise("does-know-secret-let")
def test_connection_without_the_token_is_refused():
    with links.listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"s" * 32 + b"\x00\x00\x00\x01")
            right = links.connect("127.0.0.1", port, TOKEN, 1, 60)
            link = links.accept(server, TOKEN, [1], 60)[1]
            right.send(b"hello")
            assert take(link) == b"hello"
            stranger.settimeout(60)
            assert stranger.recv(1) == b""
            link.close()
            right.close()


def test_timeout_error_names_the_ranks_that_have_not_connected():
    with links.listen("127.0.0.1") as server:
        link = links.connect("127.0.0.1", server.getsockname()[1], TOKEN, 2, 60)
        with pytest.raises(TimeoutError, match=r"no connection from rank 1, 3 within 0\.2 s"):
            links.accept(server, TOKEN, [1, 2, 3], 0.2)
        link.close()


def test_own_address_is_loopback_if_the_peer_address_is_loopback():
    assert links.own_address("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        links.own_address("no-such-host.invalid", 9)
