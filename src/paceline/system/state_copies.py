"""Copy training states to the memory of another node, over TCP.

    worker                                           keeper of states on the next node
    mutual challenge (`paceline.system.handshake`)
    {"of": State, "size": bytes}                ->   checks the fields, and the free memory
    "", or the reason of a refusal              <-
    tag of a piece, the piece; and so on        ->   fills shared memory
    "", or the reason of a refusal              <-   keeps the state (`paceline.system.kept_states`)

Messages have the format of `multiprocessing.connection`. A piece's tag also covers the State and the offset.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Callable

from paceline.system.kept_states import PARALLEL, checked
from paceline.system.memory import memory
from paceline.system.spare_client import address_file

# Don't import typing, which is slow: each worker loads this module in addition to its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from paceline.system.kept_states import State

_log = logging.getLogger(__name__)
_PIECE, _LONGEST_TEXT = 4 << 20, 1 << 16
#: Timeouts in seconds: for opening a connection, and for each message.
_CONNECT_S, _MESSAGE_S = 5.0, 20
#: Failures in a row after which no more training states are copied to other nodes; seconds to pause after each.
_MOST_FAILURES, _PAUSE_S = 5, 10.0
#: Free memory in bytes that must remain on a node that receives a state.
FREE_BYTES = 1 << 30
_TOKEN = re.compile(r"[0-9a-f]{1,64}")


class StateSender:
    """A sender of this rank's training states to the next node's keeper process.

    Attributes:
        seconds: How long the last copy took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._connection: Connection | None = None
        self._failures, self._next_s = 0, 0.0

    def send(self, spare: str, key: bytes, state: State, data: memoryview) -> bool:
        """Copy a training state to the next node. Return whether that node kept it.

        Send nothing if the next node's address is unknown, soon after a failure, or after several. key: the run's secret.
        """
        path = address_file(spare)
        if self._failures >= _MOST_FAILURES or time.monotonic() < self._next_s or not os.path.exists(path):
            return False
        began_s = time.monotonic()
        try:
            self._connection = self._connection or _connected(path, key)
            _send(self._connection, key, state, data)
        except (OSError, EOFError, ValueError) as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._failures += 1
            self._next_s = time.monotonic() + _PAUSE_S
            if self._failures == _MOST_FAILURES:
                _log.warning("the last steps are not copied to another node: %s", error or type(error).__name__)
            return False
        self._failures, self.seconds = 0, time.monotonic() - began_s
        return True


def _connected(path: str, key: bytes) -> Connection:
    # Import this module only here, because its import is slow, and most workers copy no state.
    from paceline.system.handshake import authenticate

    with open(path, encoding="utf-8") as file:
        host, port = json.load(file)
    connected = socket.create_connection((host, port), timeout=_CONNECT_S)
    _limit_waits(connected)
    return authenticate(connected, key, is_client=True)


def _limit_waits(connected: socket.socket) -> None:
    # Let the kernel limit the waits: `settimeout` would make the socket non-blocking, which `multiprocessing` can't use.
    connected.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _MESSAGE_S, 0))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: Connection, key: bytes, state: State, data: memoryview) -> None:
    from paceline.system.handshake import tag

    header = json.dumps({"of": state, "size": len(data)})
    connection.send_bytes(header.encode())
    _accepted(connection)
    for offset in range(0, len(data), _PIECE):
        piece = data[offset : offset + _PIECE]
        connection.send_bytes(tag(key, _purpose(header, offset), piece))
        connection.send_bytes(piece)
    _accepted(connection)


def _accepted(connection: Connection) -> None:
    if refusal := connection.recv_bytes(_LONGEST_TEXT):
        raise OSError(0, f"the next node refuses them: {refusal.decode(errors='replace')}")


def _purpose(header: str, offset: int) -> str:
    return f"state {header} at {offset}"


def receive_states(
    connected: socket.socket, key: bytes, folder: str, keep: Callable[[State, int], object], tell: Callable[[str], None]
) -> None:
    """Receive a worker's training states until the worker closes the connection.

    Args:
        connected: A new connection, from which no byte was read. This function closes the connection.
        key: The run's secret.
        folder: The only folder of checkpoints whose states are accepted, also for models of `parallelize`.
        keep: Called with each state and the descriptor of its memory, which `keep` closes.
        tell: Called with the reason of a refusal.
    """
    from paceline.system.handshake import authenticate
    from paceline.system.listening import keep_alive

    _limit_waits(connected)
    keep_alive(connected)
    try:
        connection = authenticate(connected, key, is_client=False)
    except ConnectionError as error:
        tell(f"a connection is refused: {error}")
        return
    with connection:
        try:
            # Wait without a limit, because a worker may pause between two states for longer than a message may take.
            while connection.poll(None):
                _receive(connection, key, folder, keep)
        except EOFError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            tell(f"a copy of a state is refused: {error}")


def _receive(connection: Connection, key: bytes, folder: str, keep: Callable[[State, int], object]) -> None:
    from paceline.system.handshake import TAG_BYTES, is_tag

    header = connection.recv_bytes(_LONGEST_TEXT).decode()
    try:
        state, size = _valid(json.loads(header), folder)
        # The file is empty and takes memory only for bytes that arrive, so a wrong `size` does no harm.
        fd = os.memfd_create("paceline-state", os.MFD_CLOEXEC)
    except (OSError, ValueError, KeyError, TypeError) as error:
        connection.send_bytes(str(error).encode()[:_LONGEST_TEXT])
        raise
    try:
        connection.send_bytes(b"")
        for offset in range(0, size, _PIECE):
            signature = connection.recv_bytes(TAG_BYTES)
            piece = connection.recv_bytes(_PIECE)
            if len(piece) != min(_PIECE, size - offset) or not is_tag(signature, key, _purpose(header, offset), piece):
                raise ValueError(f"the bytes from {offset} on are not those that the worker has signed")
            os.pwrite(fd, piece, offset)
    except BaseException:
        os.close(fd)
        raise
    keep(state, fd)
    connection.send_bytes(b"")


def _valid(told: object, folder: str) -> tuple[State, int]:
    if not isinstance(told, dict) or told.keys() != {"of", "size"} or type(told["size"]) is not int:
        raise ValueError("the message has other fields")
    state, size = checked(told["of"]), told["size"]
    if state["folder"] not in (folder, f"{folder}/{PARALLEL}"):
        raise ValueError(f"the folder {state['folder']!r} is not the run's folder of checkpoints, {folder!r}")
    if state["step"] < 0 or not 0 <= state["rank"] < state["of"] or not _TOKEN.fullmatch(state["token"]):
        raise ValueError("step, rank or token are out of range")
    if size < 1:
        raise ValueError(f"the size {size} is less than 1 byte")
    if (free := memory().available) < size + FREE_BYTES:
        raise ValueError(
            f"{size >> 20} MiB, with {FREE_BYTES >> 20} MiB to spare, do not fit into the {free >> 20} MiB of free memory"
        )
    return state, size
