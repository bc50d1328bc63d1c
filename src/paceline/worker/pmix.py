"""Under srun, relay a worker's connection to Slurm's PMIx server, to keep it open after the worker's end.

If a connection ends without MPI_Finalize, Slurm assumes a crash, and kills all workers of the step immediately, even
during a checkpoint or before they report errors. So the process that waits for a worker relays the worker's connection,
and closes the connection to the server when all workers have ended:

    worker ──tcp── the process that waits for it ──tcp── PMIx server in slurmstepd
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import MutableMapping

#: Pattern of the values of PMIX_SERVER_URI4 and similar variables, such as "pmix-server.35;tcp4://127.0.0.1:60663".
_URI = re.compile(r"(.*;tcp4://)([0-9.]+):(\d+)")
#: A flag in /proc/<pid>/stat, see proc(5). Linux sets it when a process starts to exit, before it closes the process's files.
_PF_EXITING = 0x4
_LOOK_S = 0.1


class PmixRelay:
    """A relay between a worker and its PMIx server.

    Create it before forking the worker, because it changes the environment so that the worker connects to the relay.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        # Several threads use the set `_servers` below without a lock, because adding and removing an item are atomic.
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
        """Close the worker's copies of the relay's sockets, in the forked worker."""
        # Close the worker's copies of the listeners. Otherwise they would accept connections after the relay's process has ended.
        for listener in self._listeners.values():
            listener.close()

    def start(self, worker: int) -> None:
        """In the parent process, relay the connections of the child process `worker`."""
        self._worker = worker
        for server, listener in self._listeners.items():
            _in_thread(self._accept, listener, server)

    def hold(self, folder: str, world_size: int) -> None:
        """Keep server connections open until all workers have reported their end in `folder`."""
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
            # PMIx exchanges small messages, each of which Nagle's algorithm would delay by some 40 ms. So switch it off.
            for end in (worker, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._servers.add(server)
            _in_thread(self._to_server, worker, server)
            _in_thread(self._to_worker, server, worker)

    def _to_server(self, worker: socket.socket, server: socket.socket) -> None:
        _copy(worker, server)
        if _is_ending(self._worker):
            return  # the worker is exiting, so leave its connections open
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
    """Return whether a child has ended or is exiting."""
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
