"""A line in the log for each request, with its id; written several at a time, for a write takes as long as an answer."""

from __future__ import annotations

import os
import time

_FULL = 64


class AccessLog:
    """fd: where lines go. is_on: False writes none."""

    def __init__(self, fd: int, is_on: bool) -> None:
        self._fd, self.is_on = fd, is_on
        self._lines: list[str] = []

    def add(self, method: str, path: bytes, status: int, size: int, seconds: float, request_id: bytes) -> None:
        if not self.is_on:
            return
        self._lines.append(
            f"{_stamp()} {method} {_shown(path)} {status} {size} {seconds * 1000:.3f}ms {_shown(request_id)}\n"
        )
        if len(self._lines) >= _FULL:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            text, self._lines = "".join(self._lines).encode(), []
            try:
                os.write(self._fd, text)
            except OSError:
                pass  # whoever read the log has gone; the service has not


_second = (0, "")


def _stamp() -> str:
    """The time in UTC; the part down to seconds is made once a second."""
    global _second
    now = time.time()
    whole = int(now)
    if whole != _second[0]:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return f"{_second[1]}.{int((now - whole) * 1000):03d}Z"


def _shown(text: bytes) -> str:
    """Without control characters, by which a client could write lines of its own into the log."""
    found = text.decode("latin-1")
    return found if found.isascii() and found.isprintable() else ascii(found)[1:-1]
