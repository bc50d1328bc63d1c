"""Connect the submitting machine to pods, through WebSockets of the API.

<run folder>/mirrored.json    the progress: {"known": size and time of each file that has arrived, "pod": uid of the pod whose log
                              was read, "part": number of the last part in this log}
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EngineError, TargetError
from paceline.remote.replica.apply import Replica
from paceline.remote.staging.stage_out_local import Update, has_all, updating
from paceline.remote.wire import Frames, Header
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import ExecMessage, ExecRequest
from paceline.system.handshake import authenticate
from paceline.system.listening import limit_silence
from paceline.targets.kubernetes.objects import CONTAINER
from paceline.targets.kubernetes.ticket import Noted, message, parts_in

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

    from paceline.targets.kubernetes.api import Cluster
    from paceline.targets.kubernetes.objects import Pod

#: Seconds for which the local copy of a run's folder counts as up to date.
_FRESH_S = 0.5
_MESSAGE_BYTES = 1 << 30
_PIECE = 1 << 20
#: The WebSocket subprotocol that kubectl uses for port forwarding, and the most bytes that Paceline sends in one message.
_PROTOCOL, _CHUNK = "v4.channel.k8s.io", 1 << 16
#: Seconds without an answer after which a connection counts as broken.
_SILENCE_S = 30


def open_port(cluster: Cluster, pod: str, port: int) -> socket.socket:
    """Return a socket that is connected to a port of a pod.

    Raises:
        EngineError: The API or the pod can't be reached.
        ApiRefusedError: The user may not forward ports, or the pod does not exist.
    """
    opened = cluster.websocket(f"{cluster.path('pods', pod)}/portforward", {"ports": str(port)}, _PROTOCOL)
    ours, theirs = socket.socketpair()
    threading.Thread(target=_to_pod, args=(theirs, opened), daemon=True).start()
    return ours


def _to_pod(sock: socket.socket, opened: ClientConnection) -> None:
    from websockets.exceptions import WebSocketException

    with sock, opened, contextlib.suppress(OSError, WebSocketException):
        # Start to read only after the `with` block of `opened` has begun, because websockets warns of an earlier read.
        threading.Thread(target=_from_pod, args=(sock, opened), daemon=True).start()
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


def connect(cluster: Cluster, pod: str, port: int, key: str) -> Connection:
    """Connect to a pod, which proves that it knows the run's key.

    Raises:
        EngineError: The API, the pod or its port can't be reached.
        ApiRefusedError: The user may not forward ports.
    """
    sock = open_port(cluster, pod, port)
    limit_silence(sock, _SILENCE_S)  # raise an error if the pod sends nothing, because it may have been killed
    try:
        return authenticate(sock, bytes.fromhex(key), is_client=True)
    except ConnectionError as error:
        raise EngineError(f"{cluster.title}: pod {pod} does not answer at port {port}: {error}.") from error


class PodMirror:
    """A connection to a run's pod 0, which updates the local run folder."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        connection.send_bytes(message({"what": "pull"}))

    def pull(self, folder: RunFolder) -> None:
        """Fetch the changes since the last update, unless another process is fetching them.

        Raises:
            OSError, EOFError: The connection is broken.
            TargetError: The pod sends a change that can't be applied to the run's folder.
        """
        with _updating(folder) as update:
            if update is None:
                return
            replica, _ = update
            self._connection.send_bytes(message({"known": replica.known}))
            frames, is_done = Frames(), False
            while not is_done:
                for header, data in frames.feed(self._connection.recv_bytes(_MESSAGE_BYTES)):
                    is_done |= _apply(replica, header, data)
            if has_all(folder):
                self._connection.send_bytes(message({"bye": True}))

    def close(self) -> None:
        self._connection.close()


def read_log(cluster: Cluster, folder: RunFolder, pod: Pod, *, fresh_s: float = _FRESH_S) -> None:
    """Update a run's local folder from a pod's log.

    fresh_s: Seconds for which a copy counts as up to date.

    Raises:
        EngineError, ApiRefusedError: The log can't be read.
    """
    with _updating(folder, fresh_s) as update:
        if update is None:
            return
        replica, told = update
        lines = cluster.log(pod["metadata"]["name"], CONTAINER).decode(errors="replace").splitlines()
        if told.get("pod") != pod["metadata"]["uid"]:
            told |= {"pod": pod["metadata"]["uid"], "part": -1}
        for number, data in parts_in(lines):
            if number > told["part"]:
                for header, content in Frames().feed(data):
                    _apply(replica, header, content)
                told["part"] = number


def _updating(folder: RunFolder, fresh_s: float = _FRESH_S) -> contextlib.AbstractContextManager[Update]:
    return updating(folder, fresh_s, f"run {folder.run_id}: changes from its pod can't be stored")


def _apply(replica: Replica, header: Header, data: bytes) -> bool:
    """Apply a pod's change to the run's folder. Return whether it was last."""
    if header.get("over"):
        return True
    known = replica.known.get(header.get("file", ""))
    if header.get("how") == "append" and known is not None and known[2] in (0, header["ino"]):
        # The pod's log may contain data that a connection has already delivered. Drop the part that the local file has.
        done = min(len(data), max(0, known[0] - header["at"]))
        header, data = {**header, "at": header["at"] + done}, data[done:]
    replica.apply(header, data)
    return False


def send_archive(connection: Connection, archive: Path) -> None:
    """Send the bytes of the run's archive that the pod lacks.

    Raises:
        OSError, EOFError: The connection is broken; another call continues where this call stopped.
    """
    connection.send_bytes(message({"what": "put"}))
    have = int(json.loads(connection.recv_bytes(_MESSAGE_BYTES))["have"])
    if have < 0:
        return
    with open(archive, "rb") as file:
        file.seek(have)
        while piece := file.read(_PIECE):
            connection.send_bytes(piece)
    connection.recv_bytes(_MESSAGE_BYTES)


def request_cancel(connection: Connection, request: Noted) -> None:
    """Send a cancel request to pod 0."""
    connection.send_bytes(message({"what": "cancel", "request": request}))
    connection.recv_bytes(_MESSAGE_BYTES)


class PodChannel:
    """A channel for `paceline exec` through a connection to pod 0."""

    def __init__(self, connection: Connection) -> None:
        self.is_over = False
        self._connection = connection
        # Two threads may call `send` and `close` at the same time.
        self._guard = threading.Lock()

    def begin(self, request: ExecRequest) -> None:
        self._connection.send_bytes(message({"what": "exec", "request": request}))

    def send(self, one: ExecMessage) -> None:
        with self._guard, contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps([one]).encode())

    def receive(self) -> list[ExecMessage]:
        found: list[ExecMessage] = []
        try:
            while not self.is_over and self._connection.poll(0):
                found += json.loads(self._connection.recv_bytes(_MESSAGE_BYTES))
        except (EOFError, OSError):
            self.is_over = True
        return found

    def close(self) -> None:
        with self._guard, contextlib.suppress(OSError):
            self._connection.close()


#: Path of a run's folder -> this process's connection to the run's pod of index 0, which stays open for the next read.
_mirrors: dict[str, PodMirror] = {}
_guard = threading.Lock()


def kept_mirror(folder: RunFolder) -> PodMirror | None:
    with _guard:
        return _mirrors.get(os.fspath(folder.path))


def keep_mirror(folder: RunFolder, mirror: PodMirror | None) -> None:
    """Keep `mirror` as the run's open connection (None: no connection). Close the previous connection."""
    with _guard:
        earlier = _mirrors.pop(os.fspath(folder.path), None)
        if mirror is not None:
            _mirrors[os.fspath(folder.path)] = mirror
    if earlier is not None:
        earlier.close()


class PodForwards:
    """A function that connects to several pods in turn.

    Attributes:
        pods: Names of the pods that answer now.
    """

    def __init__(self, cluster: Cluster, port: int, say: Callable[[str], None]) -> None:
        self._cluster, self._port, self._say = cluster, port, say
        self.pods: Sequence[str] = ()
        self._turns = itertools.count()

    def __call__(self) -> socket.socket:
        """Return a socket that is connected to the next pod.

        Raises:
            ConnectionError: No pod answers now, or this pod does not.
            TargetError: The user may not forward ports.
        """
        if not (pods := self.pods):
            raise ConnectionError("no pod answers")
        try:
            return open_port(self._cluster, pods[next(self._turns) % len(pods)], self._port)
        except (EngineError, TargetError) as error:
            if isinstance(error, EngineError) or getattr(error, "code", 0) == 404:
                raise ConnectionError(str(error)) from error
            self._say(f"a request can't reach the pods: {error}")
            raise
