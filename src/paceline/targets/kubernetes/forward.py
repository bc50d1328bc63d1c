"""Forward connections to ports of pods, through WebSockets of the API."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.errors import EngineError, TargetError
from paceline.system import listening
from paceline.system.scratch import Scratch

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

    from paceline.targets.kubernetes.api import Cluster

#: The WebSocket subprotocol that kubectl uses for port forwarding, and the most bytes that Paceline sends in one message.
_PROTOCOL, _CHUNK = "v4.channel.k8s.io", 1 << 16
#: Seconds that a client's connection waits for a pod that answers, and between two attempts.
_PATIENCE_S, _PAUSE_S = 300.0, 0.2


def open_port(cluster: Cluster, pod: str, port: int) -> ClientConnection:
    """Open a WebSocket to a port of a pod, for `relay`.

    Raises:
        EngineError: The API or the pod can't be reached.
        ApiRefusedError: The user may not forward ports, or the pod does not exist.
    """
    return cluster.websocket(f"{cluster.path('pods', pod)}/portforward", {"ports": str(port)}, _PROTOCOL)


def relay(sock: socket.socket, opened: ClientConnection) -> None:
    """Relay a socket to the port of `open_port`, in two threads."""
    for way in (_to_pod, _from_pod):
        threading.Thread(target=way, args=(sock, opened), daemon=True).start()


def _to_pod(sock: socket.socket, opened: ClientConnection) -> None:
    from websockets.exceptions import WebSocketException

    with sock, opened, contextlib.suppress(OSError, WebSocketException):
        while data := sock.recv(_CHUNK):
            opened.send(b"\0" + data)


def _from_pod(sock: socket.socket, opened: ClientConnection) -> None:
    from websockets.exceptions import WebSocketException

    started: set[bytes] = set()
    try:
        with contextlib.suppress(OSError, WebSocketException):
            for data in opened:
                assert isinstance(data, bytes), "the subprotocol has no texts"
                # Channel 0 carries data, and channel 1 errors. The first message of each channel is only the port's number.
                if data[:1] not in started:
                    started.add(data[:1])
                elif data[:1] == b"\0":
                    sock.sendall(data[1:])
                else:
                    break
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class PodForwards:
    """A Unix socket, `path`, whose connections lead to several pods in turn.

    Attributes:
        pods: Names of the pods that answer now. Without one, connections wait.
    """

    def __init__(self, cluster: Cluster, port: int, say: Callable[[str], None]) -> None:
        self._cluster, self._port, self._say = cluster, port, say
        self._folder = Scratch("service")
        self.path = str(self._folder.path / "pods")
        self.pods: Sequence[str] = ()
        self._turns = itertools.count()
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(512)
        accept = (self._listener, self._serve, lambda: self._is_closed)
        threading.Thread(target=listening.accept_each, args=accept, name="pods", daemon=True).start()

    def close(self) -> None:
        """Accept no further connections. Open connections stay open."""
        self._is_closed = True
        listening.close(self._listener)
        self._folder.close()

    def _serve(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_closed and time.monotonic() < deadline:
            if pods := self.pods:
                try:
                    opened = open_port(self._cluster, pods[next(self._turns) % len(pods)], self._port)
                except EngineError:
                    pass  # try the next pod
                except TargetError as error:
                    if getattr(error, "code", 0) != 404:
                        self._say(f"a request can't reach the pods: {error}")
                        break
                else:
                    return relay(sock, opened)
            time.sleep(_PAUSE_S)
        sock.close()
