"""Pending requests of a link, the error LinkError, and an agent's description of its node."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import EngineError
from paceline.remote.wire import Frame, Header


class Pending:
    """A request to an agent, whose answer may not have arrived yet."""

    def __init__(self, number: int, in_order: bool) -> None:
        self.number = number
        #: Whether the answer is delivered only when all files that arrived before it are stored on this machine.
        self.in_order = in_order
        self.answer: Frame | None = None
        self.is_done = False
        # A lock that is held until the answer arrives. An Event costs ten times as much, and there are thousands of requests.
        self._gate = threading.Lock()
        self._gate.acquire()

    def settle(self, answer: Frame | None) -> None:
        """Deliver the answer once, or None if the link has ended."""
        self.answer = answer
        self.is_done = True
        self._gate.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the answer. Return False on timeout."""
        if self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._gate.release()
        return self.is_done


class Requests:
    """All pending requests of a link. Thread-safe."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._over = False

    def new(self, *, in_order: bool = False) -> Pending:
        with self._lock:
            pending = Pending(next(self._count), in_order)
            # `end` takes this lock too. So either `end` has set `_over` already, or a later call of `end` will find this request.
            if self._over:
                pending.settle(None)
            else:
                self._pending[pending.number] = pending
            return pending

    def find(self, number: int) -> Pending | None:
        with self._lock:
            return self._pending.get(number)

    def settle(self, number: int, answer: Frame) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.settle(answer)

    def forget(self, pending: Pending) -> None:
        with self._lock:
            self._pending.pop(pending.number, None)

    def end(self) -> None:
        """End all pending requests without an answer, because the link has ended."""
        with self._lock:
            self._over = True
            left = list(self._pending.values())
            self._pending.clear()
        # Release the lock first, since a thread that wakes up may call `new`, which takes the lock.
        for pending in left:
            pending.settle(None)


class LinkError(EngineError):
    """The error if a node's agent can't be started, or no longer answers.

    stderr: Standard error of the connecting program, such as ssh.
    exit_code: The connecting program's exit code; None if it has not ended.
    """

    def __init__(self, message: str, stderr: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Hello:
    """An agent's description of its node.

    Attributes:
        python: Path and version of the agent's interpreter, such as ("/usr/bin/python3", (3, 11, 4)).
        gpus: Device numbers of the GPUs.
        interfaces: Name of a network interface -> (IPv4 address, prefix length).
        env: Environment variables of the node's shell.
        time: The node's clock at this message, in seconds since the epoch.
        library: The folder on the node that contains the package `paceline`.
        folder: Absolute path of Paceline's own folder on the node, for libraries that were sent.
    """

    host: str
    user: str
    home: str
    python: tuple[str, tuple[int, ...]]
    cores: int
    gpus: tuple[str, ...]
    interfaces: Mapping[str, tuple[str, int]]
    env: Mapping[str, str]
    pid: int
    time: float
    boot_id: str
    library: str
    folder: str

    @classmethod
    def from_frame(cls, header: Header) -> Hello:
        values = {name: header[name] for name in cls.__dataclass_fields__}
        path, version = header["python"]
        interfaces = {name: (address, prefix) for name, (address, prefix) in header["interfaces"].items()}
        return cls(
            **{**values, "python": (path, tuple(version)), "gpus": tuple(header["gpus"]), "interfaces": interfaces}
        )
