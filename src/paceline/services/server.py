"""The server process of a service on this machine, `python -m paceline.serving`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from paceline.job.plan import NodeSetup
from paceline.launchers.environment import inherited, of_interpreter
from paceline.runs.failure import signal_name
from paceline.services.folder import MARK, ServiceFolder
from paceline.services.record import Revision, ServiceRecord
from paceline.services.revise import config_of
from paceline.serving.api import READY, ServerState, read_state
from paceline.system import processes
from paceline.system.detached_process import library_dir
from paceline.system.files import PRIVATE, remove_tree, write_json

#: Seconds to wait for the server's end, in addition to `drain_s`.
_STOP_S = 10.0
#: Number of last lines of a dead server's log to show in an error message.
_LINES = 12

#: Seconds without a heartbeat after which a server counts as hung. Delays on a busy machine are far shorter.
SILENT_S = 60.0


class Server:
    """The server process of a service on this machine.

    In the methods, `tag` is a text that identifies a configuration in the server's state.
    """

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
        """The pids of processes that this object has started."""
        return set() if self._process is None else {self._process.pid}

    #: Whether `reload` suffices to make the server use new keys.
    takes_keys = True
    #: For a server on another machine, the server's run and a sentence on where the run is. None for this local server.
    run_id: str | None = None
    note: str | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Start the server with this revision.

        Raises:
            OSError: No process can be started, or the disk can't be written.
            ServingError: The server would refuse the configuration.
        """
        folder = self._folder
        remove_tree(folder.server)
        folder.server.mkdir(mode=0o700)
        if self._heartbeat is not None:  # close the pipe of an earlier server that failed to start
            self._heartbeat.close()
        self._heartbeat = Heartbeat()
        self.keep(tag, record, revision, workers, setup)
        self._log_start = folder.log.stat().st_size if folder.log.exists() else 0
        variables = {name: text for name, text in os.environ.items() if name != processes.SUPERVISOR_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.serving", str(folder.server_config)],
            env={**inherited(variables), "PYTHONPATH": str(library_dir(folder.workspace_dir)), MARK: str(folder.path)},
            # Don't start in the script's folder, because modules in it may shadow modules of the library.
            cwd=folder.server,
            stdin=subprocess.DEVNULL,
            pass_fds=(self._listener.fileno(), self._heartbeat.fd),
            # Start a new process group, by which the other processes of a killed server can be found and killed.
            start_new_session=True,
            # The kernel sends SIGTERM if this process dies, so that the server still answers its open requests.
            preexec_fn=processes.ends_with_parent(signal.SIGTERM),  # noqa: PLW1509 - no lock between fork and exec
        )
        self._heartbeat.handed_on()

    def change(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Let the server load a revision beside the present one, and serve it once ready."""
        self.keep(tag, record, revision, workers, setup)
        self.reload()

    def keep(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Write a revision's configuration, which the server reads at its start and at `reload`."""
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
            heartbeat_fd=None if self._heartbeat is None else self._heartbeat.fd,
            keys_file=str(folder.keys) if record.has_keys else None,
            tls_cert=record.tls_cert,
            tls_key=record.tls_key,
            revision=tag,
        )
        self._drain_s = config.drain_s
        # Let only this user read the file, because the variables in it may be secrets.
        write_json(folder.server_config, config.to_json(), mode=PRIVATE)

    def reload(self) -> None:
        """Make the server read its configuration file again, by SIGHUP."""
        if self._process is not None:
            processes.send(self._process.pid, signal.SIGHUP)

    def state(self) -> ServerState | None:
        """Return the state that the server reports, or None before its first report."""
        state = read_state(self._folder.server)
        return state if state is not None and state["pid"] == self.pid else None

    @property
    def answers(self) -> bool:
        """Whether the server can answer requests."""
        state = self.state()
        return state is not None and state["state"] == READY

    def is_ready(self, tag: str) -> bool:
        """Return True once the server serves the configuration with this tag."""
        state = self.state()
        return state is not None and (state["state"], state["revision"]) == (READY, tag)

    def refusal(self, tag: str) -> str | None:
        """Return why the server could not load the configuration with this tag, or None."""
        state = self.state()
        refused = None if state is None else state["refused"]
        return refused["error"] if refused is not None and refused["revision"] == tag else None

    def ended(self) -> str | None:
        """Return how the server ended, or None. Kill a hung server first."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            if self._heartbeat is None or not self._heartbeat.is_silent():
                return None
            processes.kill_group(self._process.pid)
            self._process.wait()
            return f"the server hung: it sent no heartbeat for {SILENT_S:g} s, and was killed."
        code = self._process.returncode
        state = read_state(self._folder.server)
        said = None if state is None else state["error"]
        way = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        how = f"the server {way}."
        if said:
            return f"{how} {said}" if code < 0 else str(said)
        words = self._last_words()
        return f"{how} Its last lines:\n{words}" if words else how

    def leave(self) -> None:
        """Stop the server, since a local server never outlives its supervisor."""
        self.stop()

    def stop(self) -> None:
        """Let the server answer its open requests and end, then clean up."""
        if self._process is None:
            return
        self._process.terminate()
        deadline = time.monotonic() + self._drain_s + _STOP_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.clear()

    def clear(self) -> None:
        """Kill the remaining processes, and remove the server's files."""
        if self._process is not None:
            processes.kill_group(self._process.pid)
            self._process.wait()
            self._process = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        # Find the model processes by a variable, because they have process groups of their own.
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
    """A pipe into which the server writes one byte each second (`paceline.serving.front.group`).

    Missing bytes prove a hang. A missing answer proves nothing, since a server with a full queue may not answer.

    fd: File descriptor of the pipe's write end. The server process uses the same number.
    """

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        self._open = [self._read_fd, self.fd]
        os.set_blocking(self._read_fd, False)
        self._heard_s: float | None = None

    def handed_on(self) -> None:
        """Close this process's write end of the pipe, once the server has inherited it."""
        self._open.remove(self.fd)
        os.close(self.fd)

    def is_silent(self) -> bool:
        """Return whether no heartbeat has arrived for 60 seconds."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read_fd, 4096):
                self._heard_s = time.monotonic()
        return self._heard_s is not None and time.monotonic() - self._heard_s > SILENT_S

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())
