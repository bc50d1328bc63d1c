"""One model process as the front sees it: its start, its socket, and the requests that it has in hand."""

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
from typing import IO, Any

from paceline.serving import wire
from paceline.serving.config import SOURCE_VARIABLE, ServerConfig
from paceline.system.detached_process import library_dir
from paceline.system.processes import core_count, kill_group

LOADING, READY, RETIRING, ENDED = "loading", "ready", "retiring", "ended"


class StartedModel:
    """A process that has been started, before there is a loop: it imports and loads while the front imports its own."""

    def __init__(
        self, config: ServerConfig, folder: Path, model_dir: str | None, output: IO[bytes] | None = None
    ) -> None:
        """output: where what it prints goes; None: where the server's own goes."""
        self.config = config
        placed = _placed(config, folder)
        self.at = time.monotonic()
        ours, its = socket.socketpair()
        with contextlib.ExitStack() as unless_started, its, tempfile.TemporaryFile(dir=folder) as shared:
            unless_started.callback(ours.close)
            shared.truncate(1)
            #: A byte that the process sees too: 1 where no client waits for what it computes.
            self.flag = mmap.mmap(shared.fileno(), 1)
            # Spawned, never forked: torch and CUDA do not survive a fork.
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
                # `python -m` looks for modules here first; there are none.
                cwd="/",
                env=_environment(placed, folder, model_dir),
                start_new_session=True,
            )
            unless_started.pop_all()
        setup = {**placed.to_json(), "started_in": "/", "shared": str(folder / "shared")}
        ours.sendall(wire.json_frame(wire.SETUP, setup))
        self.link = ours

    def end(self) -> None:
        """Kill it with what it has started."""
        kill_group(self.process.pid)
        self.process.wait()
        self.link.close()


class ModelProcess(asyncio.Protocol):
    """The front's end of the socket.

    told: called with this process at each change: it is ready, it has failed to load, it has answered, it is gone.
    answered: called with the number and the answer of each request.
    """

    def __init__(
        self,
        started: StartedModel,
        told: Callable[[ModelProcess], None],
        answered: Callable[[int, wire.Reply], None],
    ) -> None:
        self.config = started.config
        self.popen = started.process
        self.pid = started.process.pid
        self.started_at = started.at
        self.state = LOADING
        self.error: str | None = None
        self.documents: dict[str, Any] = {}
        self.kind = ""
        self.wants_head = False
        self.batch = 1
        self.load_s = 0.0
        #: Numbers of the requests that it has, and when it got them.
        self.in_hand: Sequence[int] = ()
        self._unwanted: set[int] = set()
        self._flag = started.flag
        self.since = 0.0
        #: Why it is to end, where the front has decided that, and of which kind that is, for the metrics.
        self.reason: str | None = None
        self.cause = "died"
        #: It ends by plan, and nothing takes its place.
        self.is_retired = False
        #: Nobody has been told yet that it is ready.
        self.is_new = True
        self._told, self._answered = told, answered
        self._got = bytearray()
        self._transport: Any = None

    async def listen(self, link: socket.socket) -> None:
        link.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=link)

    def give(self, calls: Sequence[tuple[int, bytes]]) -> None:
        """Hand requests over: number and packed call of each. It must have none in hand."""
        self.in_hand = [number for number, _ in calls]
        self.since = time.monotonic()
        self._unwanted.clear()
        self._flag[0] = 0
        parts = [call for _, call in calls]
        self._transport.write(b"".join((wire.FRAME.pack(wire.CALLS, sum(map(len, parts))), *parts)))

    def forget(self, number: int) -> None:
        """Tell the process, once this holds for all requests that it has in hand, that nobody waits for the answer."""
        self._unwanted.add(number)
        if self._unwanted.issuperset(self.in_hand):
            self._flag[0] = 1

    @property
    def is_idle(self) -> bool:
        # The socket of one that was killed may be closed a moment before that is told here.
        return self.state == READY and not self.in_hand and not self._transport.is_closing()

    def retire(self, reason: str) -> None:
        """End it as soon as it has nothing in hand."""
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
        self._transport = transport

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
                self._answered(number, reply)
            if self.state == RETIRING:
                self.kill(self.reason or "retired")
        elif kind == wire.READY:
            ready = json.loads(payload)
            self.kind, self.wants_head = ready["kind"], ready["wants_head"]
            self.documents = ready["documents"]
            self.batch = self.config.max_batch if ready["is_batched"] else 1
            self.load_s = time.monotonic() - self.started_at
            if self.state == LOADING:
                self.state = READY
        elif kind == wire.FAILED:
            self.error = json.loads(payload)["error"]
        self._told(self)

    def connection_lost(self, exc: Exception | None) -> None:
        # It may have closed the socket and live on.
        kill_group(self.pid)
        # Its socket is closed before its memory is given back, which takes a while where that is much.
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
        self._told(self)

    def resident_bytes(self) -> int:
        """What it has in memory; 0 where the system does not tell."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0


def _after(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


def ending(code: int) -> str:
    """How a process ended. code: as `subprocess` tells it."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def _placed(config: ServerConfig, folder: Path) -> ServerConfig:
    """Return the configuration with the script's folders laid out as the Azure SDK does, where it names the source's folder.

    There a script runs in the folder above its source, and opens `./<source>/file`. Its own files have links beside that.
    """
    name = config.environment.get(SOURCE_VARIABLE)
    if not name or config.source_dir is None or config.working_dir is not None:
        return config
    if name != os.path.basename(os.path.normpath(f"/{name}")):
        return config  # no folder's name
    # One folder for each source: while a service is updated, two revisions are served.
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
    """The variables of a model process. Those that the user has set are never replaced."""
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
        environment["AZUREML_MODEL_DIR"] = model_dir
    environment.pop("__PYVENV_LAUNCHER__", None)
    if config.python is not None:
        # Paceline alone rides along, and nothing else of the front's environment.
        path = [str(library_dir(folder)), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    return environment
