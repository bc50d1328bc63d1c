"""pytest's processes share the programs that have libraries loaded; otherwise each process would load them.

<folder>/alive        a pipe that the first of pytest's processes holds open. It is the programs' standard input, which they
                      end with: so they end with that process, however it ends
<folder>/lock         held by a process that looks for a program, and starts it if there is none
<folder>/<program>    a link to "<pid> <socket>"
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: The folder through which all test processes share their programs. It is None if there is only one test process.
folder: Path | None = None


class Sharing:
    """What the first of pytest's processes has open for the others."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="pl-warm-", dir="/tmp")
        pipe = os.path.join(self.folder, "alive")
        os.mkfifo(pipe, mode=0o600)
        # Open both ends, because opening only one end would wait for another process.
        self._alive = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """End the programs."""
        os.close(self._alive)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def lifeline(place: Path) -> Iterator[int]:
    """What a program that is shared reads, for as long as it takes to start it."""
    fd = os.open(place / "alive", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def found(link: Path) -> tuple[int, str] | None:
    """The pid and the socket of a program that is there."""
    try:
        pid, _, socket = os.readlink(link).partition(" ")
    except OSError:
        return None
    return int(pid), socket


def unused(link: Path) -> Path:
    """A place for the program's socket at which no program listens or has listened."""
    count = 0
    while (place := link.with_name(f"{link.name}-{count}")).exists():
        count += 1
    return place


def note(link: Path, pid: int, socket: str) -> None:
    """Replaces the link of an ended one, if there was one."""
    link.unlink(missing_ok=True)
    link.symlink_to(f"{pid} {socket}")
