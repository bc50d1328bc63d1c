"""JupyterLab in a session, which listens on the loopback address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from typing import Any

from paceline.errors import JobError
from paceline.sessions import TOKEN_VARIABLE, Serving, private_folder, serving_line

#: Seconds after the start of JupyterLab within which it must answer a request.
_START_S = 120.0
_LOOK_S = 0.05


class Jupyter:
    """A running JupyterLab.

    Raises:
        JobError: JupyterLab is not installed, or does not start.
    """

    def __init__(self) -> None:
        if find_spec("jupyterlab") is None:
            raise JobError(
                "JupyterLab is not installed in the session's environment. Add it: paceline dev --pip jupyterlab. Or start "
                "another kind of session: --shell or --ssh."
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        words = ["--no-browser", "--ip=127.0.0.1", f"--port={self._port}", "--ServerApp.port_retries=0"]
        # Accept requests through the tunnel: their Origin header has the tunnel's port, not the server's.
        words += ["--ServerApp.local_hostnames=127.0.0.1", "--ServerApp.root_dir=" + os.getcwd()]
        if os.geteuid() == 0:
            words.append("--allow-root")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.sessions.lab", *words],
            stdin=subprocess.DEVNULL,
            # Use a private folder: if several nodes share the home, files of a killed server and its kernels would remain there.
            env={**os.environ, "JUPYTER_RUNTIME_DIR": str(private_folder())},
        )
        self._last = ""
        deadline = time.monotonic() + _START_S
        # Check who owns the port: another user's program could take the port first, and learn the token from a request.
        while not _is_mine(self._port) or self._asked("/api/status") is None:
            self.check()
            if time.monotonic() > deadline:
                raise JobError(f"JupyterLab has not answered within {_START_S:g} s. Its log above says why.")
            time.sleep(_LOOK_S)
        print(serving_line(Serving(kind="jupyter", at=str(self._port))), flush=True)

    def check(self) -> None:
        """Raise an error if JupyterLab has ended.

        Raises:
            JobError: JupyterLab has ended.
            SystemExit: The user has shut JupyterLab down in its menu.
        """
        if (code := self._process.poll()) == 0:
            raise SystemExit(0)
        if code is not None:
            raise JobError(f"JupyterLab has ended with exit code {code}. Its log above says why.")

    def was_used(self) -> bool:
        """Return whether a kernel computes, or a kernel or terminal was used since the last call."""
        kernels, terminals = self._asked("/api/kernels") or [], self._asked("/api/terminals") or []
        last = max((str(one.get("last_activity")) for one in (*kernels, *terminals)), default="")
        is_new, self._last = last > self._last, max(last, self._last)
        return is_new or any(kernel.get("execution_state") == "busy" for kernel in kernels)

    def close(self) -> None:
        """End JupyterLab. The run ends the processes of its kernels."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _asked(self, path: str) -> Any:
        request = urllib.request.Request(
            # Without no_track_activity, JupyterLab would count this request as activity of the user.
            f"http://127.0.0.1:{self._port}{path}?no_track_activity=1",
            headers={"Authorization": f"token {os.environ.get(TOKEN_VARIABLE, '')}"},
        )
        try:
            # Ignore proxies that environment variables set, because the server is on this machine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=5.0) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None


def _is_mine(port: int) -> bool:
    """Return whether a program of this user listens at a port of this machine."""
    with open("/proc/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file]
    # In /proc/net/tcp, the state 0A means that a socket listens.
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" and int(row[7]) == os.geteuid() for row in rows[1:])
