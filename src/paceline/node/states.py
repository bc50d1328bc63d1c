"""Keep training states of this node and of another node in memory, and write them as checkpoints after a loss.

    python -m paceline.node.states SPARE HOST FOLDER REPORT    # prefix of socket paths, own address, checkpoints, result file

A run on several machines has such a process on each node. The process outlives attempts, and ends with Paceline's agent there.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

from paceline.job.job import Job
from paceline.job.plan import places
from paceline.runs.folder import RunFolder
from paceline.system import kept_states, listening, spare_client, state_copies
from paceline.system.files import write_json

_LOOK_S = 0.5
#: Timeout, in seconds, of a request from a process on this node.
_REQUEST_S = 10.0
#: Maximum number of messages to log: another node can influence their texts, and could otherwise fill the log.
_MOST_TOLD = 20


class StateKeeper:
    """A holder of training states in a node's memory."""

    def __init__(self, key: bytes, folder: str) -> None:
        self._states, self._lock = kept_states.KeptStates(), threading.Lock()
        self._key, self._folder = key, folder
        self._told: set[str] = set()

    def answer(self, connection: socket.socket) -> None:
        """Answer a local process's request to keep or return training states."""
        fds: list[int] = []
        with connection:
            connection.settimeout(_REQUEST_S)
            try:
                connection.sendall(b"+")
                fds, request = spare_client.read_request(connection)
                with self._lock:
                    self._states.answer(connection, request, fds)
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.tell(f"a request is refused: {error}")
            finally:
                for fd in fds:
                    os.close(fd)

    def receive(self, connected: socket.socket) -> None:
        """Keep the states that a worker on another node sends as copies."""
        state_copies.receive_states(connected, self._key, self._folder, self._keep, self.tell)

    def _keep(self, state: kept_states.State, fd: int) -> None:
        with self._lock:
            self._states.keep(state, fd)

    def tell(self, text: str) -> None:
        """Log a sentence, unless an earlier sentence differs only in its numbers."""
        if (kind := re.sub(r"\d+", "0", text)) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(kind)
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            print(f"{stamp}Z {socket.gethostname()}: states in memory: {text}", flush=True)


def main(argv: list[str]) -> None:
    """Hold training states until the parent process has ended."""
    if not sys.platform.startswith("linux"):
        return  # only on Linux can workers share memory with this process
    spare, host, folder, report = argv
    parent = os.getppid()
    key = bytes.fromhex(os.environ.pop(spare_client.KEY_VARIABLE))
    keeper = StateKeeper(key, folder)
    own = spare_client.listen(spare_client.socket_of(spare_client.keeper_of(spare)))
    threading.Thread(target=listening.accept_each, args=(own, keeper.answer), daemon=True).start()
    try:
        server = listening.listen_at(host, 0, 64)
    except OSError as error:  # behind NAT, no network interface has the node's address
        keeper.tell(f"no copies from another node, since {host} is no address here: {error.strerror or error}")
    else:
        threading.Thread(target=listening.accept_each, args=(server, keeper.receive), daemon=True).start()
        write_json(Path(report), {"port": server.getsockname()[1]})
    while os.getppid() == parent:
        time.sleep(_LOOK_S)


def rescue(job: Job, folder: RunFolder, node_rank: int, spare: str, lost: Collection[int]) -> dict[str, object]:
    """Write the newest states in this node's memory as checkpoints.

    If the previous node (by node rank) is in `lost`, also write the states of that node's ranks. Return {"steps": written steps}.

    lost: Node ranks of the lost nodes.
    """
    # Import this function here, because the process that runs `main` does not need it.
    from paceline.checkpoint.api import write_kept

    owners = {slot.rank: slot.node_rank for slot in places(job)}
    mine = {node_rank, *(owner for owner in lost if (owner + 1) % job.node_count == node_rank)}
    ranks = {rank for rank, owner in owners.items() if owner in mine}
    folders, keeper = (folder.checkpoints, folder.checkpoints / kept_states.PARALLEL), spare_client.keeper_of(spare)
    return {"steps": [step for place in folders for step in write_kept(keeper, place, ranks)]}


if __name__ == "__main__":
    main(sys.argv[1:])
