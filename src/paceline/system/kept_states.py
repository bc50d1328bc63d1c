"""Keep training states in a warm spare, an idle process that outlives the workers.

worker                                                      spare
{"state": "keep", "of": State}, descriptor of memory   ->   keeps the newest states of each rank
{"dropped": [steps]}                                   <-   the memory of these steps is free again
{"state": "give", "folder": folder}                    ->
[State, ...], their descriptors                        <-

The spare drops a state only when it has the next state. So no state is lost if a worker is killed while it saves.
"""

from __future__ import annotations

import json
import os
import socket

from paceline.system.spare_client import LENGTH, connect

# Don't import typing, which is slow: each worker loads this module, and so does the process that forks workers.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypedDict

    class State(TypedDict):
        """A training state of one rank.

        Attributes:
            folder: Folder of the run's checkpoints, or its subfolder for models of `parallelize`.
            of: Number of ranks that each have a part of the state.
            token: A text that identifies the attempt; all its ranks have the same text.
        """

        folder: str
        step: int
        rank: int
        of: int
        token: str


#: The subfolder of a run's checkpoints under which models of `parallelize` keep states, apart from `paceline.checkpoint`.
PARALLEL = "parallel"
_TYPES = {"folder": str, "step": int, "rank": int, "of": int, "token": str}
#: Maximum number of file descriptors in one message over a Unix socket.
_MOST = 200


class KeptStates:
    """The newest training states of each rank, which an idle process keeps."""

    def __init__(self) -> None:
        self._states: list[tuple[State, int]] = []

    def answer(self, connection: socket.socket, request: dict[str, object], fds: list[int]) -> None:
        """Answer a worker's request to keep or return training states.

        Raises:
            ValueError: The request is invalid.
            OSError: The worker is gone.
        """
        if request["state"] == "give":
            folder = request["folder"]
            found = [(state, fd) for state, fd in self._states if state["folder"] == folder][-_MOST:]
            connection.sendall(json.dumps([state for state, _ in found]).encode() + b"\n")
            socket.send_fds(connection, [b"1"], [fd for _, fd in found])
            return
        state = checked(request["of"])
        if len(fds) != 1:
            raise ValueError("a state has one descriptor")
        dropped = self.keep(state, os.dup(fds[0]))
        connection.sendall(json.dumps({"dropped": dropped}).encode() + b"\n")

    def keep(self, new: State, fd: int) -> list[int]:
        """Store a state and its descriptor. Return the steps of the rank's replaced states."""
        os.set_inheritable(fd, False)
        kept, dropped = [(new, fd)], []
        # Keep the last two steps of a state that is split over the ranks, because another rank may be a step behind.
        left = 1 if new["of"] > 1 else 0
        for state, other in reversed(self._states):
            is_own = state["folder"] == new["folder"] and state["rank"] == new["rank"]
            is_over = is_own and (not left or state["step"] == new["step"])
            if state["folder"] == new["folder"] and (state["of"] != new["of"] or is_over):
                os.close(other)
                if is_own and state["token"] == new["token"]:
                    dropped.append(state["step"])
                continue
            left -= is_own
            kept.append((state, other))
        self._states = kept[::-1]
        return dropped

    def close(self) -> None:
        """Close all states' descriptors. A fork that becomes a worker calls this."""
        for _, fd in self._states:
            os.close(fd)
        self._states = []


def checked(state: object) -> State:
    """Return a received object if it is a valid `State`.

    Raises:
        ValueError: The object is not a State.
    """
    if not isinstance(state, dict) or state.keys() != _TYPES.keys():
        raise ValueError("a state has other fields")
    if not all(type(state[name]) is kind for name, kind in _TYPES.items()):
        raise ValueError("a state's field has another type")
    return state  # type: ignore[return-value,unused-ignore]


def keep(path: str, state: State, fd: int) -> list[int]:
    """Store a training state in an idle process. Return the steps of replaced states.

    path: Prefix of the spare's sockets, from `spare_client.path_here`. fd: Descriptor of the memory with the state.

    Raises:
        OSError: There is no spare, or the spare does not answer.
    """
    with connect(path) as connection:
        _send(connection, {"state": "keep", "of": state}, [fd])
        answer = json.loads(connection.makefile("rb").readline() or b"{}")
        if "dropped" not in answer:
            raise OSError(0, answer.get("error", "the warm process ended"))
        return list(map(int, answer["dropped"]))


def give(path: str, folder: str) -> list[tuple[State, int]]:
    """Return the kept states of a checkpoint folder, each with its memory's descriptor.

    The caller closes the descriptors. path: Prefix of the spare's socket paths, from `spare_client.path_here`.

    Raises:
        OSError: There is no spare, or the spare does not answer.
    """
    with connect(path) as connection:
        _send(connection, {"state": "give", "folder": folder}, [])
        line = b""
        # Read byte by byte, so as not to read beyond the line: the next message carries the descriptors.
        while not line.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte:
                raise OSError(0, "the warm process ended")
            line += byte
        states = [checked(state) for state in json.loads(line)]
        _, fds, _, _ = socket.recv_fds(connection, 1, _MOST)
        if len(fds) != len(states):
            for fd in fds:
                os.close(fd)
            raise OSError(0, "the warm process gave other memory than it has")
        return list(zip(states, fds, strict=True))


def _send(connection: socket.socket, request: dict[str, object], fds: Sequence[int]) -> None:
    text = json.dumps(request).encode()
    socket.send_fds(connection, [LENGTH.pack(len(text))], fds)
    connection.sendall(text)
