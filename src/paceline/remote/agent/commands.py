"""Start and reap commands, for agents and for supervisors that start workers on their own machine."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from paceline.remote.wire import Frame, Header
from paceline.system import processes, spare_client


class Waited(NamedTuple):
    """A running command, whose output will answer the supervisor's request number `request`."""

    # This class is no dataclass: importing `dataclasses` takes a fifth of an agent's start time, and each run waits for it.

    request: int
    stdout: IO[bytes]
    stderr: IO[bytes]


class Commands:
    """A starter of commands, which also collects their exit codes.

    Each command runs in a separate session.
    """

    def __init__(self) -> None:
        self._running: dict[int, str] = {}
        self._waited: dict[int, Waited] = {}
        #: Pids of spares (pre-started Python processes), which may outlive an attempt.
        self.spares: set[int] = set()

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log: str, tag: str) -> int:
        """Start a command that appends output to `log`. `reap` reports its exit with `tag`."""
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            pid = _spawn(argv, env, cwd, subprocess.DEVNULL, file, file)
        finally:
            os.close(file)
        self._running[pid] = tag
        return pid

    def start_worker(
        self,
        argv: Sequence[str],
        *,
        spare: str,
        is_spare: bool,
        env: Mapping[str, str],
        cwd: str | None,
        log: str,
        tag: str,
    ) -> tuple[int, str]:
        """Start a worker, or an idle process (spare) that forks the next attempt's worker.

        Returns:
            The worker's pid, and "". If `spare` is a spare's socket path, that spare forks the worker. If the spare
            fails, a new process is started, and the second value is the error.
        """
        if not spare:
            pid = self.start(argv, env=env, cwd=cwd, log=log, tag=tag)
            if is_spare:
                self.spares.add(pid)
            return pid, ""
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid, connection = spare_client.ask(spare, argv, env, cwd or os.getcwd(), (null, file, file))
        except OSError as error:
            return self.start(argv, env=env, cwd=cwd, log=log, tag=tag), error.strerror or str(error)
        finally:
            os.close(file)
            os.close(null)
        connection.close()
        self._running[pid] = tag
        return pid, ""

    def run(self, request: int, argv: Sequence[str], data: bytes) -> int:
        """Start a command. A later call of `reap` returns its output and exit code.

        request: The number of the supervisor's request, which `reap` returns with the output.
        data: Standard input of the command.

        Returns:
            The command's pid.
        """
        # Use files instead of pipes, so that this process need not read or write while the command runs.
        stdout, stderr = _unnamed(), _unnamed()
        try:
            with _unnamed() as stdin:
                stdin.write(data)
                stdin.seek(0)
                pid = _spawn(argv, os.environ, None, stdin.fileno(), stdout.fileno(), stderr.fileno())
        except BaseException:
            stdout.close()
            stderr.close()
            raise
        self._waited[pid] = Waited(request, stdout, stderr)
        return pid

    def stop(self, request: int) -> None:
        """Kill the command of a `run` request that has timed out."""
        for pid, waited in self._waited.items():
            if waited.request == request:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except OSError:
                    pass

    def reap(self) -> tuple[list[Header], list[Frame]]:
        """Return the exits of started commands, and the replies to `run` requests."""
        ends, replies = [], []
        for pid, status, peak in processes.reaped():
            code = processes.shell_exit_code(status)
            self.spares.discard(pid)
            if pid in self._running:
                tag = self._running.pop(pid)
                end = {"op": "end", "pid": pid, "code": code, "time": time.time(), "peak": peak, "tag": tag}
                ends.append(end)
            elif waited := self._waited.pop(pid, None):
                with waited.stdout, waited.stderr:
                    stdout, stderr = (_content(file) for file in (waited.stdout, waited.stderr))
                replies.append(({"re": waited.request, "code": code, "out": len(stdout)}, stdout + stderr))
        return ends, replies


def _spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str | None, stdin: int, stdout: int, stderr: int) -> int:
    try:
        # Start a new session, so that signals to the command's process group reach its children, but not this agent.
        process = subprocess.Popen(
            list(argv), cwd=cwd, env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    except ValueError as error:  # an argument contains a NUL character
        raise OSError(errno.EINVAL, str(error), argv[0] if argv else "") from None
    # Keep Popen from reaping: `reap` reaps all children together, including adopted orphans.
    process.returncode = 0
    return process.pid


def _unnamed() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("paceline"), "w+b", buffering=0)
    import tempfile  # imported here because it is slow to load and not needed where memfd_create exists

    return tempfile.TemporaryFile(buffering=0)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
