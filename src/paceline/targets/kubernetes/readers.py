"""Connect the submitting machine to a run's pod.

<run folder>/mirrored.json    {"known": stamps of the arrived files, "pod": uid of the pod whose log was read, "part": N}
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import EngineError, TargetError
from paceline.remote.replica.apply import Replica, ReplicaError
from paceline.remote.staging.stage_out_local import is_over, take_record
from paceline.remote.wire import Frames, Header, WireError
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import ExecMessage, ExecRequest
from paceline.system import locks
from paceline.system.files import read_json, write_json
from paceline.system.handshake import prove_as_client
from paceline.targets.kubernetes.forward import open_port, relay
from paceline.targets.kubernetes.manifests import CONTAINER
from paceline.targets.kubernetes.ticket import Noted, message, parts_in

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster
    from paceline.targets.kubernetes.objects import Pod

#: Seconds for which the local copy of a run's folder counts as up to date.
_FRESH_S = 0.5
_STATE, _LOCK = "mirrored.json", "mirror.lock"
_MESSAGE_BYTES = 1 << 30
_PIECE = 1 << 20
#: Seconds without an answer after which a connection counts as broken.
_SILENCE_S = 30


def connect(cluster: Cluster, pod: str, port: int, key: str) -> Connection:
    """Return a connection to a pod that has proved to know the run's key.

    Raises:
        EngineError: The API, the pod or its port can't be reached.
        ApiRefusedError: The user may not forward ports.
    """
    opened = open_port(cluster, pod, port)
    ours, theirs = socket.socketpair()
    # Wait a limited time for data, because the pod may be killed. `settimeout` would make the descriptor non-blocking.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _SILENCE_S, 0))
    relay(theirs, opened)
    try:
        return prove_as_client(ours, bytes.fromhex(key))
    except ConnectionError as error:
        raise EngineError(f"{cluster.title}: pod {pod} does not answer at port {port}: {error}.") from error


def has_all(folder: RunFolder) -> bool:
    """Return whether the run's final record, the last file, has arrived."""
    return is_over(folder) or store.has_ended(folder)


class PodMirror:
    """A connection to a run's pod 0, used to update the local run folder."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        connection.send_bytes(message({"what": "pull"}))

    def pull(self, folder: RunFolder) -> None:
        """Fetch the changes since the last update, unless another process is fetching them.

        Raises:
            OSError, EOFError: The connection is broken.
            TargetError: The pod sends a change that can't be applied to the run's folder.
        """
        with _updating(folder) as told:
            if told is None:
                return
            with _applying(folder, told) as replica:
                self._connection.send_bytes(message({"known": replica.known}))
                frames, is_done = Frames(), False
                while not is_done:
                    for header, data in frames.feed(self._connection.recv_bytes(_MESSAGE_BYTES)):
                        is_done |= _apply(replica, header, data)
            told["time"] = time.time()
            if has_all(folder):
                self._connection.send_bytes(message({"bye": True}))

    def close(self) -> None:
        self._connection.close()


def read_log(cluster: Cluster, folder: RunFolder, pod: Pod) -> None:
    """Update the local copy of the run's folder from a pod's log.

    Raises:
        EngineError, ApiRefusedError: The log can't be read.
    """
    with _updating(folder) as told:
        if told is None:
            return
        lines = cluster.log(pod["metadata"]["name"], CONTAINER).decode(errors="replace").splitlines()
        if told.get("pod") != pod["metadata"]["uid"]:
            told |= {"pod": pod["metadata"]["uid"], "part": -1}
        for number, data in parts_in(lines):
            if number > told["part"]:
                with _applying(folder, told) as replica:
                    for header, content in Frames().feed(data):
                        _apply(replica, header, content)
                told["part"] = number
        told["time"] = time.time()


@contextlib.contextmanager
def _updating(folder: RunFolder) -> Iterator[dict[str, Any] | None]:
    """Lock the run's folder. Yield `mirrored.json` to modify, or None if up to date."""
    with locks.locked(folder.path / _LOCK):
        told: dict[str, Any] = read_json(folder.path / _STATE) or {"known": {}}
        if 0 <= time.time() - told.get("time", 0.0) < _FRESH_S or has_all(folder):
            yield None
            return
        try:
            yield told
        finally:
            write_json(folder.path / _STATE, told)


@contextlib.contextmanager
def _applying(folder: RunFolder, told: dict[str, Any]) -> Iterator[Replica]:
    replica = Replica(folder.path, lambda record: take_record(folder, record), told["known"])
    replica.known.pop(folder.state.name, None)  # always fetch the state file: this machine's copy may have changed
    try:
        yield replica
    except (ReplicaError, WireError) as error:
        raise TargetError(f"run {folder.run_id}: changes from its pod can't be stored: {error}.") from error
    finally:
        replica.close()
        told["known"] = replica.known


def _apply(replica: Replica, header: Header, data: bytes) -> bool:
    """Apply a pod's change to the local copy. Return whether it was the last change."""
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
    """Send the bytes of the run's archive that the pod does not have yet.

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
    """Send a cancel request to pod 0, which writes it into the run's folder."""
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
    """Cache `mirror` as the run's connection (None: no connection). Close the previous connection."""
    with _guard:
        earlier = _mirrors.pop(os.fspath(folder.path), None)
        if mirror is not None:
            _mirrors[os.fspath(folder.path)] = mirror
    if earlier is not None:
        earlier.close()
