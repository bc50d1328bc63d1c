"""Files that go from a node to the supervisor: what only grows by its new bytes, everything else whole.

Each file goes as frames of a stream `to`: that of the run's mirror, or of one request to fetch a tree.

    how    "grow"    bytes at an offset `at` of the file with inode `ino`; `cut`: it is to be emptied first
           "append"  bytes that were appended at `at`, to be appended to a file that others append to as well
           "part"    a piece of a file; the last has `end`, with size, mode and time; `drop` takes the pieces back
           "link", "dir", "gone"
           "left"    a name that is left out; `why`: a link that leads out of the run, a pipe (`paceline.system.links`)
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Generator, Iterator
from typing import Any

from paceline.remote.agent.send_queue import SendQueue
from paceline.remote.agent.wire import CHUNK_BYTES
from paceline.system.gaps import next_data
from paceline.system.links import Entry, open_below

_keys = itertools.count(1)


class Sender:
    """Sends files below `top` on the stream `to`; `kind` is the class of frames that they go in."""

    def __init__(self, top: str, to: int, out: SendQueue) -> None:
        self.top, self._to, self._out = top, to, out

    def put(self, name: str, how: str, kind: int, data: bytes = b"", **values: Any) -> None:
        """One frame about a file, once there is room for it."""
        self._out.put({"op": "file", "to": self._to, "file": name, "how": how, **values}, data, kind=kind, wait=True)

    def grown(self, name: str, how: str, known: list[int], kind: int) -> None:
        """Send what has come to a file. known: [inode, offset] of what was sent so far; brought up to date."""
        try:
            with open(open_below(self.top, name), "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                cut = ""
                if found.st_ino != known[0]:
                    cut = "new"
                elif found.st_size < known[1]:
                    cut = "shrunk"
                elif found.st_size == known[1]:
                    return
                if cut:
                    known[:] = [found.st_ino, 0]
                known[1] = file.seek(next_data(file.fileno(), known[1], found.st_size))
                while data := file.read(min(CHUNK_BYTES, found.st_size - known[1])):
                    self.put(name, how, kind, data, at=known[1], ino=found.st_ino, cut=cut)
                    known[1] = file.seek(next_data(file.fileno(), known[1] + len(data), found.st_size))
                    cut = ""
                if cut:
                    self.put(name, how, kind, at=0, ino=found.st_ino, cut=cut)
        except BrokenPipeError:
            raise
        except OSError:
            return  # gone, or not to be read: others of the run's files still are

    def whole(self, entry: Entry, kind: int, *, as_it_is: bool = False) -> Generator[None, None, bool]:
        """Send a file piece by piece, a step for each; the generator's value is whether it was sent.

        What has changed while it was read is taken back, unless `as_it_is`.
        """
        name, key, begun = entry.name, next(_keys), False
        try:
            if entry.kind == "link":
                found = os.lstat(os.path.join(self.top, name))
                self.put(name, "link", kind, target=entry.target, mtime=found.st_mtime_ns)
                return True
            if entry.kind == "dir":
                found = os.stat(os.path.join(self.top, entry.real))
                self.put(name, "dir", kind, mode=stat.S_IMODE(found.st_mode))
                return True
            # By a way without links: what was a file when it was found must not lead elsewhere now.
            with open(open_below(self.top, entry.real), "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                left = before.st_size
                while left > CHUNK_BYTES and (data := file.read(CHUNK_BYTES)):
                    self.put(name, "part", kind, data, key=key)
                    left -= len(data)
                    begun = True
                    yield
                data = file.read(left) or b""
                after = os.fstat(file.fileno())
            if not as_it_is and (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                self.put(name, "part", kind, key=key, drop=True)
                return False
            self.put(
                name,
                "part",
                kind,
                data,
                key=key,
                end=True,
                size=before.st_size,
                mode=stat.S_IMODE(before.st_mode),
                mtime=before.st_mtime_ns,
            )
            return True
        except BrokenPipeError:
            raise
        except OSError as error:
            if begun:
                self.put(name, "part", kind, key=key, drop=True)
            if as_it_is and os.path.lexists(os.path.join(self.top, name)):
                self.put(name, "left", kind, why=f"a file that can't be read: {error.strerror or error}")
            return False

    def send(self, entry: Entry, kind: int) -> None:
        """Send a file at one go, as it is."""
        for _ in self.whole(entry, kind, as_it_is=True):
            pass


def stamp_of(path: str) -> list[int] | None:
    """[size, time of change in ns] of a file, by which it is known whether it has changed; None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        return [0, 0]
    return [found.st_size, found.st_mtime_ns]


def names_below(top: str, folder: str) -> Iterator[str]:
    """Names, relative to `top`, of all below `top/folder`: folders first, links not followed."""
    start = os.path.join(top, folder) if folder else top
    for directory, folders, files in os.walk(start):
        for name in sorted(folders) + sorted(files):
            path = os.path.join(directory, name)
            yield os.path.relpath(path, top)
