"""The life of a server with its model processes: serving, reloading, draining, ending.

SIGHUP    reads the configuration again. A new `revision` is loaded while the present revision serves, and then
          replaces it. If the revision is the same, limits, keys and the number of processes change without a restart
SIGTERM   answers all accepted requests, and ends the server. SIGINT does the same, with exit code 130
SIGUSR1   does the same as SIGTERM, but leaves the listening socket to another server that has inherited it
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import select
import signal
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from paceline.errors import ServingError
from paceline.serving import state
from paceline.serving.config import ServerConfig, read
from paceline.serving.front import connections
from paceline.serving.front.app import App
from paceline.serving.front.keys import read_keys
from paceline.serving.front.metrics import AccessLog
from paceline.serving.front.models import lay_out, verify
from paceline.serving.front.pool import LoadError, Pool
from paceline.serving.front.process import StartedModel

_log = logging.getLogger("paceline.serving")

#: Maximum number of connections at a time; and number of other file descriptors that the server reserves for itself.
_CONNECTIONS, _OTHER_FILES = 20000, 128
#: Seconds in which idle connections may still send a request while the server drains.
_IDLE_S = 0.5
_FLUSH_S = 0.2

#: Settings that can't change while a server listens; `_LIGHT`: settings that change without a reload of the model.
_FIXED = ("host", "listen_fd", "heartbeat_fd")
_LIGHT = (
    *("workers", "max_batch", "max_queue", "max_body_bytes", "timeout_s", "load_timeout_s", "keys_file", "tls_cert"),
    *("tls_key", "memory_limit_bytes", "log_level", "drain_s", "port", "allow_origins"),
)

_PAUSE_S = 1.0


def serve(
    config_file: Path,
    config: ServerConfig,
    keys: tuple[bytes, ...],
    listener: socket.socket,
    started: list[StartedModel],
    model_dir: str | None,
) -> int:
    """Run the server until a signal ends it. Return the exit code.

    started: Model processes that are already loading.
    model_dir: The value of AZUREML_MODEL_DIR.

    Raises:
        ServingError: The model can't be loaded, or the certificate can't be used.
    """
    group = ServerGroup(config_file, config, listener)
    if (factory := group.web.get_loop_factory()) is None:
        return asyncio.run(group.live(keys, started, model_dir))
    # `asyncio.run` accepts a loop factory only since Python 3.12, so create the loop here.
    loop = factory()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(group.live(keys, started, model_dir))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class ServerGroup:
    def __init__(self, config_file: Path, config: ServerConfig, listener: socket.socket) -> None:
        self._config_file, self._folder = config_file, config_file.parent
        self._config, self._listener = config, listener
        self._known = ("", 0)
        self._state = state.STARTING
        self._refused: state.Refusal | None = None
        self._is_ending = asyncio.Event()
        self._exit_code = 0
        self._hands_over = False
        self._reloads = asyncio.Event()
        self.pool = Pool(self._folder, self._write)
        self.access = AccessLog(2, config.log_level in ("debug", "info"))
        self.app = App(self.pool, config.name, self.access)
        self.web = uvicorn.Config(
            self.app,
            interface="asgi3",
            http=connections.protocol(_connection_limit(), self.app.note_refused),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        try:
            self.web.load()
        except (OSError, ssl.SSLError) as error:
            raise ServingError(
                f"tls_cert={config.tls_cert!r} and tls_key={config.tls_key!r} can't be used together: {error}."
            ) from error
        self._server = _Server(self.web)
        self.app.connections = self._server.server_state.connections

    async def live(self, keys: tuple[bytes, ...], started: Sequence[StartedModel], model_dir: str | None) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reloads.set)
        loop.add_signal_handler(signal.SIGTERM, self._is_ending.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGUSR1, self._hand_over)
        generation = self.pool.begin(self._config, model_dir, started)
        # Accept connections now that the model is loaded. If a supervisor opened the socket, clients wait in the socket's queue.
        web = self._accept() if self._config.heartbeat_fd is None else None
        background = [
            asyncio.ensure_future(each)
            for each in (self.pool.watch(), self._flush(), connections.watch(self.app.connections))
        ]
        if self._config.heartbeat_fd is not None:
            background.append(asyncio.ensure_future(send_heartbeats(self._config.heartbeat_fd)))
        self._write()
        ending = asyncio.ensure_future(self._is_ending.wait())
        try:
            first: list[asyncio.Future[Any]] = [generation.loaded, ending]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not self._is_ending.is_set():
                self._loaded(generation.loaded, keys)
                web = web or self._accept()
                reloading = asyncio.ensure_future(self._reload_when_asked())
                await ending
                reloading.cancel()
            if web is not None:
                await self._drain(web)
        finally:
            for task in (*background, ending):
                task.cancel()
            self._server.should_exit = True
            if web is not None:
                await web
            await self.pool.close()
            self.access.flush()
        self._state = state.STOPPED
        self._write()
        return self._exit_code

    def _interrupt(self) -> None:
        self._exit_code = 128 + signal.SIGINT
        self._is_ending.set()

    def _accept(self) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._server.serve(sockets=[self._listener]))

    def _loaded(self, loaded: asyncio.Future[None], keys: tuple[bytes, ...]) -> None:
        try:
            loaded.result()
        except LoadError as error:
            raise ServingError(str(error)) from error
        self.app.serve(self._config, keys)
        self._state = state.READY
        host, port = self._address()
        _log.info("serving %s at %s://%s:%d/score", self._config.name, self._scheme, _bracketed(host), port)
        # Exclude all present objects from garbage collection: they live as long as the server.
        gc.collect()
        gc.freeze()
        self._write()

    async def _reload_when_asked(self) -> None:
        while True:
            await self._reloads.wait()
            self._reloads.clear()
            revision = ""
            try:
                config = read(self._config_file)
                revision = config.revision
                await self._reload(config)
                self._refused = None
            except (ServingError, LoadError, OSError) as error:
                self.pool.give_up()
                self._refused = {"revision": revision, "error": str(error)}
                _log.error("the new configuration is not served, the one before goes on: %s", error)
            self._write()

    async def _reload(self, config: ServerConfig) -> None:
        before = self._config
        for name in _FIXED:
            if getattr(config, name) != getattr(before, name):
                raise ServingError(
                    f"{name} can't change from {getattr(before, name)!r} to {getattr(config, name)!r} while the server "
                    "runs. Stop it and start it again."
                )
        if config.port not in (0, before.port, self._address()[1]):
            raise ServingError(f"port can't change to {config.port} while the server runs. Stop it and start it again.")
        if (config.tls_cert is None) != (before.tls_cert is None):
            raise ServingError("TLS can't be switched on or off while the server runs. Stop it and start it again.")
        keys = read_keys(config.keys_file) if config.keys_file is not None else ()
        if config.tls_cert is not None and self.web.ssl is not None:
            try:
                self.web.ssl.load_cert_chain(config.tls_cert, config.tls_key)
            except ssl.SSLError as error:
                raise ServingError(f"tls_cert={config.tls_cert!r} can't be used: {error}.") from error
        if _loads_the_same(config, before):
            self.pool.adjust(config)
        else:
            await asyncio.get_running_loop().run_in_executor(None, verify, config)
            generation = self.pool.begin(config, lay_out(config, self._folder))
            await generation.loaded
            self.pool.switch()
        self._config = config
        self.access.is_on = config.log_level in ("debug", "info")
        self.app.serve(config, keys)
        _log.info("serving revision %r", config.revision)

    def _hand_over(self) -> None:
        self._hands_over = True
        self._is_ending.set()

    async def _drain(self, web: asyncio.Future[None]) -> None:
        while not (self._server.started or web.done()):
            await asyncio.sleep(0.005)
        self._state = state.DRAINING
        self.app.is_draining = True
        self._write()
        deadline = time.monotonic() + self._config.drain_s
        if not self._hands_over:
            while _has_waiting(self._listener) and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            # Give asyncio time to pass the last accepted connections to the server, before the server stops to listen.
            await asyncio.sleep(0.01)
        self._server.stop_listening()
        quiet_since = time.monotonic()
        while time.monotonic() < deadline and self.app.connections:
            if not self.pool.is_empty() or any(map(_is_busy, self.app.connections)):
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > _IDLE_S:
                break
            await asyncio.sleep(0.01)
        if not self.pool.is_empty():
            self.pool.cut_off()
            for _ in range(100):
                if self.pool.is_empty() and not any(map(_is_busy, self.app.connections)):
                    break
                await asyncio.sleep(0.01)

    @property
    def _scheme(self) -> str:
        return "http" if self._config.tls_cert is None else "https"

    def _address(self) -> tuple[str, int]:
        with contextlib.suppress(OSError):  # the socket is closed once the server has ended
            host, port, *_ = self._listener.getsockname()
            self._known = (str(host), int(port))
        return self._known

    def _write(self) -> None:
        shown = self._state
        if shown == state.READY and self.pool.ready is None:
            shown = state.UNREADY
        host, port = self._address()
        generations = [each for each in (self.pool.current, self.pool.next) if each is not None]
        state.write_state(
            self._folder,
            {
                "pid": os.getpid(),
                "scheme": self._scheme,
                "host": host,
                "port": port,
                "state": shown,
                "error": None,
                "revision": self._config.revision,
                "refused": self._refused,
                "workers": [
                    {"pid": each.pid, "state": each.state, "error": each.error, "revision": generation.config.revision}
                    for generation in generations
                    for each in generation.processes
                ],
            },
        )

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self.access.flush()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        for server in self.servers:
            server.close()


def _has_waiting(listener: socket.socket) -> bool:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def _is_busy(connection: Any) -> bool:
    cycle = connection.cycle
    if cycle is not None and not cycle.response_complete:
        return True
    return connection.timeout_keep_alive_task is None and connection.heard > 0


def _loads_the_same(one: ServerConfig, other: ServerConfig) -> bool:
    return all(
        getattr(one, each.name) == getattr(other, each.name)
        for each in dataclasses.fields(one)
        if each.name not in _LIGHT
    )


def _connection_limit() -> int:
    """Raise the limit on open files, and return how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(_CONNECTIONS, soft - _OTHER_FILES))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def send_heartbeats(fd: int) -> None:
    """Write a heartbeat byte into a pipe each second, until cancelled."""
    os.set_blocking(fd, False)
    while True:
        # An error means that the pipe is full or closed: the heartbeat is lost, and the server goes on.
        with contextlib.suppress(OSError):
            os.write(fd, b".")
        await asyncio.sleep(_PAUSE_S)
