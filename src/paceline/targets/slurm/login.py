"""Transfer and mirror runs through a cluster's login host, and run commands there.

    here     <workspace>/runs/<run id>         the copy that programs here read; an update copies state.json last
    there    <folder>/runs/<run id>            the original, where the supervisor and the workers write
             <folder>/snapshots, <folder>/lib, <folder>/carried    named by a hash of their content, so sent only once

Each call runs `login_helper` on the login host, by one ssh command over a shared connection. The helper keeps no state:
`mirrored.json` in the run's folder here records which files have been copied here.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import queue
import secrets
import shlex
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from paceline.errors import PacelineError, TargetError
from paceline.remote import wire
from paceline.remote.foreign_python import bootstrap_words, library_digest, library_files, stream_program
from paceline.remote.replica import changes
from paceline.remote.staging.packing import FOLDER, add_run, add_tree, pack_run
from paceline.remote.staging.stage_out_local import expect, updating
from paceline.remote.wire import Header
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import ExecMessage, ExecRequest
from paceline.system import links
from paceline.system.files import write_json
from paceline.targets.slurm import login_helper
from paceline.targets.slurm.scheduler import AwayError, Scheduler

#: Seconds for which this machine's copy of a run's folder counts as up to date.
_FRESH_S = 1.0
#: File in the run's local folder: {"time": time of the last complete update, "known": stamps of the files that are up to date}.
_STATE = "mirrored.json"

_ALIVE_S = 1.0
#: Number of pieces of output that this process buffers. If the buffer is full, the program on the login host has to wait.
_AHEAD = 64


@dataclass(frozen=True, kw_only=True)
class There:
    """The paths of a run and Paceline on the cluster, and the user's uid."""

    folder: str
    user: str
    run_dir: str
    library_dir: str


class Login:
    """A cluster's login host, through which runs are sent and mirrored."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._title, self._settings, self._scheduler = scheduler.title, scheduler.settings, scheduler
        self._python = self._settings.python or "python3"

    def push(self, folder: RunFolder, library_dir: Path) -> There:
        """Send the run's folder, and the job's files that the cluster lacks.

        Raises:
            EngineError, TargetError: The login host can't be reached, or its disk is full.
            DataError, EnvironmentSpecError, TransferError: A file that the job names is missing or unreadable here; this
                machine can't store an output of the run.
        """
        taken = pack_run(folder)
        expect(folder, taken.manifest.home if taken else ())
        snapshot = folder.snapshot.resolve()
        library = library_digest(library_dir)
        names = [f"snapshots/{snapshot.name}", f"lib/{library}"]
        names += [f"{FOLDER}/{tree}" for tree in (taken.files if taken else ())]
        answer = self._ask({"op": "have", "folder": self._settings.folder, "names": names})
        there = There(
            folder=answer["folder"],
            user=answer["user"],
            run_dir=f"{answer['folder']}/runs/{folder.run_id}",
            library_dir=f"{answer['folder']}/lib/{library}",
        )

        def write(stdin: IO[bytes]) -> None:
            with (
                gzip.GzipFile(fileobj=stdin, mode="wb", compresslevel=1) as packed,
                tarfile.open(fileobj=packed, mode="w|") as archive,
            ):
                if f"lib/{library}" in answer["missing"]:
                    for name, path in library_files(library_dir).items():
                        archive.add(path, f"lib/{library}/{name}")
                if f"snapshots/{snapshot.name}" in answer["missing"]:
                    archive.add(snapshot, f"snapshots/{snapshot.name}")
                for tree, files in (taken.files if taken else {}).items():
                    if f"{FOLDER}/{tree}" in answer["missing"]:
                        add_tree(archive, tree, files)
                add_run(archive, folder, taken, engine="slurm")

        pushed = self._ask({"op": "push", "folder": there.folder, "run_id": folder.run_id}, write)
        write_json(folder.path / _STATE, {"time": 0.0, "known": pushed["known"]})
        folder.secrets.unlink(missing_ok=True)  # the supervisor on the cluster has a copy of the secrets
        return there

    def pull(self, folder: RunFolder, run_dir: str) -> None:
        """Update the local copy of the run's folder, at most once a second.

        Raises:
            AwayError: The login host can't be reached.
        """
        what = f"{self._title}: the login host {self._settings.login} sent what can't be taken"
        with updating(folder, _FRESH_S, what) as update:
            if update is None:
                return
            replica, _ = update
            # If an old version of Paceline has sent the run, no stamps are recorded. Then take the stamps of its files.
            replica.known = replica.known or replica.have()
            request = {"op": "pull", "run_dir": run_dir, "known": replica.known, "final": sorted(states.TERMINAL)}
            self._ask(request, take=replica.apply)

    def put(self, path: str, value: object) -> None:
        """Write a small JSON file on the login host."""
        self._ask({"op": "put", "path": path, "text": json.dumps(value) + "\n"})

    def remove(self, path: str) -> None:
        """Remove a file on the login host, if it exists."""
        self._ask({"op": "remove", "path": path})

    def _ask(
        self,
        request: Header,
        write: Callable[[IO[bytes]], None] | None = None,
        take: Callable[[Header, bytes], None] = lambda header, data: None,
    ) -> Header:
        process, mark = self.open(request)
        assert process.stdin is not None
        with process:
            try:
                # Write all input before reading: the program on the login host answers only then, even after an error.
                with contextlib.suppress(BrokenPipeError):
                    if write is not None:
                        write(process.stdin)
                    process.stdin.close()
                return self.take(process, mark, take)
            except BaseException:
                process.kill()
                raise

    def open(self, request: Header) -> tuple[subprocess.Popen[bytes], str]:
        """Send a request to the login host. Return the ssh process, and the line that will precede its answer."""
        mark = f"PACELINE-{secrets.token_hex(8)}"
        main = f"main({mark!r}, sys.stdin.buffer, sys.stdout.buffer)"
        texts = (links, wire, changes, login_helper)
        code = stream_program(*(str(module.__file__) for module in texts), last=main)
        # Read ssh's standard error only at its end: it is short and fits into the pipe's 64 KiB, so ssh never blocks.
        process = subprocess.Popen(
            self._scheduler.ssh_words(shlex.join(bootstrap_words(self._python))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(code + json.dumps(request).encode() + b"\n")
                process.stdin.flush()
        except BaseException:
            with process:
                process.kill()
            raise
        return process, mark

    def take(self, process: subprocess.Popen[bytes], mark: str, take: Callable[[Header, bytes], None]) -> Header:
        """Call `take` with each part of the login host's answer. Return the last part's header.

        process, mark: The ssh process, and the line before the answer, as `open` returns them.

        Raises:
            AwayError: The login host can't be reached, or the connection broke.
            TargetError: The request failed on the login host.
        """
        stdout = cast(io.BufferedReader, process.stdout)
        for line in stdout:  # the shell of the login host may print lines before the answer, so skip them
            if line.strip() == mark.encode():
                break
        frames, where = wire.Frames(), f"{self._title}: the login host {self._settings.login}"
        try:
            # Read the available bytes without waiting for more, because a command's output arrives in pieces.
            while data := stdout.read1(1 << 18):
                for header, content in frames.feed(data):
                    if "error" in header:
                        raise TargetError(
                            f"{self._title}: on the login host {self._settings.login}: {header['error']}. "
                            "Fix that, or choose another folder (the setting folder)."
                        )
                    if header.get("over"):
                        return header
                    take(header, content)
        except wire.WireError as error:
            process.kill()
            raise AwayError(f"{where} gave no answer that can be read: {error}.") from error
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace").strip()
        code = process.wait()
        raise AwayError(f"{where} can't be used: {self._scheduler.explain(said, code, self._python)}")


class LoginChannel:
    """A channel for `paceline exec` through the login host, over one ssh connection.

    On the login host, `login_helper.execute` exchanges messages with the supervisor through files. When this program
    ends, its ssh connection and the executed command end too.

    run_dir: Path of the run's folder on the cluster.
    """

    def __init__(self, login: Login, run_dir: str) -> None:
        self.is_over = False
        self._login, self._run_dir = login, run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._came: queue.Queue[bytes | PacelineError | None] = queue.Queue(_AHEAD)
        self._rest = b""
        self._alive_at = 0.0
        self._is_closed = False

    def begin(self, request: ExecRequest) -> None:
        asked = {"op": "exec", "run_dir": self._run_dir, "name": secrets.token_hex(6), "request": request}
        self._process, mark = self._login.open(asked)
        threading.Thread(target=self._listen, args=(self._process, mark), daemon=True).start()

    def send(self, message: ExecMessage) -> None:
        self._write(json.dumps(message).encode())

    def receive(self) -> list[ExecMessage]:
        now = time.monotonic()
        if now - self._alive_at > _ALIVE_S:
            self._alive_at = now
            self._write(b"")
        messages: list[ExecMessage] = []
        with contextlib.suppress(queue.Empty):
            while not self.is_over:
                came = self._came.get_nowait()
                if isinstance(came, PacelineError):
                    raise came
                if came is None:
                    self.is_over = True
                    break
                *lines, self._rest = (self._rest + came).split(b"\n")
                messages += map(json.loads, lines)
        return messages

    def close(self) -> None:
        self._is_closed = True
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # when its input ends, the program on the login host ends the command
        # The reading thread may wait because the queue is full. Empty the queue, so that the thread continues and ends.
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
            with contextlib.suppress(OSError, ValueError):  # the pipe is closed because the command has ended
                self._process.stdin.write(line + b"\n")
                self._process.stdin.flush()

    def _listen(self, process: subprocess.Popen[bytes], mark: str) -> None:
        def take(header: Header, data: bytes) -> None:
            if not self._is_closed:
                self._came.put(data)

        end: PacelineError | None = None
        try:
            self._login.take(process, mark, take)
        except PacelineError as error:
            end = error
        except (OSError, ValueError):
            pass  # `close` has closed the pipes
        if not self._is_closed:
            self._came.put(end)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
