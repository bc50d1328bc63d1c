"""Messages between `paceline exec` and a command behind a login host: one ssh, for as long as the command runs.

Its far end (`login_helper.execute`) writes and reads the files by which the run's supervisor is talked to. When this program
goes, however it does, the connection ends with it, and by that the command.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import threading
import time
from typing import Any

from paceline.errors import PacelineError
from paceline.targets.slurm.login import Login

_ALIVE_S = 1.0
#: Pieces of the output that wait to be read here; then the far side waits.
_AHEAD = 64


class LoginPassage:
    """A `paceline.runs.passage.Passage` through the login host. run_dir: the run's folder there."""

    def __init__(self, login: Login, run_dir: str) -> None:
        self.is_over = False
        self._login, self._run_dir = login, run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._came: queue.Queue[bytes | PacelineError | None] = queue.Queue(_AHEAD)
        self._rest = b""
        self._alive_at = 0.0
        self._is_closed = False

    def begin(self, request: dict[str, Any]) -> None:
        asked = {"op": "exec", "run_dir": self._run_dir, "name": secrets.token_hex(6), "request": request}
        self._process, mark = self._login.open(asked)
        threading.Thread(target=self._listen, args=(self._process, mark), daemon=True).start()

    def tell(self, told: dict[str, Any]) -> None:
        self._write(json.dumps(told).encode())

    def heard(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        if now - self._alive_at > _ALIVE_S:
            self._alive_at = now
            self._write(b"")
        found: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            while not self.is_over:
                came = self._came.get_nowait()
                if isinstance(came, PacelineError):
                    raise came
                if came is None:
                    self.is_over = True
                    break
                *lines, self._rest = (self._rest + came).split(b"\n")
                found += map(json.loads, lines)
        return found

    def close(self) -> None:
        self._is_closed = True
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # by which the far side knows
        # The thread that reads may wait for room in the queue; then it sees that this side has closed.
        with contextlib.suppress(queue.Empty):
            while True:
                self._came.get_nowait()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it is over
                self._process.stdin.write(line + b"\n")
                self._process.stdin.flush()

    def _listen(self, process: subprocess.Popen[bytes], mark: str) -> None:
        def take(header: dict[str, Any], data: bytes) -> None:
            if not self._is_closed:
                self._came.put(data)

        end: PacelineError | None = None
        try:
            self._login.take(process, mark, take)
        except PacelineError as error:
            end = error
        except (OSError, ValueError):
            pass  # this side has closed it
        if not self._is_closed:
            self._came.put(end)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
