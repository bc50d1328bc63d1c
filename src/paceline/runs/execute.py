"""Run a command beside a worker of a live run: the client of `paceline.supervisor.execute`.

    with Beside(folder, ["nvidia-smi"], rank=1) as beside:
        while beside.exit_code is None:
            for name, data in beside.heard():        # ("out", b"...") or ("err", b"...")
                ...

Both sides write files in the run's folder and poll for each other's files. Files work on any file system that the run
itself uses, and need no port that other users could reach. If the supervisor uses another folder, the run's target
carries the messages (`Channel`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO

from paceline.errors import RunStateError, UserError
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.remote_status import Channel, ExecMessage, ExecRequest
from paceline.system.files import OwnFolder, read_json, write_json

#: If a run is Starting, a command waits at most this many seconds for the run's workers.
_START_S = 10.0

#: Seconds between two heartbeats of this client. The supervisor ends a command after 15 seconds without a heartbeat.
_ALIVE_S = 1.0
#: Seconds between two polls for output. Polls are frequent, so that typed keys echo without a noticeable delay.
_LOOK_S = 0.02
#: The most bytes of one read of the output. After every half of this number, the client acknowledges the bytes.
_READ_BYTES = 1 << 20
_CHUNK = 1 << 15
#: Seconds between two checks whether the run is alive.
_RECORD_S = 1.0
#: Seconds between two checks whether a run on another machine is alive. `Channel.is_over` usually shows it earlier.
_FAR_RECORD_S = 15.0


class Files:
    """A channel to a run's supervisor through files in a shared folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.is_over = False
        self._folder = folder
        self._path = folder.exec_requests / os.urandom(6).hex()
        #: The folder of this request. None before the folder has its final name.
        self._own: OwnFolder | None = None
        self._count = 0
        self._alive_at = 0.0
        self._said_alive = 0
        self._output: IO[bytes] | None = None
        self._rest = b""
        self._read = self._told_read = 0

    def begin(self, request: ExecRequest) -> None:
        hidden = self._path.with_name(f".{self._path.name}")
        while True:
            # Make this folder writable only for its owner: the supervisor runs all commands in it. The folder may exist already.
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path.parent, mode=0o700)
            try:
                hidden.mkdir(mode=0o700)
                break
            except FileNotFoundError:
                # Another command has just ended and removed the parent folder. Create it again, unless the run itself is gone.
                if not self._folder.path.exists():
                    return
        # At the attempt's end the supervisor may have removed this folder. `heard` then raises the error.
        with contextlib.suppress(FileNotFoundError):
            write_json(hidden / "request.json", request)
            # The supervisor handles each folder with a final name, so give the folder its final name after the request is in it.
            os.rename(hidden, self._path)
            # Write later input relative to this descriptor, because a group member could replace the folder at the path.
            self._own = OwnFolder(self._path, shut=True)

    def send(self, message: ExecMessage) -> None:
        if self._own is None:
            return
        with contextlib.suppress(FileNotFoundError):  # no folder: the command has ended
            self._own.write_json(f"in_{self._count}.json", message)
            self._count += 1

    def receive(self) -> list[ExecMessage]:
        self._stay_alive()
        # Check for the end before reading, because after the end all output is in the file.
        is_over = self._own is None or not self._own.is_there()
        found = self._new()
        self.is_over = is_over
        return found

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
        # Remove the request's folder. The supervisor sees by this that the client has left.
        if self._own is not None:
            self._own.remove()
            self._own.close()
            self._own = None
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()  # raises an error while other commands have folders in it

    def _new(self) -> list[ExecMessage]:
        if self._output is None:
            answer = read_json(self._path / "answer.json")
            if answer is None or "error" in answer:
                return [answer] if answer else []
            with contextlib.suppress(FileNotFoundError):
                self._output = open(self._folder.path / str(answer["output"]), "rb", buffering=0)  # noqa: SIM115
            if self._output is None:
                return []
        data = self._output.read(_READ_BYTES) or b""
        # Count the bytes for the acknowledgement: with too many unacknowledged bytes, the supervisor pauses the command.
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._read - self._told_read > _READ_BYTES // 2:
            self._told_read = self._read
            self.send({"read": self._read})
        return [json.loads(line) for line in lines]

    def _stay_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at > _ALIVE_S:
            self._alive_at, self._said_alive = now, self._said_alive + 1
            with contextlib.suppress(FileNotFoundError):
                if self._own is not None:
                    self._own.write_json("alive", self._said_alive)


class Beside:
    """A command that runs on the node of one rank's worker.

    Args:
        terminal: Rows and columns of the command's terminal; None for pipes.
        relay: A port of the node, to which a tunnel leads. Paceline then runs its relay; only messages show `argv`.

    Raises:
        UserError: The command is empty, or the run has no such rank.
        RunStateError: The run is not alive, or belongs to another user.
        TargetError: The run's supervisor cannot be reached.
    """

    def __init__(
        self,
        folder: RunFolder,
        argv: Sequence[str],
        *,
        rank: int = 0,
        terminal: tuple[int, int] | None = None,
        term: str | None = None,
        relay: int | None = None,
    ) -> None:
        self._folder = folder
        self._argv = [os.fspath(word) for word in argv]
        deadline = time.monotonic() + _START_S
        # Wait for a while: the workers may work already before the supervisor has written that the run is Running.
        while (record := read.record(folder)).status == states.STARTING and time.monotonic() < deadline:
            time.sleep(0.05)
        _check(record, self._argv, rank)
        self.exit_code: int | None = None
        far = read.channel(folder)
        # If the compute target has a channel, use this channel. Otherwise exchange files in the run's folder.
        self._channel: Channel = far or Files(folder)
        self._record_s = _FAR_RECORD_S if far else _RECORD_S
        self._record_at = time.monotonic()
        request: ExecRequest = {"argv": self._argv, "rank": rank, "terminal": terminal, "term": term}
        self._channel.begin(request if relay is None else {**request, "relay": relay})

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the command if it is running. A second call does nothing."""
        self._channel.close()

    def write(self, data: bytes) -> None:
        """Send bytes to the standard input of the command."""
        for begin in range(0, len(data), _CHUNK):
            self._channel.send({"data": base64.b64encode(data[begin : begin + _CHUNK]).decode()})

    def end_input(self) -> None:
        """Close the command's standard input."""
        self._channel.send({"end": True})

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the command's terminal."""
        self._channel.send({"size": [rows, columns]})

    def heard(self, wait_s: float = _LOOK_S, wait: Callable[[float], None] = time.sleep) -> list[tuple[str, bytes]]:
        """Return new output as ("out" or "err", bytes). Wait up to `wait_s` seconds if there is none.

        Raises:
            RunStateError: The command could not start, or ended with the run.
            TargetError: The connection to the run's supervisor is lost.
        """
        found = self._new()
        if not found and self.exit_code is None:
            # The run has ended, so no exit code can arrive any more.
            if self._channel.is_over or self._run_is_over():
                raise RunStateError(
                    f"run {self._folder.run_id}: its workers have ended, and the command or tunnel with them."
                )
            wait(wait_s)
            found = self._new()
        return found

    def _new(self) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = []
        for message in self._channel.receive():
            if "error" in message:
                raise RunStateError(
                    f"{self._argv[0]!r} can't run beside run {self._folder.run_id}: {message['error']}."
                )
            if "exit" in message:
                self.exit_code = int(message["exit"])
            found += [(name, base64.b64decode(message[name])) for name in ("out", "err") if name in message]
        return found

    def _run_is_over(self) -> bool:
        now = time.monotonic()
        if now - self._record_at < self._record_s:
            return False
        self._record_at = now
        return read.record(self._folder).is_terminal


def execute(folder: RunFolder, argv: Sequence[str], *, rank: int, input: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a command beside a worker. Return its exit code and output."""
    said: dict[str, list[bytes]] = {"out": [], "err": []}
    with Beside(folder, argv, rank=rank) as beside:
        # Send all input first. This can't block, because the input goes to files, which unlike a pipe don't fill up.
        beside.write(input)
        beside.end_input()
        while beside.exit_code is None:
            for name, data in beside.heard():
                said[name].append(data)
    return subprocess.CompletedProcess(list(argv), beside.exit_code, b"".join(said["out"]), b"".join(said["err"]))


def _check(record: RunRecord, argv: Sequence[str], rank: int) -> None:
    if not argv or not argv[0]:
        raise UserError("name a command to run, such as: paceline exec RUN --rank 1 -- nvidia-smi")
    size = record.job.world_size if record.job else 0
    if not 0 <= rank < max(size, 1):
        raise UserError(f"rank {rank}: run {record.run_id} has ranks 0 to {size - 1}.")
    if record.status != states.RUNNING:
        raise RunStateError(
            f"run {record.run_id} is {record.status}: a command can be run beside a worker while it is Running."
        )
