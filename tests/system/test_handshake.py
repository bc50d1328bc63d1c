"""Proofs that the other side knows a shared secret."""

from __future__ import annotations

import socket
import threading

import pytest

from paceline.system import handshake
from paceline.system.handshake import TAG_BYTES, authenticate, is_tag, serve_each, tag


def test_message_tag_is_valid_only_for_its_key_purpose_and_data():
    made = tag(b"key", "rank", b"1")
    assert len(made) == TAG_BYTES
    assert is_tag(made, b"key", "rank", b"1")
    assert not is_tag(made, b"other", "rank", b"1")
    assert not is_tag(made, b"key", "store", b"1")
    assert not is_tag(made, b"key", "rank", b"2")


def connected(server_key: bytes, client_key: bytes):
    """Return the server's and the client's connection, or the error of each."""
    ours, theirs = socket.socketpair()
    ends = {}

    def prove(name, sock, key):
        try:
            ends[name] = authenticate(sock, key, is_client=name == "client")
        except ConnectionError as error:
            ends[name] = error

    thread = threading.Thread(target=prove, args=("server", ours, server_key))
    thread.start()
    prove("client", theirs, client_key)
    thread.join()
    return ends["server"], ends["client"]


def test_handshake_succeeds_with_equal_keys():
    server, client = connected(b"secret", b"secret")
    with server, client:
        client.send_bytes(b"hello")
        assert server.recv_bytes() == b"hello"


def test_handshake_fails_on_both_sides_if_their_keys_differ():
    for end in connected(b"secret", b"another"):
        assert isinstance(end, ConnectionError)
        assert "the handshake failed" in str(end)


def test_peer_of_another_protocol_is_refused():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    theirs.close()
    with pytest.raises(ConnectionError, match="the handshake failed"):
        authenticate(ours, b"secret", is_client=False)


def test_server_serves_only_clients_that_know_the_key():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(
            target=serve_each, args=(listener, b"key", lambda link: link.send_bytes(b"welcome")), daemon=True
        ).start()
        with pytest.raises(ConnectionError, match="another key"):
            authenticate(socket.create_connection(listener.getsockname()), b"other", is_client=True)
        with authenticate(socket.create_connection(listener.getsockname()), b"key", is_client=True) as link:
            assert link.recv_bytes() == b"welcome"


def test_server_closes_the_connection_of_a_client_that_stays_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "_PROOF_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_each, args=(listener, b"key", print), daemon=True).start()
        with socket.create_connection(listener.getsockname(), timeout=60) as silent:
            while silent.recv(1000):  # the server's challenge, and then the end of the connection
                pass
