"""Real servers for tests: a folder with a configuration and a script, and the group of processes that serves it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from paceline.serving.state import read_state

#: A timeout that only guards against hanging.
PATIENCE_S = 120.0

ECHO = """
import json
def init():
    pass
def run(data):
    return {"got": json.loads(data)}
"""


class Server:
    """A server that runs. client: at its address."""

    def __init__(self, folder: Path, pass_fds: Sequence[int] = ()) -> None:
        self.folder = folder
        self.log_file = folder / "log"
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                _command(folder), stdout=log, stderr=subprocess.STDOUT, cwd=folder, pass_fds=pass_fds
            )
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()

    @property
    def state(self) -> dict[str, Any]:
        return dict(read_state(self.folder) or {})

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def url(self) -> str:
        return f"{self.state['scheme']}://{self.state['host']}:{self.state['port']}"

    @property
    def client(self) -> httpx.Client:
        with self._lock:  # several threads may be the first to need the client
            if self._client is None:
                self._client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
            return self._client

    def score(self, body: Any = None, **options: Any) -> httpx.Response:
        """POST to /score. body: bytes or text unchanged, else as JSON."""
        if isinstance(body, (bytes, str)):
            return self.client.post("/score", content=body, **options)
        return self.client.post("/score", json=body, **options)

    def wait(self, is_so: Callable[[dict[str, Any]], Any], what: str = "") -> dict[str, Any]:
        """Wait until this holds for the state."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(self.state):
            assert time.monotonic() < deadline, f"{what}: {self.state}\n{self.log}"
            if self.process.poll() is not None and not is_so(self.state):
                raise AssertionError(f"the server has ended, {what}: {self.state}\n{self.log}")
            time.sleep(0.01)
        return self.state

    def configure(self, **changes: Any) -> None:
        """Write the configuration with these changes, and let the server read it."""
        write_config(self.folder, **changes)
        self.process.send_signal(signal.SIGHUP)

    def end(self) -> int:
        """SIGTERM, and the exit code."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "paceline.serving", str(folder / "config.json")]


def write_config(folder: Path, script: str | None = None, **changes: Any) -> dict[str, Any]:
    """Write the configuration of a folder with these changes, and return it. script: the text of score.py."""
    path = folder / "config.json"
    config: dict[str, Any] = {"name": "svc"}
    if path.exists():
        config = json.loads(path.read_text())
    if script is not None:
        (folder / "src").mkdir(parents=True, exist_ok=True)
        (folder / "src" / "score.py").write_text(textwrap.dedent(script))
        config |= {"entry_script": "score.py", "source_dir": "src"}
    config |= changes
    beside = folder / f".config.{os.getpid()}"
    beside.write_text(json.dumps(config))
    beside.replace(path)
    return config


@contextlib.contextmanager
def serving(folder: Path, script: str | None = None, *, ready: bool = True, **config: Any) -> Iterator[Server]:
    """A server of this script, ended afterwards with nothing left. ready: wait until it is."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, script, **config)
    server = Server(folder)
    try:
        if ready:
            server.wait(lambda state: state.get("state") == "ready", "waiting for it to be ready")
        yield server
    finally:
        server.end()


def refusal(folder: Path, script: str | None = None, **config: Any) -> str:
    """Why a server of this configuration does not start: the error of its state, with exit code 1."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, script, **config)
    done = subprocess.run(_command(folder), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    state = read_state(folder) or {}
    assert (done.returncode, state.get("state")) == (1, "failed"), (done, state)
    assert state["error"] in done.stderr
    return str(state["error"])
