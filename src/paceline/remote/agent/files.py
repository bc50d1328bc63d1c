"""Handle the agent's requests about files on its node, and write files and trees atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from typing import IO

from paceline.remote.agent.send_queue import SendQueue
from paceline.remote.replica.changes import stamp_of
from paceline.remote.wire import Header


class FileRequests:
    """A handler of the supervisor's requests about files.

    fail: A callback that answers a request with an error.
    """

    def __init__(self, out: SendQueue, fail: Callable[[int, Exception], None]) -> None:
        self._out, self._fail = out, fail
        self._arrivals: dict[int, AtomicWrite] = {}

    def drop(self) -> None:
        """Remove files and trees that have arrived only partly."""
        for arrival in self._arrivals.values():
            arrival.drop()

    def op_file(self, header: Header, data: bytes) -> Header:
        whole = AtomicWrite(header["path"], "replace")
        try:
            # Write the file in the same way as a tree of files that has a single entry.
            entry = {"name": ".", "kind": "file", "mode": header["mode"], "mtime": time.time_ns(), "end": True}
            whole.take(entry, data)
            whole.finish()
        except BaseException:
            whole.drop()
            raise
        return {}

    def op_tree(self, header: Header, data: bytes) -> None:
        self._arrivals[header["id"]] = AtomicWrite(header["path"], header["how"])

    def op_entry(self, header: Header, data: bytes) -> None:
        request = header["of"]
        arrival = self._arrivals.get(request)
        if arrival is None:
            return  # an earlier entry of this tree has failed, and this was reported
        try:
            if header["kind"] == "finish":
                arrival.finish()
                del self._arrivals[request]
                self._out.put({"re": request})
            else:
                arrival.take(header, data)
        except OSError as error:
            del self._arrivals[request]
            arrival.drop()
            self._fail(request, error)

    def op_mkdirs(self, header: Header, data: bytes) -> Header:
        for path in header["paths"]:
            os.makedirs(path, mode=header.get("mode", 0o777), exist_ok=True)
        return {}

    def op_link(self, header: Header, data: bytes) -> Header:
        # `symlink` refuses an existing name, so create the link under a temporary name, then rename it.
        beside = f"{header['path']}.{os.getpid()}"
        os.symlink(header["target"], beside)
        os.replace(beside, header["path"])
        return {}

    def op_list(self, header: Header, data: bytes) -> Header:
        return {"names": sorted(os.listdir(header["path"]))}

    def op_exists(self, header: Header, data: bytes) -> Header:
        return {"ok": os.path.lexists(header["path"])}

    def op_sees(self, header: Header, data: bytes) -> Header:
        try:
            # The file should hold a short token. Read no more: the path may lead to an unrelated file of any size.
            with open(header["path"], encoding="utf-8") as file:
                return {"ok": file.read(1 << 12) == header["token"]}
        except (OSError, ValueError):
            return {"ok": False}

    def op_inode(self, header: Header, data: bytes) -> Header:
        return {"found": os.stat(header["path"]).st_ino if os.path.exists(header["path"]) else 0}

    def op_have(self, header: Header, data: bytes) -> Header:
        top = header["path"]
        paths = (os.path.join(directory, name) for directory, _, files in os.walk(top) for name in files)
        return {"found": {os.path.relpath(path, top): stamp_of(path) for path in paths}}

    def op_census(self, header: Header, data: bytes) -> Header:
        return {"found": census(header["path"])}


class AtomicWrite:
    """A file or folder that arrives in pieces, and gets its name when complete.

    how: Treatment of a folder that exists at `path`. "keep" leaves the folder, since its name is a hash of its content.
        "replace" removes the folder first. "merge" adds the new files to it.
    """

    def __init__(self, path: str, how: str) -> None:
        self._path, self._how = path, how
        self._token = f"{os.getpid()}-{os.urandom(4).hex()}"
        parent = os.path.dirname(path)
        os.makedirs(parent, exist_ok=True)
        self._top = path if how == "merge" else os.path.join(parent, f".new-{self._token}")
        self._file: IO[bytes] | None = None
        self._entry: Header = {}
        self._folders: list[tuple[str, Header]] = []

    def take(self, entry: Header, data: bytes) -> None:
        """Write the folder, link or file piece that `entry` describes. `end` marks a file's last piece."""
        path = os.path.normpath(os.path.join(self._top, entry["name"]))
        if entry["kind"] == "more":
            assert self._file is not None, "a piece of no file"
            self._write(self._file, data)
        elif entry["kind"] == "dir":
            os.makedirs(path, exist_ok=True)
            self._folders.append((path, entry))
        elif entry["kind"] == "link":
            # A link can't be overwritten, so create the new link under a temporary name, then rename it.
            beside = self._beside(path)
            os.symlink(entry["target"], beside)
            os.replace(beside, path)
        else:
            self._entry = entry | {"path": path}
            self._file = open(self._beside(path), "wb", buffering=0)  # noqa: SIM115
            self._write(self._file, data)
        if self._file is not None and entry.get("end"):
            self._close(self._file)

    def finish(self) -> None:
        """Give the complete tree its final name."""
        # Set folders' times and modes at the end, innermost first: new files change a folder's time, and a mode may block access.
        for path, entry in reversed(self._folders):
            if self._how != "merge" or path != self._top:
                os.chmod(path, entry["mode"])
                os.utime(path, ns=(entry["mtime"], entry["mtime"]))
        if self._how == "merge":
            return
        if self._how == "replace" and os.path.isdir(self._path) and not os.path.islink(self._path):
            # A rename can replace only an empty folder, so first move the old folder away.
            old = f"{self._top}-old"
            os.rename(self._path, old)
            remove(old)
        try:
            os.rename(self._top, self._path)
        except OSError:
            # The rename fails if another run has written the same tree meanwhile.
            if not os.path.isdir(self._path):
                raise
            remove(self._top)

    def drop(self) -> None:
        """Remove incomplete pieces of the file or folder."""
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._beside(self._entry["path"]))
        if self._how != "merge":
            remove(self._top)

    def _beside(self, path: str) -> str:
        # Use a short temporary name, since `path` may have the maximum length already.
        return os.path.join(os.path.dirname(path), f".new-{self._token}-file") if self._how == "merge" else path

    def _write(self, file: IO[bytes], data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]

    def _close(self, file: IO[bytes]) -> None:
        entry, self._file = self._entry, None
        beside = self._beside(entry["path"])
        try:
            # Set the mode before the rename, so that readers never see a temporary mode.
            os.fchmod(file.fileno(), entry["mode"])
        finally:
            file.close()
        # Set the modification time after the last write, because each write changes it.
        os.utime(beside, ns=(entry["mtime"], entry["mtime"]))
        os.replace(beside, entry["path"])


def remove(path: str) -> None:
    """Remove a file or a tree, including read-only folders. Ignore a missing path."""
    if os.path.islink(path) or os.path.isfile(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return
    shutil.rmtree(path, ignore_errors=True)
    # A removal usually fails only because of read-only folders, so make them writable and retry.
    if os.path.isdir(path):
        for directory, _, _ in os.walk(path):
            with contextlib.suppress(OSError):
                os.chmod(directory, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def census(path: str) -> tuple[int, int]:
    """Return (number of files and links, total bytes) below the folder `path`.

    The result is (-1, -1) if `path` is not a folder.
    """
    if not os.path.isdir(path):
        return -1, -1
    count = size = 0
    for directory, folders, files in os.walk(path):
        # os.walk lists links to folders among the folders, but does not enter them. So count these links here as files.
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(directory, name)))):
            found = os.lstat(os.path.join(directory, name))
            count += 1
            size += found.st_size
    return count, size
