"""Apply changes that another machine sends to this machine's copy of a run's folder.

`paceline.remote.replica.changes` makes the changes.

The sender is not trusted: its names and links can't lead out of the folder, or to files that only this machine writes.
Nothing is written through links. Incomplete files are in the subfolder `.incoming`, and a rename completes them. A
frame that arrives twice does no harm, unless it appends lines to a file that both machines write.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.remote.replica.changes import FILES, LARGE, LIVE_LOGS, NODE_FILES, RECORD, SMALL, WORK, Stamp, stamp_of
from paceline.remote.wire import Header
from paceline.runs.folder import RunFolder
from paceline.system import gaps
from paceline.system.files import append_line
from paceline.system.links import target_in

INCOMING = ".incoming"
_CHECK_S = 1.0


class ReplicaError(ValueError):
    """An error because another machine sent a forbidden or invalid change."""


class Replica:
    """A copy of a run's folder, to which other machines send changes. Thread-safe.

    take_record: A function that stores the run's record, which a remote supervisor sends. None if this machine supervises
        the run, whose nodes then send the changes. If two nodes send files with the same name, this copy keeps the newer
        file, or the file of the lower node rank if both are equally old.
    known: Name -> [size, mtime in ns, inode] of the files that have arrived, updated by `apply`. Senders skip them.
    removed: Names of the user's files that were removed from this copy because the sender has removed them, updated by `apply`.
    check: Called before a change is applied, but not again within `_CHECK_S` seconds.
    """

    def __init__(
        self,
        top: Path,
        take_record: Callable[[bytes], None] | None = None,
        known: dict[str, Stamp] | None = None,
        removed: set[str] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.top = top
        self.known = {} if known is None else known
        self.removed = set() if removed is None else removed
        self._take_record, self._of_nodes = take_record, take_record is None
        self._may_apply, self._checked_s = check, 0.0
        # Guards this object, because the threads of several links call it at the same time.
        self._lock = threading.Lock()
        self._failed: dict[str, OSError] = {}
        #: Name of a growing file -> the offset from which data is missing because it could not be written, and the error.
        self._lacking: dict[str, tuple[int, OSError]] = {}
        self._origin: dict[str, int] = {}
        #: (number of a group of nodes with a common folder, file, inode) -> offset up to which it was appended here.
        self._appended: dict[tuple[int, str, int], int] = {}
        #: (number of a group of nodes with a common folder, file) -> the file's inode on these nodes.
        self._inodes: dict[tuple[int, str], int] = {}
        self._left: set[tuple[str, str]] = set()
        self._grown: set[str] = set()

    def have(self) -> dict[str, Stamp]:
        """Return {name: [size, mtime, 0]} of mirrored files in the copy, except logs.

        The 0 stands for the inode on the sending machine, which is unknown.
        """
        found: dict[str, Stamp] = {}
        for folder in {*SMALL, *LARGE} - {"logs"}:
            for directory, names, files in os.walk(self.top / folder):
                for path in (os.path.join(directory, name) for name in (*names, *files)):
                    if (stamp := stamp_of(path)) is not None:
                        found[os.path.relpath(path, self.top)] = [*stamp[:2], 0]
        return found

    def apply(self, header: Header, data: bytes = b"", *, rank: int = 0, group: int = 0) -> None:
        """Apply the change in a frame to the run's folder.

        rank: Rank of the sending node.
        group: A number that is equal for nodes that share a folder.

        Raises:
            ReplicaError: The frame is forbidden or invalid.
            OSError: The disk is full.
        """
        do = {
            "grow": self._grow,
            "append": self._append,
            "part": self._part,
            "link": self._link,
            "dir": self._dir,
            "gone": self._gone,
            "left": self._note_left,
        }
        try:
            with self._lock:
                if time.monotonic() > self._checked_s + _CHECK_S:
                    self._may_apply()
                    self._checked_s = time.monotonic()
                self._check(header["file"], header["how"])
                do[header["how"]](header, data, rank, group)
        except (AttributeError, KeyError, TypeError) as error:
            raise ReplicaError(f"what came is not a change of a file: {dict(header)}") from error

    def take_grown(self) -> set[str]:
        """Return the names of logs and metrics with new lines since the last call."""
        with self._lock:
            grown, self._grown = self._grown, set()
            return grown

    def close(self, rank: int | None = None) -> None:
        """Delete incomplete files of the node with this rank, or of all nodes."""
        with self._lock, contextlib.suppress(OSError):
            for name in os.listdir(self.top / INCOMING):
                if rank is None or name.startswith(f"{rank}-"):
                    os.unlink(self.top / INCOMING / name)
            os.rmdir(self.top / INCOMING)

    # --- one method for each kind of frame

    def _grow(self, header: Header, data: bytes, rank: int, group: int) -> None:
        name, inode = header["file"], header["ino"]
        # Don't truncate the file if another node of the group has sent this version of the file already.
        cut = header["cut"] == "shrunk" or (header["cut"] == "new" and self._inodes.get((group, name)) != inode)
        lacks_from, earlier = self._lacking.pop(name, (header["at"], None))
        try:
            if earlier is not None and header["at"] > lacks_from:
                raise earlier  # without the data before it, a hole of zero bytes would be in the file
            _write(self._path(name), data, header["at"], os.O_CREAT | (os.O_TRUNC if cut else 0))
        except OSError as error:
            self._lacking[name] = min(lacks_from, header["at"]), error
            raise
        self._inodes[group, name] = inode
        self._grown.add(name)
        self.known[name] = [header["at"] + len(data), 0, inode]

    def _append(self, header: Header, data: bytes, rank: int, group: int) -> None:
        name, at = header["file"], header["at"]
        key = (group, name, header["ino"])
        # Several nodes may send the same file. So append only the data that follows the part which was appended already.
        done = self._appended.get(key, at)
        if new := data[max(0, done - at) :]:
            _write(self._path(name), new, None, os.O_CREAT | os.O_APPEND)
        self._appended[key] = max(done, at + len(data))
        self.known[name] = [self._appended[key], 0, header["ino"]]

    def _part(self, header: Header, data: bytes, rank: int, group: int) -> None:
        name, at, is_last = header["file"], header.get("at", 0), bool(header.get("end"))
        key = f"{rank}-{int(header['key'])}"
        beside = os.path.join(self.top, INCOMING, key)
        if header.get("drop"):
            self._failed.pop(key, None)
            _unlink(beside)
            return
        if key in self._failed:  # skip this piece, because an earlier piece of the file did not fit on the disk
            if is_last:
                raise self._failed.pop(key)
            return
        try:
            _make_folder(os.path.dirname(beside))
            _write(beside, data, at, 0 if at else os.O_CREAT | os.O_TRUNC)
        except FileNotFoundError as error:
            # If this frame has come before, the file is complete and has its final name already.
            if (stamp_of(self._path(name)) or [])[:2] != header["stamp"][:2]:
                raise ReplicaError(f"of {name!r} the beginning has not come") from error
            return
        except OSError as error:
            _unlink(beside)
            if not is_last:
                self._failed[key] = error
            raise
        if not is_last:
            return
        if name == RECORD and self._take_record is not None:
            whole = Path(beside).read_bytes()
            os.unlink(beside)
            self._take_record(whole)
        elif self._is_later(header, rank):
            path, mtime = self._path(name), header["stamp"][1]
            # Remove the setuid and setgid bits from the mode.
            os.chmod(beside, header["mode"] & 0o777)
            os.utime(beside, ns=(mtime, mtime))
            self._put(beside, path)
            self.removed.discard(name)
            if name.startswith("attempts/"):
                gaps.apply(path)
        else:
            os.unlink(beside)
        self.known[name] = header["stamp"]

    def _link(self, header: Header, data: bytes, rank: int, group: int) -> None:
        name = header["file"]
        target = target_in(name, header["target"])
        if target is None and self._of_nodes:
            why = f"a link that leads out of the run, to {header['target']!r}"
            self._note_left({**header, "why": why}, data, rank, group)
        elif target is None:
            raise ReplicaError(f"the link {name!r} to {header['target']!r} leads out of the run's folder")
        elif self._is_later(header, rank):
            # Let the temporary name begin with the node's rank, so that `close` finds the temporary files of this node.
            beside = os.path.join(self.top, INCOMING, f"{rank}-link")
            os.makedirs(os.path.dirname(beside), exist_ok=True)
            _unlink(beside)
            os.symlink(target, beside)
            self._put(beside, self._path(name))
            self.known[name] = header["stamp"]

    def _dir(self, header: Header, data: bytes, rank: int, group: int) -> None:
        name, path = header["file"], self._path(header["file"])
        if not stat.S_ISDIR(_mode(path)) and self._origin.get(name, rank) == rank:
            _unlink(path)  # remove a file or link that has the new folder's name
        os.makedirs(path, exist_ok=True)
        self._origin[name] = rank
        self.known[name] = header["stamp"]

    def _gone(self, header: Header, data: bytes, rank: int, group: int) -> None:
        name, folder = header["file"], os.path.dirname(header["file"])
        path = os.path.join(self.top, name)
        self.known.pop(name, None)
        is_behind_link = os.path.realpath(os.path.dirname(path)) != os.path.join(os.path.realpath(self.top), folder)
        if is_behind_link or self._origin.get(name, rank) != rank:
            return
        if not os.path.islink(path) and (stamp_of(path) or [])[:2] != header["stamp"][:2]:
            return  # the local version of the file is not the version that the node has removed
        with contextlib.suppress(OSError):  # the folder may still have files of other nodes
            (os.rmdir if stat.S_ISDIR(_mode(path)) else os.unlink)(path)
            self.removed.add(name)

    def _note_left(self, header: Header, data: bytes, rank: int, group: int) -> None:
        if self._of_nodes and (header["file"], header["why"]) not in self._left:
            self._left.add((header["file"], header["why"]))
            append_line(RunFolder(self.top).left_out, {"name": header["file"], "why": header["why"]})

    # --- names of files, and the paths to write to

    def _check(self, name: str, how: str) -> None:
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ReplicaError(f"the name {name!r} is not that of a file below a folder")
        if len(parts) > 1:
            is_theirs = parts[0] in (*SMALL, *LARGE, WORK) and not (self._of_nodes and name.startswith(LIVE_LOGS))
        elif how == "left":
            is_theirs = name in LARGE
        else:
            is_theirs = name in (NODE_FILES if self._of_nodes else (RECORD, *FILES))
        if not is_theirs:
            raise ReplicaError(f"the name {name!r} is not one that the other side may send")

    def _path(self, name: str) -> str:
        """Return the path of the file `name` in this copy, and create its parent folders."""
        path, (*above, last) = str(self.top), name.split("/")
        for part in above:
            path = os.path.join(path, part)
            if os.path.islink(path):
                if above[0] in SMALL:
                    raise ReplicaError(f"the path {name!r} has a link in it")
                os.unlink(path)
        _make_folder(path)
        return os.path.join(path, last)

    def _put(self, beside: str, path: str) -> None:
        if stat.S_ISDIR(_mode(path)):
            # A folder has this file's name. With several nodes, remove it only if it is empty: it may have files of other nodes.
            os.rmdir(path) if self._of_nodes else shutil.rmtree(path)
        os.replace(beside, path)

    def _is_later(self, header: Header, rank: int) -> bool:
        name = header["file"]
        origin, here = self._origin.get(name), stamp_of(os.path.join(self.top, name))
        if here is not None and origin is not None and origin != rank:
            is_older = (header["stamp"][1], -rank) < (here[1], -origin)
            if is_older:
                return False
        self._origin[name] = rank
        return True


def _write(path: str, data: bytes, at: int | None, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
    try:
        view = memoryview(data)
        while view:
            written = os.write(fd, view) if at is None else os.pwrite(fd, view, at)
            view = view[written:]
            at = None if at is None else at + written
    finally:
        os.close(fd)


def _make_folder(path: str) -> None:
    # Check first: for an existing folder, `makedirs` takes three system calls and an exception.
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
