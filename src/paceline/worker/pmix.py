"""Under srun: a worker's connection to Slurm's PMIx server, held open when the worker is gone.

Slurm takes a connection that ends without MPI_Finalize for a crash, and kills every worker of the step at once: in its
grace period, in the middle of a checkpoint, before it could say what went wrong. So the process that waits for a worker
stands between the two, and lets go when all workers have ended:

    worker ──tcp── the process that waits for it ──tcp── PMIx server in slurmstepd
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import MutableMapping

#: PMIX_SERVER_URI4 and its like: "pmix-server.35;tcp4://127.0.0.1:60663".
_URI = re.compile(r"(.*;tcp4://)([0-9.]+):(\d+)")
#: Among the flags in /proc/<pid>/stat (proc(5)): set when a process begins to end, before its files are closed.
_PF_EXITING = 0x4
_LOOK_S = 0.1


class PmixRelay:
    """Stands between one worker and its server, where the environment names one that can be relayed; changes it so that
    the worker finds this. To be made before the worker is forked.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        # Threads, all in the process that waits: one for each listener and two for each connection, one each way. What they share
        # is `_servers`, to which they only add and from which they only discard; both are atomic.
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        self._servers: set[socket.socket] = set()
        self._worker = 0
        for name, value in list(environment.items()):
            found = _URI.fullmatch(value) if name.startswith("PMIX_SERVER_URI") else None
            if found:
                port = self._listen((found[2], int(found[3])))
                environment[name] = f"{found[1]}127.0.0.1:{port}"

    def _listen(self, server: tuple[str, int]) -> int:
        if server not in self._listeners:
            self._listeners[server] = socket.create_server(("127.0.0.1", 0))
        return int(self._listeners[server].getsockname()[1])

    def leave(self) -> None:
        """Close the worker's copies of what belongs to its parent. Called in the worker."""
        # Kept open here, the listeners would still take connections when the parent, who answers them, is gone.
        for listener in self._listeners.values():
            listener.close()

    def start(self, worker: int) -> None:
        """Relay for this child. Called in the parent."""
        self._worker = worker
        for server, listener in self._listeners.items():
            _in_thread(self._accept, listener, server)

    def hold(self, folder: str, world_size: int) -> None:
        """Keep what the worker has left open, until the report of each worker's end is in this folder."""
        while self._servers and _ends(folder) < world_size:
            time.sleep(_LOOK_S)

    def _accept(self, listener: socket.socket, address: tuple[str, int]) -> None:
        while True:
            worker, _ = listener.accept()
            try:
                server = socket.create_connection(address)
            except OSError:
                worker.close()
                continue
            # PMIx sends a small message and waits for the answer; Nagle's algorithm would hold each back for some 40 ms.
            for end in (worker, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._servers.add(server)
            _in_thread(self._to_server, worker, server)
            _in_thread(self._to_worker, server, worker)

    def _to_server(self, worker: socket.socket, server: socket.socket) -> None:
        _copy(worker, server)
        if _is_ending(self._worker):
            return  # without a word: what is open stays so
        self._servers.discard(server)
        _shut(server)

    def _to_worker(self, server: socket.socket, worker: socket.socket) -> None:
        _copy(server, worker)
        self._servers.discard(server)
        _shut(worker)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _is_ending(pid: int) -> bool:
    """True if a child has ended or is just ending. The kernel says so before it closes what the child has open."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)


def _ends(folder: str) -> int:
    with os.scandir(folder) as found:
        return sum(entry.name.startswith("end_") and entry.name.endswith(".json") for entry in found)


def _in_thread(work: object, *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]
