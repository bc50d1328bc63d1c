"""Small helpers for files that other processes read while they are written."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace `path` by `text` so that a reader sees the old or the new, never a part.

    sync: also survive a power cut.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    try:
        with open(beside, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_json(path: Path, value: Any, *, sync: bool = False) -> None:
    # Not indented: Python's indenting encoder takes ten times as long, and runs wait for it at each change of state.
    write_whole(path, json.dumps(value) + "\n", sync=sync)


def read_json(path: Path) -> Any:
    """The value in `path`; None where there is no such file or it is not whole JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line in one write, so that lines of several processes never mix."""
    line = json.dumps(value).encode() + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # A line that a full disk or a SIGKILL cut short must not swallow this one.
        if _ends_torn(path):
            line = b"\n" + line
        if (written := os.write(fd, line)) != len(line):
            os.write(fd, line[written:])  # a full disk cuts a write short, and the next says so
    finally:
        os.close(fd)


def json_lines(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines; lines cut short are passed over, a missing file is empty."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    for line in data.split(b"\n"):
        if line:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _ends_torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
