"""The front's side of a model process: its start, its socket and its open requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

from paceline.serving import wire
from paceline.serving.config import SOURCE_VARIABLE, ServerConfig
from paceline.system.detached_process import library_dir
from paceline.system.processes import core_count, kill_group

LOADING, READY, RETIRING, ENDED = "loading", "ready", "retiring", "ended"


class StartedModel:
    """A started model process, which may still be loading."""

    def __init__(
        self, config: ServerConfig, folder: Path, model_dir: str | None, output: IO[bytes] | None = None
    ) -> None:
        self.config = config
        placed = _placed(config, folder)
        self.at = time.monotonic()
        ours, its = socket.socketpair()
        with contextlib.ExitStack() as unless_started, its, tempfile.TemporaryFile(dir=folder) as shared:
            unless_started.callback(ours.close)
            shared.truncate(1)
            #: A byte of memory shared with the process: 1 if no client waits for the result.
            self.flag = mmap.mmap(shared.fileno(), 1)
            # Start a new interpreter instead of forking, because torch and CUDA do not survive a fork.
            self.process = subprocess.Popen(
                [
                    config.python or sys.executable,
                    "-m",
                    "paceline.serving.model",
                    str(its.fileno()),
                    str(shared.fileno()),
                ],
                pass_fds=[its.fileno(), shared.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=wire.STARTED_IN,
                env=_environment(placed, folder, model_dir),
                start_new_session=True,
            )
            unless_started.pop_all()
        ours.sendall(wire.json_frame(wire.SETUP, wire.ModelSetup(placed, str(folder / "shared")).to_json()))
        self.link = ours

    def end(self) -> None:
        """Kill the process and its children."""
        kill_group(self.process.pid)
        self.process.wait()
        self.link.close()


class ModelProcess(asyncio.Protocol):
    """The server's connection to a model process, with its state and open requests.

    on_change: Called with this object whenever the process gets ready, fails to load, answers or ends.
    on_reply: Called with the number and the response of each request.
    """

    def __init__(
        self,
        started: StartedModel,
        on_change: Callable[[ModelProcess], None],
        on_reply: Callable[[int, wire.Reply], None],
    ) -> None:
        self.config = started.config
        self.popen = started.process
        self.pid = started.process.pid
        self.started_at = started.at
        self.state = LOADING
        self.error: str | None = None
        self.documents: wire.Documents = {}
        self.kind = ""
        self.wants_head = False
        self.batch = 1
        self.load_s = 0.0
        #: Numbers of the requests that were sent to the process and are not answered yet.
        self.in_hand: Sequence[int] = ()
        self._unwanted: set[int] = set()
        self._flag = started.flag
        self.since = 0.0
        #: Reason for which the HTTP server ends this process; `cause`: the label of this reason in the metrics.
        self.reason: str | None = None
        self.cause = "died"
        #: Whether the process has to end without a replacement.
        self.is_retired = False
        #: True until the pool has noticed that this process is ready.
        self.is_new = True
        self._on_change, self._on_reply = on_change, on_reply
        self._got = bytearray()
        self._transport: asyncio.Transport

    async def listen(self, link: socket.socket) -> None:
        link.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=link)

    def give(self, calls: Sequence[tuple[int, bytes]]) -> None:
        """Send requests, as (number, encoded request), to the process, which must be idle."""
        self.in_hand = [number for number, _ in calls]
        self.since = time.monotonic()
        self._unwanted.clear()
        self._flag[0] = 0
        parts = [call for _, call in calls]
        self._transport.write(b"".join((wire.FRAME.pack(wire.CALLS, sum(map(len, parts))), *parts)))

    def forget(self, number: int) -> None:
        """Record that the client of a request has disconnected.

        Set a flag in shared memory once no client waits for any request that the model process is answering.
        """
        self._unwanted.add(number)
        if self._unwanted.issuperset(self.in_hand):
            self._flag[0] = 1

    @property
    def is_idle(self) -> bool:
        # A killed process may still count as READY although its socket has closed, so check the socket too.
        return self.state == READY and not self.in_hand and not self._transport.is_closing()

    def retire(self, reason: str) -> None:
        """End the process as soon as it is idle."""
        if self.state == ENDED:
            return
        self.state, self.reason, self.is_retired = RETIRING, self.reason or reason, True
        if not self.in_hand:
            self.kill(reason)

    def kill(self, reason: str) -> None:
        self.reason = self.reason or reason
        kill_group(self.pid)

    def kill_for(self, cause: str, reason: str) -> None:
        self.cause = cause
        self.kill(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        got = self._got
        got += data
        while len(got) >= wire.FRAME.size:
            kind, size = wire.FRAME.unpack_from(got)
            end = wire.FRAME.size + size
            if len(got) < end:
                return
            payload = bytes(memoryview(got)[wire.FRAME.size : end])
            del got[:end]
            self._take(kind, payload)

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == wire.REPLIES:
            self.in_hand = ()
            for number, reply in wire.unpack_replies(payload):
                self._on_reply(number, reply)
            if self.state == RETIRING:
                self.kill(self.reason or "retired")
        elif kind == wire.READY:
            loaded = wire.LoadedModel(**json.loads(payload))
            self.kind, self.wants_head, self.documents = loaded.kind, loaded.wants_head, loaded.documents
            self.batch = self.config.max_batch if loaded.is_batched else 1
            self.load_s = time.monotonic() - self.started_at
            if self.state == LOADING:
                self.state = READY
        elif kind == wire.FAILED:
            self.error = json.loads(payload)["error"]
        self._on_change(self)

    def connection_lost(self, exc: Exception | None) -> None:
        # The process may have closed the socket without ending, so kill it.
        kill_group(self.pid)
        # Wait for the process's end: the kernel closes the socket before it frees the memory, which may take long.
        _after(0, self._wait_for_end)

    def _wait_for_end(self) -> None:
        code = self.popen.poll()
        if code is None:
            _after(0.002, self._wait_for_end)
            return
        was_loading = self.state == LOADING
        self.state = ENDED
        if self.reason is None:
            self.reason = ending(code)
        if was_loading and self.error is None:
            self.error = f"the model process ended while it was loading ({self.reason}); its log may say why."
        self._on_change(self)

    def resident_bytes(self) -> int:
        """Return the process's resident memory in bytes, or 0 if unknown."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0


def _after(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


def ending(code: int) -> str:
    """Describe how a process ended, by its return code as in `subprocess`."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def _placed(config: ServerConfig, folder: Path) -> ServerConfig:
    """Return the configuration, with the working directory that the Azure SDK gives scripts.

    The directory is a new folder with links to the script's source folder and to its files. So the script can open
    `./<source>/file`. Without the variable AZUREML_SOURCE_DIRECTORY, return `config` unchanged.
    """
    name = config.environment.get(SOURCE_VARIABLE)
    if not name or config.source_dir is None or config.working_dir is not None:
        return config
    if name != os.path.basename(os.path.normpath(f"/{name}")):
        return config  # AZUREML_SOURCE_DIRECTORY names nested folders, for which no link is made
    # Give each source its own folder, because two revisions are served at the same time during an update.
    root = folder / "shared" / f"app-{zlib.crc32(config.source_dir.encode()):08x}"
    root.mkdir(parents=True, exist_ok=True)
    for link, target in {
        **{each: os.path.join(config.source_dir, each) for each in os.listdir(config.source_dir)},
        name: config.source_dir,
    }.items():
        with contextlib.suppress(FileExistsError):
            os.symlink(target, root / link)
    return replace(config, source_dir=str(root / name), working_dir=str(root))


def _environment(config: ServerConfig, folder: Path, model_dir: str | None) -> Mapping[str, str]:
    environment = {**os.environ, **config.environment}
    threads = config.threads or max(1, core_count() // config.workers)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment["PYTHONUNBUFFERED"] = "1"
    root = config.working_dir or config.source_dir or str(folder)
    environment.setdefault("AML_APP_ROOT", root)
    if config.entry_script is not None:
        environment["AZUREML_ENTRY_SCRIPT"] = os.path.relpath(
            os.path.join(str(config.source_dir), config.entry_script), root
        )
    if model_dir is not None:
        environment["PACELINE_MODEL_DIR"] = environment["AZUREML_MODEL_DIR"] = model_dir
    environment.pop("__PYVENV_LAUNCHER__", None)
    if config.python is not None:
        # Let the model process import Paceline, but nothing else of the HTTP server's environment.
        path = [str(library_dir(folder)), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    return environment
