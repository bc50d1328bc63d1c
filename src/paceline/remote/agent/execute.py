"""Run a command of `paceline exec` on a worker's node, controlled through files.

    python -I -S .../paceline/remote/agent/execute.py CHANNEL OUTPUT

    CHANNEL/request.json   {"argv", "terminal": [rows, columns] or null, "term"}, or {"relay": port} for a tunnel
    CHANNEL/in_<n>.json    the client's messages, in order: {"data"}, {"end": true}, {"size": [rows, columns]},
                           {"read": number of OUTPUT's bytes that the client has read} or {"gone": true}
    OUTPUT                 one line for each piece of output, {"out": ...} or {"err": ...}, and at last {"exit": code}

Bytes are encoded as base64. On {"gone"}, on removal of CHANNEL, or on a signal, the command gets SIGHUP. Then its
remaining processes are killed. The command inherits this program's environment and working directory.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":
    # Python's option -I isolates this program from the script's environment, so add the library to sys.path here.
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")))

from paceline.system import processes
from paceline.system.files import OwnFolder

_LOOK_S = 0.02
_HANG_UP_S = 1.0
#: Seconds after the exit of a command in which its child processes may still write output to the client.
_DRAIN_S = 0.5
#: _LATE_S: seconds after a command's end in which to read its last output. _PIPE_BYTES: the most bytes that a pipe can hold.
_LATE_S, _PIPE_BYTES = 30.0, 1 << 16
_CHUNK = 1 << 14
#: If the client has not read this many bytes of the output, the command has to wait.
_AHEAD_BYTES = 8 << 20


class CommandFiles:
    """The files through which a client controls one command of `paceline exec`."""

    def __init__(self, folder: str, output: str) -> None:
        # Check the folder again: another member of the folder's Unix group may have replaced it since the supervisor's check.
        self._folder = OwnFolder(Path(folder), shut=False)
        fd = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._output: IO[bytes] = os.fdopen(fd, "ab", buffering=0)
        self._lock = threading.Lock()
        self._next = 0
        self._written = self._read = 0
        self._is_over = False
        self.request: dict[str, Any] = json.loads(self._folder.read("request.json"))
        if (port := self.request.get("relay")) is not None:
            program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "relay.py")
            self.request["argv"] = [sys.executable, "-I", "-S", program, str(int(port))]

    def say(self, **told: object) -> None:
        line = json.dumps(told).encode() + b"\n"
        # Wait until the client has read enough, so that endless output does not fill the disk.
        while self._written - self._read > _AHEAD_BYTES and not self._is_over:
            time.sleep(_LOOK_S)
        # The threads for standard output and for standard error both write lines here. The lock keeps each line intact.
        with self._lock, contextlib.suppress(OSError):
            self._written += self._output.write(line)

    def let_go(self) -> None:
        """Stop waiting for the client to read: write all further output at once."""
        self._is_over = True

    def heard(self) -> list[dict[str, Any]]:
        """Return the client's messages that have arrived since the last call."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                found.append(json.loads(self._folder.read(f"in_{self._next}.json")))
            except OSError:
                # If the folder is missing, the client has left. If only the file is missing, the client has sent no new message.
                return found if self._folder.is_there() else [{"gone": True}]
            self._next += 1
            self._read = max(self._read, int(found[-1].get("read", 0)))


def main(argv: list[str]) -> int:
    channel = CommandFiles(argv[0], argv[1])
    # Adopt the command's orphaned child processes, so that all processes of the command are found at its end.
    processes.become_subreaper()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        run = _Terminal(channel) if channel.request["terminal"] else _Pipes(channel)
    except OSError as error:
        channel.say(err=_text(f"paceline exec: {channel.request['argv'][0]!r}: {error.strerror or error}\n".encode()))
        channel.say(exit=127 if isinstance(error, FileNotFoundError) else 126)
        return 0
    while run.code() is None and not ended.wait(_LOOK_S):
        for told in channel.heard():
            if told.get("gone"):
                ended.set()
            run.take(told)
    code = run.code()
    # The command or the client is gone, so don't wait for the client to read output.
    channel.let_go()
    if code is None:
        run.hang_up()
        deadline = time.monotonic() + _HANG_UP_S
        while run.code() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
    else:
        run.drain()
    processes.kill_descendants(os.getpid(), wait_s=5.0)
    channel.say(exit=code if code is not None else 128 + signal.SIGHUP)
    return 0


class _Run:
    process: subprocess.Popen[bytes]

    def __init__(self, channel: CommandFiles) -> None:
        self._channel = channel
        self._readers: list[_Reader] = []

    def code(self) -> int | None:
        """Return the command's exit code as in a shell, or None while it runs."""
        code = self.process.poll()
        return None if code is None else processes.shell_code(code)

    def take(self, told: dict[str, Any]) -> None:
        raise NotImplementedError

    def hang_up(self) -> None:
        # Signal the command's process group, which includes all children that did not change their group.
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGHUP)

    def drain(self) -> None:
        for reader in self._readers:
            reader.drain()

    def _read(self, fd: int, name: str) -> None:
        reader = _Reader(self._channel, fd, name)
        reader.start()
        self._readers.append(reader)


class _Reader(threading.Thread):
    """A thread that forwards the command's standard output or standard error."""

    def __init__(self, channel: CommandFiles, fd: int, name: str) -> None:
        super().__init__(daemon=True)
        self._channel, self._fd, self._name = channel, fd, name
        # This lock is held while output is read and forwarded. Otherwise `drain` could return before the last output is sent.
        self._at_it = threading.Lock()
        self._count = 0

    def run(self) -> None:
        with contextlib.suppress(OSError):  # reading fails when the last process of the terminal has ended
            while True:
                select.select([self._fd], [], [])
                with self._at_it:
                    data = os.read(self._fd, _CHUNK)
                    if not data:
                        return
                    self._channel.say(**{self._name: _text(data)})
                    self._count += len(data)

    def drain(self) -> None:
        """Wait until the pipe's output is forwarded, for about 30 seconds at most.

        The time is limited, because a child process that outlives the command may write to the pipe without end.
        """
        begun, deadline = self._count, time.monotonic() + _LATE_S
        self.join(_DRAIN_S)
        while self.is_alive() and self._count - begun < _PIPE_BYTES and time.monotonic() < deadline:
            with self._at_it, contextlib.suppress(OSError):
                if not select.select([self._fd], [], [], 0)[0]:
                    return
            self.join(_LOOK_S)


class _Pipes(_Run):
    def __init__(self, channel: CommandFiles) -> None:
        super().__init__(channel)
        self.process = subprocess.Popen(
            channel.request["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Start a new session, so that one signal to its process group reaches the command and the command's children.
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._read(self.process.stdout.fileno(), "out")
        self._read(self.process.stderr.fileno(), "err")

    def take(self, told: dict[str, Any]) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the command has closed its input
            if "data" in told:
                view = memoryview(base64.b64decode(told["data"]))
                while view:
                    view = view[stdin.write(view) or 0 :]
            elif told.get("end"):
                stdin.close()


class _Terminal(_Run):
    def __init__(self, channel: CommandFiles) -> None:
        super().__init__(channel)
        self._fd, theirs = pty.openpty()
        self._resize(channel.request["terminal"])
        try:
            self.process = subprocess.Popen(
                # The first process of the session that opens the terminal makes it the controlling terminal.
                [sys.executable, "-I", "-S", __file__, "--on-terminal", os.ttyname(theirs), *channel.request["argv"]],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env={**os.environ, "TERM": channel.request.get("term") or "xterm"},
                start_new_session=True,
            )
        finally:
            # Close this process's copy of the command's end of the terminal. Otherwise reads from the terminal would never end.
            os.close(theirs)
        self._read(self._fd, "out")

    def take(self, told: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            if "data" in told:
                view = memoryview(base64.b64decode(told["data"]))
                while view:
                    view = view[os.write(self._fd, view) :]
            elif told.get("end"):
                # Ctrl-D means end of input on a terminal.
                os.write(self._fd, b"\x04")
            elif "size" in told:
                self._resize(told["size"])

    def _resize(self, size: list[int]) -> None:
        import fcntl
        import termios

        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", int(size[0]), int(size[1]), 0, 0))


def _on_terminal(path: str, argv: list[str]) -> None:
    # Open the terminal only because this makes it the controlling terminal. The descriptor itself is not needed.
    os.close(os.open(path, os.O_RDWR))
    # Reset the signals to their defaults, because Python ignores SIGPIPE, and the command would inherit this.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"paceline exec: {argv[0]!r}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    if sys.argv[1] == "--on-terminal":
        _on_terminal(sys.argv[2], sys.argv[3:])
    sys.exit(main(sys.argv[1:]))
