"""Tunnels to a port beside a worker."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from paceline.errors import RunStateError, UserError
from paceline.estimator import Estimator
from paceline.remote.agent.relay import Connections
from paceline.runs.tunnel import Tunnel
from paceline.workspace import Experiment, Run, Workspace
from tests.helpers import free_port, wait_until

SERVER = """
import http.server, os
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(f"port {server.server_port}", flush=True)
server.serve_forever()
"""


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that greets a client, and then sends back what the client sends until its end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            connected.sendall(b"hello ")
            while data := connected.recv(1 << 16):
                connected.sendall(data)
            connected.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def joined(port: int) -> tuple[Connections, Connections]:
    """Both ends of a tunnel to a port, joined in this process."""
    ends: list[Connections] = []

    def send_there(data: bytes) -> None:
        ends[1].feed(data)

    ends.append(Connections(send_there))
    ends.append(Connections(ends[0].feed, lambda: socket.create_connection(("127.0.0.1", port))))
    return ends[0], ends[1]


def received(connected: socket.socket) -> bytes:
    found = b""
    while data := connected.recv(1 << 16):
        found += data
    return found


def test_tunneled_connection_carries_data_in_both_directions_until_closed(echo: int) -> None:
    here, there = joined(echo)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=here.add, args=(1, theirs))
    thread.start()
    sent = bytes(range(256)) * 2000
    sender = threading.Thread(target=lambda: (ours.sendall(sent), ours.shutdown(socket.SHUT_WR)))
    sender.start()
    # The server sends "hello " before it receives anything, and closes its side after the client.
    assert received(ours) == b"hello " + sent
    for one in (thread, sender):
        one.join()
    wait_until(lambda: not here._open and not there._open, "both ends close the connection")
    ours.close()


def test_connection_to_a_closed_port_is_closed() -> None:
    here, _ = joined(free_port())
    ours, theirs = socket.socketpair()
    here.add(1, theirs)
    assert received(ours) == b""
    ours.close()


def test_tunnel_ignores_malformed_frames() -> None:
    told: list[bytes] = []
    end = Connections(told.append)
    for content in (b"", b"\0\0\0\1", b"\0\0\0\1z", b"\0\0\0\7dabc", b"\0\0\0\7e", b"\0\0\0\1o"):
        end.feed(len(content).to_bytes(8, "big") + content)
    assert told == []


@pytest.fixture
def serving_run(tmp_path) -> Iterator[tuple[Run, int]]:
    """A run whose worker serves its source folder, and the worker's port."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "serve.py").write_text(SERVER)
    (tmp_path / "source" / "page.txt").write_text("x" * 300_000)
    experiment = Experiment(Workspace(tmp_path / "ws"), "served")
    run = experiment.submit(Estimator(tmp_path / "source", entry_script="serve.py"))
    log = run.folder.live_log(0)
    wait_until(lambda: log.exists() and "port" in log.read_text(), "its port", timeout_s=60)
    yield run, int(log.read_text().split()[1])
    run.cancel()
    run.wait_for_completion(raise_on_error=False)


@pytest.mark.promise("tunnel-reaches-worker-port")
def test_tunnel_reaches_a_port_of_the_worker_and_ends_with_the_run(serving_run) -> None:
    run, port = serving_run
    with Tunnel(run.folder, port) as tunnel:
        with pytest.raises(UserError, match=f"port {tunnel.local_port} of this machine can't be taken"):
            Tunnel(run.folder, port, local_port=tunnel.local_port)
        ended: list[Exception] = []

        def serve() -> None:
            try:
                tunnel.serve()
            except RunStateError as error:
                ended.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        texts: list[bytes] = []

        def fetch() -> None:
            texts.append(opener.open(f"http://127.0.0.1:{tunnel.local_port}/page.txt", timeout=60).read())

        fetchers = [threading.Thread(target=fetch) for _ in range(3)]
        for one in fetchers:
            one.start()
        for one in fetchers:
            one.join()
        assert [len(text) for text in texts] == [300_000] * 3
        run.cancel()
        thread.join(60)
        assert "its workers have ended" in str(ended[0]) or "was closed on the node" in str(ended[0])
    with pytest.raises(RunStateError):
        Tunnel(run.folder, port)


def test_waiting_tunnel_wakes_up_when_a_connection_has_data_and_sends_the_data_in_order(
    serving_run, monkeypatch
) -> None:
    run, port = serving_run
    sent: list[bytes] = []
    with Tunnel(run.folder, port) as tunnel:
        monkeypatch.setattr(tunnel._beside, "write", sent.append)
        tunnel._send(b"one ")
        tunnel._wait_for_data(600)
        tunnel._send(b"two")
        tunnel.step()
    assert sent == [b"one two"]
