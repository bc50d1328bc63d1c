"""The requests of one side of a link that have not been answered yet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import EngineError


class Pending:
    """One request."""

    def __init__(self, number: int, in_order: bool) -> None:
        self.number = number
        #: The answer counts once all files that came before it are in their place.
        self.in_order = in_order
        self.answer: tuple[dict[str, Any], bytes] | None = None
        self._done = threading.Event()

    def settle(self, answer: tuple[dict[str, Any], bytes] | None) -> None:
        self.answer = answer
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._done.wait(timeout_s)


class Requests:
    """All of a link. Thread-safe."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._over = False

    def new(self, *, in_order: bool = False) -> Pending:
        with self._lock:
            pending = Pending(next(self._count), in_order)
            # Under the lock of `end`: a request is ended by it, or finds the end here.
            if self._over:
                pending.settle(None)
            else:
                self._pending[pending.number] = pending
            return pending

    def find(self, number: int) -> Pending | None:
        with self._lock:
            return self._pending.get(number)

    def settle(self, number: int, answer: tuple[dict[str, Any], bytes]) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.settle(answer)

    def forget(self, pending: Pending) -> None:
        with self._lock:
            self._pending.pop(pending.number, None)

    def end(self) -> None:
        """No answer will come any more."""
        with self._lock:
            self._over = True
            left = list(self._pending.values())
            self._pending.clear()
        # Without the lock: those who wait are woken, and may ask for something else at once.
        for pending in left:
            pending.settle(None)


class LinkError(EngineError):
    """A node's agent could not be started, or does not answer any more.

    stderr: what the program that was to reach it has said. exit_code: how that program ended, None where it has not.
    """

    def __init__(self, message: str, stderr: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A node as its agent found it.

    python: the agent's interpreter and its version. gpus: device numbers. interfaces: name -> (IPv4 address, length of
    the network's prefix). env: the environment that the node gives to a program. time: its clock, seconds since the
    epoch, when it said hello. library: the folder there that holds `paceline`; folder: what `folder` was expanded to.
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
    def from_frame(cls, header: Mapping[str, Any]) -> Hello:
        values = {name: header[name] for name in cls.__dataclass_fields__}
        path, version = header["python"]
        interfaces = {name: (address, prefix) for name, (address, prefix) in header["interfaces"].items()}
        return cls(
            **{**values, "python": (path, tuple(version)), "gpus": tuple(header["gpus"]), "interfaces": interfaces}
        )
