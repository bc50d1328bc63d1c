"""Start an agent on a node, over a link to a newly started Python there.

`paceline.remote.agent.boot` runs on the node.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.remote.agent import boot
from paceline.remote.foreign_python import library_digest, packed_library, stream_program
from paceline.remote.link.messages import LinkError
from paceline.system import frames, processes

#: How many bytes of standard error (of the connecting program and of the node's shell) to keep for error messages.
_SAID_BYTES = 1 << 14


@dataclass
class Ends:
    """The file descriptors of a link to a node, such as ssh's streams."""

    read_fd: int
    write_fd: int
    stderr_fd: int | None = None
    process: subprocess.Popen[bytes] | None = None
    said: bytearray = field(default_factory=bytearray)

    @classmethod
    def of_program(cls, argv: Sequence[str], environment: Mapping[str, str], name: str) -> Ends:
        """Start a program, such as `ssh host ...`, whose standard streams are the link."""
        try:
            process = subprocess.Popen(
                list(argv),
                # Remove variables that name a run. Otherwise Paceline would kill the program as a leftover process of that run.
                env=processes.of_no_run(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise LinkError(f"{name}: {argv[0]!r} could not be started: {error.strerror or error}.") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        # Duplicate the descriptors: when Python deletes a file object, it closes the object's descriptor, even during use.
        fds = [os.dup(file.fileno()) for file in (process.stdout, process.stdin, process.stderr)]
        for file in (process.stdin, process.stdout, process.stderr):
            file.close()
        return cls(fds[0], fds[1], fds[2], process)

    @classmethod
    def of_socket(cls, sock: socket.socket) -> Ends:
        """Return a link's end over a socket to a program's standard streams."""
        sock.setblocking(True)
        fd = sock.detach()
        return cls(fd, fd)

    def descriptors(self) -> set[int]:
        return {self.read_fd, self.write_fd, *(() if self.stderr_fd is None else (self.stderr_fd,))}

    def wait(self, timeout_s: float, *, writes: bool = False) -> bool:
        """Wait until bytes can be read or, with `writes`, written.

        Return False on timeout. Meanwhile, collect the local program's standard error.
        """
        poll, wanted = select.poll(), self.write_fd if writes else self.read_fd
        poll.register(wanted, select.POLLOUT if writes else select.POLLIN)
        if self.stderr_fd is not None:
            poll.register(self.stderr_fd, select.POLLIN)
        # `poll` takes its timeout in milliseconds.
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        if self.stderr_fd in ready:
            self.hear_stderr()
        return wanted in ready

    def hear_rest(self, wait_s: float) -> None:
        """Read standard error until `wait_s` seconds of silence, for at most a second."""
        deadline = time.monotonic() + 1.0
        while self.stderr_fd is not None and time.monotonic() < deadline:
            # Don't use `select.select`, which refuses descriptors from 1,024 on.
            poll = select.poll()
            poll.register(self.stderr_fd, select.POLLIN)
            if not poll.poll(wait_s * 1000):
                return
            self.hear_stderr()

    def hear_stderr(self) -> bool:
        """Read standard error of the local program. Return False at its end."""
        assert self.stderr_fd is not None
        data = os.read(self.stderr_fd, 1 << 14)
        if not data:
            # Stop polling standard error at its end: `poll` would report it as ready forever.
            os.close(self.stderr_fd)
            self.stderr_fd = None
        self.said += data
        del self.said[:-_SAID_BYTES]
        return bool(data)

    def stderr(self) -> str:
        """Return the last 16 KiB of the local program's standard error."""
        return self.said.decode(errors="replace").strip()

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """Return the exit code of `process`.

        The result is None if there is no process, or if the process still runs after `wait_s` seconds.
        """
        if self.process is None:
            return None
        try:
            return self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None


def bootstrap(ends: Ends, name: str, library_dir: Path, settings: dict[str, Any], timeout_s: float) -> bytes:
    """Start a node's agent. Return bytes of its messages that were already read.

    settings: `shared`: a folder with Paceline's library that the node may see, or None. `folder`: the node's folder for a
        library that is sent. `agent`: settings of the agent.

    Raises:
        LinkError: Python is missing or too old, the disk is full, or the node does not answer in time.
    """
    nonce = f"PACELINE-{secrets.token_hex(8)}"
    talk = _Talk(ends, name, nonce, time.monotonic() + timeout_s, timeout_s)
    digest = library_digest(library_dir)
    given = json.dumps({**settings, "nonce": nonce, "digest": digest})
    talk.write(stream_program(boot.__file__, last=f"boot(json.loads({given!r}))"))
    answer = talk.answer()
    if answer.get("wanted"):
        data = packed_library(library_dir)
        # Send the size too: the node must read exactly this many bytes, because frames follow in the same stream.
        talk.write(frames.frame(data))
        answer = talk.answer()
    if error := answer.get("error"):
        path, *version = answer["python"]
        if error == "old":
            text = (
                f"its Python ({path}) is {'.'.join(map(str, version))}, and Paceline needs 3.10 or later. Name another."
            )
        else:
            text = (
                f"the library can't be put into {answer['folder']!r}: {error}. Fix that, or name another folder "
                "(the setting folder)."
            )
        raise LinkError(f"{name}: {text}", ends.stderr(), ends.exit_code())
    return talk.heard


class _Talk:
    """The exchange with the node's bootstrap program, before its agent starts."""

    def __init__(self, ends: Ends, name: str, nonce: str, deadline: float, timeout_s: float) -> None:
        self._ends, self._name, self._nonce = ends, name, nonce.encode()
        self._deadline, self._timeout_s = deadline, timeout_s
        self.heard = b""

    def write(self, data: bytes) -> None:
        # Read standard error between writes: a long login banner would fill its pipe, and then the shell would stop.
        view = memoryview(data)
        os.set_blocking(self._ends.write_fd, False)
        try:
            while view:
                if self._wait(writes=True):
                    view = view[os.write(self._ends.write_fd, view) :]
        except LinkError:
            raise  # a LinkError, such as a timeout, is an OSError too, so catch it first
        except OSError:
            self._fail("ended")
        finally:
            # The thread that writes frames later needs blocking writes.
            os.set_blocking(self._ends.write_fd, True)

    def answer(self) -> dict[str, Any]:
        """Return the program's next JSON object. Skip output of the login shell."""
        while (line := self._line()) is None:
            if self._wait():
                data = os.read(self._ends.read_fd, 1 << 16)
                if not data:
                    self._fail("ended")
                self.heard += data
        told: dict[str, Any] = json.loads(line)
        return told

    def _line(self) -> bytes | None:
        # A login shell may print text before our program's lines, which begin with the secret nonce.
        _, found, rest = self.heard.partition(self._nonce + b" ")
        if not found or b"\n" not in rest:
            return None
        line, _, self.heard = rest.partition(b"\n")
        return line

    def _wait(self, *, writes: bool = False) -> bool:
        left = self._deadline - time.monotonic()
        if left <= 0:
            self._fail("silent")
        return self._ends.wait(left, writes=writes)

    def _fail(self, how: str) -> None:
        ends = self._ends
        # A program closes its output shortly before it exits. Wait for the exit code, which explains the failure best.
        code = ends.exit_code(2.0) if how == "ended" else None
        ends.hear_rest(0.2)
        shell = self.heard.decode(errors="replace").strip()
        said = ends.stderr() or shell
        lines = [line for line in said.splitlines() if line.strip()]
        if how == "silent":
            text = f"no agent answered within {self._timeout_s:g} s."
        elif code == 127 or (code == 126 and lines):
            text = f"no Python was found there (exit code {code}). Name the path of one, 3.10 or later."
        elif "no attribute 'buffer'" in said:
            # In Python 2, sys.stdin has no attribute `buffer`, so the program's first read fails.
            text = "its Python is Python 2, and Paceline needs 3.10 or later. Name another."
        else:
            text = (
                f"no agent could be started (exit code {code})." if code is not None else "no agent could be started."
            )
        told = f" It said: {' / '.join(line[-300:] for line in lines[-3:])}" if lines else ""
        raise LinkError(f"{self._name}: {text}{told}", said, code)
