"""Files that come from nodes, put where they belong (the nodes' side: `paceline.remote.agent.sender`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import IO, Any

from paceline.remote.agent.sender import stamp_of
from paceline.runs.folder import RunFolder
from paceline.system import gaps
from paceline.system.files import append_line
from paceline.system.links import target_in

#: Files on their way, in the folder that they come to: on the same file system, and found by whoever cleans up.
INCOMING = ".incoming"
#: Folders of a run that its nodes write in.
MIRRORED = ("attempts", "metrics", "prepared", "checkpoints", "outputs", "artifacts", "uploads")


class Inbox:
    """The folder that files of one or several nodes come to. Thread-safe.

    Where two nodes have files of one name, the later one stays; of two that are equally old, that of the lower rank.
    of_run: the folder is a run's. Then nothing but what nodes write in it is taken, and what they leave out is noted.
    A node says what it likes: no name and no link of its leads out of the folder.
    """

    def __init__(self, top: Path, *, of_run: bool = False) -> None:
        self.top, self._of_run = top, of_run
        self._real = os.path.realpath(top)
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], tuple[str, IO[bytes]]] = {}
        self._failed: dict[tuple[int, int], OSError] = {}
        self._origin: dict[str, int] = {}
        #: (group, name, inode) -> bytes of it that were appended here
        self._appended: dict[tuple[int, str, int], int] = {}
        self._known: dict[tuple[int, str], int] = {}
        self._left: set[tuple[str, str]] = set()

    def have(self, folders: tuple[str, ...]) -> dict[str, list[int]]:
        """What is here below these folders: name -> [size, time of change]."""
        found: dict[str, list[int]] = {}
        for folder in folders:
            for directory, names, files in os.walk(self.top / folder):
                for name in (*names, *files):
                    path = os.path.join(directory, name)
                    if (stamp := stamp_of(path)) is not None:
                        found[os.path.relpath(path, self.top)] = stamp
        found.pop(INCOMING, None)
        return found

    def take(self, header: dict[str, Any], data: bytes, *, rank: int = 0, group: int = 0) -> None:
        """One frame. rank: of the node that it came from; group: nodes that see one folder have the same.

        Raises:
            OSError: no room; PermissionError for a name that leaves the folder.
        """
        with self._lock:
            how = header["how"]
            if how == "left":
                self._note_left(header)
                return
            path = self._path(header["file"])
            if how == "grow":
                self._grow(path, header, data, group)
            elif how == "append":
                self._append(path, header, data, group)
            elif how == "part":
                self._part(path, header, data, rank)
            elif how == "link":
                self._link(path, header, rank)
            elif how == "dir":
                if os.path.islink(path):
                    os.unlink(path)  # the user's own, there in a folder's place before
                os.makedirs(path, exist_ok=True)
                self._origin[header["file"]] = rank
            elif how == "gone":
                self._gone(path, header, rank)

    def close(self, rank: int | None = None) -> None:
        """Forget what has come in part, from this node or from all."""
        with self._lock:
            for key in [key for key in self._parts if rank is None or key[0] == rank]:
                beside, file = self._parts.pop(key)
                file.close()
                with contextlib.suppress(OSError):
                    os.unlink(beside)
            if not self._parts:
                shutil.rmtree(self.top / INCOMING, ignore_errors=True)

    def _path(self, name: str) -> str:
        path = os.path.normpath(os.path.join(self.top, name))
        if self._of_run and not _is_written_there(name):
            raise PermissionError(1, "is no name that nodes give", name)
        parent = os.path.realpath(os.path.dirname(path))
        if os.path.commonpath([parent, self._real]) != self._real or path == str(self.top):
            raise PermissionError(1, "leaves the run's folder", name)
        os.makedirs(parent, exist_ok=True)
        return os.path.join(parent, os.path.basename(path))

    def _link(self, path: str, header: dict[str, Any], rank: int) -> None:
        # Where it will lie, which may be behind a link to another folder of the run.
        name = os.path.relpath(path, self._real)
        target = target_in(name, header["target"], self._of_run)
        if target is None:
            self._note_left({**header, "why": f"a link that leads out of the run, to {header['target']!r}"})
        elif self._is_later(header, path, rank):
            beside = self._incoming(f"{rank}-link")
            os.symlink(target, beside)
            os.replace(beside, path)

    def _note_left(self, header: dict[str, Any]) -> None:
        if self._of_run and _is_written_there(header["file"]) and (header["file"], header["why"]) not in self._left:
            self._left.add((header["file"], header["why"]))
            append_line(RunFolder(self.top).left_out, {"name": header["file"], "why": header["why"]})

    def _grow(self, path: str, header: dict[str, Any], data: bytes, group: int) -> None:
        # Another node of the group may have brought this very file, and more of it.
        known = self._known.get((group, header["file"]))
        cut = header["cut"] == "shrunk" or (header["cut"] == "new" and known != header["ino"])
        self._known[group, header["file"]] = header["ino"]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if cut else 0), 0o666)
        try:
            _write_all(fd, data, header["at"])
        finally:
            os.close(fd)

    def _append(self, path: str, header: dict[str, Any], data: bytes, group: int) -> None:
        key = (group, header["file"], header["ino"])
        done = self._appended.get(key, header["at"])
        if new := data[max(0, done - header["at"]) :]:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                _write_all(fd, new, None)
            finally:
                os.close(fd)
        self._appended[key] = max(done, header["at"] + len(data))

    def _part(self, path: str, header: dict[str, Any], data: bytes, rank: int) -> None:
        key = (rank, header["key"])
        if key in self._failed:
            if header.get("end") or header.get("drop"):
                error = self._failed.pop(key)
                if header.get("end"):
                    raise error
            return
        try:
            if key not in self._parts and not header.get("drop"):
                beside = self._incoming(f"{rank}-{header['key']}")
                self._parts[key] = (beside, open(beside, "wb", buffering=0))  # noqa: SIM115
            if key in self._parts:
                _write_all(self._parts[key][1].fileno(), data, None)
        except OSError as error:
            # The rest of it is on its way.
            self._drop(key)
            if not header.get("end"):
                self._failed[key] = error
            raise
        if header.get("drop"):
            self._drop(key)
        if not header.get("end") or key not in self._parts:
            return
        beside, file = self._parts.pop(key)
        is_whole = os.fstat(file.fileno()).st_size == header["size"]
        file.close()
        if is_whole and self._is_later(header, path, rank):
            os.chmod(beside, header["mode"])
            os.utime(beside, ns=(header["mtime"], header["mtime"]))
            os.replace(beside, path)
            gaps.apply(path)
        else:
            os.unlink(beside)

    def _is_later(self, header: dict[str, Any], path: str, rank: int) -> bool:
        name = header["file"]
        origin, here = self._origin.get(name), stamp_of(path)
        if here is not None and origin is not None and origin != rank:
            is_older = (header["mtime"], -rank) < (here[1], -origin)
            if is_older:
                return False
        self._origin[name] = rank
        return True

    def _gone(self, path: str, header: dict[str, Any], rank: int) -> None:
        if self._origin.get(header["file"], rank) != rank:
            return
        if not os.path.islink(path) and stamp_of(path) != header["stamp"]:  # a link is as old as it is here
            return
        with contextlib.suppress(OSError):  # a folder in which others have something
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.rmdir(path)
            else:
                os.unlink(path)

    def _drop(self, key: tuple[int, int]) -> None:
        if found := self._parts.pop(key, None):
            beside, file = found
            file.close()
            os.unlink(beside)

    def _incoming(self, name: str) -> str:
        folder = self.top / INCOMING
        folder.mkdir(exist_ok=True)
        return str(folder / name)


def _is_written_there(name: str) -> bool:
    """Whether it is a name in a run's folder that its nodes write."""
    top, _, rest = os.path.normpath(name).partition(os.sep)
    if top == "logs":
        return rest == "driver.log" or rest.startswith("prepare_")
    return top in MIRRORED if rest else top in MIRRORED or top in ("environment.json", "notes.jsonl")


def _write_all(fd: int, data: bytes, at: int | None) -> None:
    view = memoryview(data)
    while view:
        written = os.write(fd, view) if at is None else os.pwrite(fd, view, at)
        view = view[written:]
        at = None if at is None else at + written
