"""The server process of a service on this machine: `python -m paceline.serving`, with a configuration that is written anew
for each change.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from paceline.job.plan import NodeSetup
from paceline.launchers.environment import inherited, of_interpreter
from paceline.runs.failure import signal_name
from paceline.services.folder import MARK, ServiceFolder
from paceline.services.record import Revision, ServiceRecord
from paceline.services.revise import config_of
from paceline.serving.api import READY, read_state
from paceline.system import processes
from paceline.system.detached_process import library_dir
from paceline.system.files import PRIVATE, remove_tree, write_json

#: Added to the time that requests have to end in.
_STOP_S = 10.0
#: What is shown of a server's last words.
_LINES = 12

#: Silence after which a server is taken to hang. A guess: far above what a busy machine makes a process wait.
SILENT_S = 60.0


class Server:
    """One server process. tag: names a configuration in what the server says of itself."""

    def __init__(self, folder: ServiceFolder, listener: socket.socket) -> None:
        self._folder, self._listener = folder, listener
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._drain_s = 30.0
        self._heartbeat: Heartbeat | None = None

    @property
    def is_up(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> set[int]:
        """The processes that this one has started."""
        return set() if self._process is None else {self._process.pid}

    #: Whether `reload` is all that it needs for new keys.
    takes_keys = True
    #: Of a server on another machine: its run, and where that is.
    run_id: str | None = None
    note: str | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Start it with this revision.

        Raises:
            OSError: no process can be started, or nothing be written.
            ServingError: the server would refuse the configuration.
        """
        folder = self._folder
        remove_tree(folder.server)
        folder.server.mkdir(mode=0o700)
        if self._heartbeat is not None:  # of a start that came to nothing
            self._heartbeat.close()
        self._heartbeat = Heartbeat()
        self.keep(tag, record, revision, workers, setup)
        self._log_start = folder.log.stat().st_size if folder.log.exists() else 0
        variables = {name: text for name, text in os.environ.items() if name != processes.SUPERVISOR_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.serving", str(folder.server_config)],
            env={**inherited(variables), "PYTHONPATH": str(library_dir(folder.workspace_dir)), MARK: str(folder.path)},
            # Not the script's folder: its modules may have the names of the library's.
            cwd=folder.server,
            stdin=subprocess.DEVNULL,
            pass_fds=(self._listener.fileno(), self._heartbeat.fd),
            # A group of its own, by which what is left of it is found when it was killed.
            start_new_session=True,
            # SIGTERM: the requests in its hands are answered still.
            preexec_fn=processes.ends_with_parent(signal.SIGTERM),  # noqa: PLW1509 - no lock between fork and exec
        )
        self._heartbeat.handed_on()

    def change(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Let it serve this revision, in place of the present one once it is ready."""
        self.keep(tag, record, revision, workers, setup)
        self.reload()

    def keep(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Write the configuration, which is read at its start and with `reload`."""
        folder = self._folder
        shell = {**os.environ, "PYTHONPATH": os.environ.get("PACELINE_SHELL_PYTHONPATH", "")}
        config = config_of(
            folder,
            revision,
            workers=workers,
            python=setup.python,
            environment=of_interpreter(setup, revision.variables, library_dir(folder.workspace_dir), shell),
            host=record.host,
            port=record.port,
            listen_fd=self._listener.fileno(),
            beat_fd=None if self._heartbeat is None else self._heartbeat.fd,
            keys_file=str(folder.keys) if record.has_keys else None,
            tls_cert=record.tls_cert,
            tls_key=record.tls_key,
            revision=tag,
        )
        self._drain_s = config.drain_s
        # Variables in it may be secrets.
        write_json(folder.server_config, config.to_json(), mode=PRIVATE)

    def reload(self) -> None:
        """Let it read its configuration again."""
        if self._process is not None:
            processes.send(self._process.pid, signal.SIGHUP)

    def state(self) -> dict[str, Any]:
        """What it says of itself; empty before it has said anything."""
        found = read_state(self._folder.server) or {}
        return found if found.get("pid") == self.pid else {}

    def is_ready(self, tag: str) -> bool:
        """True once it serves the configuration of this tag."""
        state = self.state()
        return state.get("state") == READY and state.get("revision") == tag

    def refusal(self, tag: str) -> str | None:
        """Why it does not serve the configuration of this tag, though it goes on."""
        refused = self.state().get("refused") or {}
        return str(refused.get("error")) if refused.get("revision") == tag else None

    def ended(self) -> str | None:
        """How it ended, with its last words; None while it runs. One that hangs is killed."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            if self._heartbeat is None or not self._heartbeat.is_silent():
                return None
            processes.kill_group(self._process.pid)
            self._process.wait()
            return f"the server hung: it had not moved for {SILENT_S:g} s, and was killed."
        code = self._process.returncode
        said = (read_state(self._folder.server) or {}).get("error")
        way = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        how = f"the server {way}."
        if said:
            return f"{how} {said}" if code < 0 else str(said)
        words = self._last_words()
        return f"{how} Its last lines:\n{words}" if words else how

    def leave(self) -> None:
        """As `stop`: nothing serves here that nobody looks after."""
        self.stop()

    def stop(self) -> None:
        """End it: the requests that it has are answered first. Nothing of it is left."""
        if self._process is None:
            return
        self._process.terminate()
        deadline = time.monotonic() + self._drain_s + _STOP_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.clear()

    def clear(self) -> None:
        """Kill what is left of it, and remove its files."""
        if self._process is not None:
            processes.kill_group(self._process.pid)
            self._process.wait()
            self._process = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        # Those of its processes that have made groups of their own.
        processes.kill_with_variable(MARK, str(self._folder.path))
        processes.reap()
        remove_tree(self._folder.server)

    def _last_words(self) -> str:
        try:
            with open(self._folder.log, "rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"  {line}" for line in lines[-_LINES:])


class Heartbeat:
    """A pipe to one server. fd: the number of the end that the server writes into, there too once it is handed on."""

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        self._open = [self._read_fd, self.fd]
        os.set_blocking(self._read_fd, False)
        self._heard_s: float | None = None

    def handed_on(self) -> None:
        """The server has its end now."""
        self._open.remove(self.fd)
        os.close(self.fd)

    def is_silent(self) -> bool:
        """True where the server has moved before, and not for `SILENT_S`."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read_fd, 4096):
                self._heard_s = time.monotonic()
        return self._heard_s is not None and time.monotonic() - self._heard_s > SILENT_S

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())
