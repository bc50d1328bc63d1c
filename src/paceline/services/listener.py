"""The listening socket of a service, and a relay of connections to a remote server.

The supervisor holds the socket, so clients wait while no server runs. The relay connects each client to the current
remote server. After an update, old connections stay with the old server, and new connections go to the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable
from typing import TypeAlias

from paceline.errors import ServiceError, TargetError
from paceline.system.listening import listen_at

#: Maximum number of connections that wait to be accepted. The kernel's limit (net.core.somaxconn) may be lower.
_BACKLOG = 4096

#: Address of a server: the path of a Unix socket, or (host, port).
Place: TypeAlias = "str | tuple[str, int]"

_CHUNK = 1 << 16
#: Seconds that a client's connection waits for a server to start.
_PATIENCE_S = 300.0
_PAUSE_S = 0.05


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host and port (0: any free port).

    Raises:
        ServiceError: The port is taken or forbidden, or the host is not an address of this machine.
    """
    try:
        return listen_at(host, port, _BACKLOG)
    except socket.gaierror as error:
        raise ServiceError(f"host={host!r}: {error.strerror or error}. Name an address of this machine.") from error
    except OSError as error:
        raise ServiceError(_reason(error, host, port)) from error


def check_free(host: str, port: int) -> None:
    """Raise ServiceError unless a service could listen at this host and port."""
    open_listener(host, port).close()


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port={port} of {host} is taken by another program. Name another port, or 0 for a free one."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port={port} of {host} is not for user {os.geteuid()}. Name one from 1024 on, or 0 for a free one."
    return f"{host}, port {port}: {error.strerror or error}. Name an address of this machine."


class ConnectionRelay:
    """A thread that relays client connections to a server on another machine.

    place: The server's address, or a function that connects to the server and returns the socket. While it is None, clients
        wait. If the function raises OSError, it is called again. If it raises TargetError, the client's connection is closed.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.place: Place | Callable[[], socket.socket] | None = None
        self._listener = listener.dup()
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        #: References that keep the tasks alive: asyncio itself has only weak references to tasks.
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """The number of client connections that are open now."""
        return len(self._tasks)

    def close(self) -> None:
        """Close all connections and this thread's copy of the listening socket."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._lead, sock=self._listener)
        await self._ended.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _lead(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            with contextlib.suppress(TargetError):
                reader, writer = await self._connected()
                try:
                    await asyncio.gather(_pump(from_client, writer), _pump(reader, to_client))
                finally:
                    writer.close()
        finally:
            self._tasks.discard(task)
            to_client.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        end_s = self._loop.time() + _PATIENCE_S
        while self._loop.time() < end_s:
            place = self.place
            with contextlib.suppress(OSError):
                if callable(place):
                    return await asyncio.open_connection(sock=await self._loop.run_in_executor(None, place))
                if isinstance(place, str):
                    return await asyncio.open_unix_connection(place)
                if place is not None:
                    return await asyncio.open_connection(*place)
            await asyncio.sleep(_PAUSE_S)
        raise TargetError("the service's server did not start in time.")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        # Close only this direction: the other side may still send data.
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()
