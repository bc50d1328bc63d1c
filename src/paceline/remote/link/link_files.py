"""The file operations of a link: send files to a node, and mirror a run's files from it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.remote.agent.send_queue import BULK
from paceline.remote.link.connection import AgentConnection
from paceline.remote.link.messages import Pending
from paceline.remote.replica.apply import Replica
from paceline.remote.wire import CHUNK_BYTES, Frame, Header
from paceline.runs.folder import RunFolder
from paceline.system.names import some


class LinkFiles:
    """The methods of `Link` for files on the node.

    The methods raise LinkError if the node is lost, and OSError if the agent reports an error.
    """

    _connection: AgentConnection

    def __init__(self) -> None:
        #: The local copy of the run's files, or None before `mirror` was called.
        self._replica: Replica | None = None
        self._rank = self._group = 0
        self._mirrored = ""
        self._trouble: dict[str, OSError | ValueError] = {}

    def put_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file on the node atomically, and create its folder."""
        self._connection.ask("file", data, timeout_s=60.0, path=path, mode=mode)

    def put_tree(
        self, source: Path, path: str, *, how: str = "replace", skip: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Copy a local folder to the node atomically, with symbolic links, modes and times.

        how: Treatment of a folder that exists at `path`. "keep" leaves the folder, since its name is a hash of its
            content. "replace" removes the folder first. "merge" adds the files to it.
        skip: Returns whether to leave out a path, given relative to `source`.
        """
        self._put(entries(source, skip), path, how)

    def put_files(self, files: Mapping[str, Path], path: str) -> None:
        """Send files, given as {name in the folder: local path}, as a new folder `path`."""
        self._put(entries_of(files), path, "replace")

    def _put(self, frames: Iterable[Frame], path: str, how: str) -> None:
        pending = self._connection.requests.new()
        # This frame must precede the files. Only frames of equal priority keep their order, so send it with the files' priority.
        self._connection.out.put({"op": "tree", "id": pending.number, "path": path, "how": how}, kind=BULK)
        # A broken pipe means that the link is lost. In this case `wait_for` below raises an error with the reason.
        with contextlib.suppress(BrokenPipeError):
            for header, data in frames:
                if pending.is_done:
                    break  # an early answer of the node is an error, such as a full disk
                self._send_entry(pending, header, data)
            self._send_entry(pending, {"kind": "finish"}, b"")
        # Wait without a time limit, because large folders take long. The loss of the node ends this wait.
        self._connection.wait_for(pending, f"put {path}", None)

    def _send_entry(self, pending: Pending, header: Header, data: bytes) -> None:
        # Wait for room in the queue, so that large folders take little memory.
        self._connection.out.put({"op": "entry", "of": pending.number, **header}, data, kind=BULK, wait=True)

    def make_folders(self, paths: Sequence[str], mode: int = 0o777) -> None:
        """Create folders and their parents on the node."""
        self._connection.ask("mkdirs", timeout_s=20.0, paths=list(paths), mode=mode)

    def make_link(self, path: str, target: str) -> None:
        """Create a symbolic link on the node, replacing an existing link."""
        self._connection.ask("link", timeout_s=20.0, path=path, target=target)

    def make_scratch(self, path: str) -> str:
        """Create a temporary folder, with a socket file, on the node.

        The folder is for sockets and shared memory. The agent removes the folder at its exit. It listens at the socket
        for requests of the remote shell `rsh.py`. Return the socket file's path.
        """
        header, _ = self._connection.ask("scratch", timeout_s=20.0, path=path)
        return str(header["socket"])

    def remove(self, path: str) -> None:
        """Remove a file or folder from the node, and stop mirroring it."""
        self._connection.ask("remove", timeout_s=600.0, path=path)
        if path == self._mirrored:
            self.drop_mirror()

    def drop_mirror(self) -> None:
        """Forget the mirrored run, so that this link can mirror another run's folder."""
        self._replica, self._mirrored = None, ""

    def names_in(self, path: str) -> list[str]:
        """Return the sorted names of a folder's entries on the node."""
        return list(self._connection.ask("list", path=path)[0]["names"])

    def exists(self, path: str) -> bool:
        return bool(self._connection.ask("exists", path=path)[0]["ok"])

    def sees(self, path: str, token: str) -> bool:
        """Return whether the node shares a file system: it sees `path` with the content `token`."""
        return bool(self._connection.ask("sees", path=path, token=token)[0]["ok"])

    def inode(self, path: str) -> int:
        """Return the inode of a path on the node; 0 if it is missing."""
        return int(self._connection.ask("inode", path=path)[0]["found"])

    def have(self, path: str) -> dict[str, list[int]]:
        """Return {name: [size, mtime in ns, inode]} of all files below a folder.

        The folder is on the node. The result is {} if the folder does not exist.
        """
        found: dict[str, list[int]] = self._connection.ask("have", timeout_s=120.0, path=path)[0]["found"]
        return found

    def census(self, path: str) -> tuple[int, int]:
        """Return (number of files and links, bytes) below a folder, or (-1, -1) without it."""
        count, size = self._connection.ask("census", timeout_s=120.0, path=path)[0]["found"]
        return count, size

    def free_ports(self, count: int) -> list[int]:
        """Return up to `count` ports of the node on which no process listens."""
        return list(self._connection.ask("free_ports", count=count)[0]["found"])

    def mirror(
        self,
        remote_run_dir: str,
        folder: RunFolder,
        attempt: int,
        *,
        replica: Replica | None = None,
        rank: int = 0,
        group: int = 0,
        takes_files: bool = True,
        log_limit: int = 0,
        have: Mapping[str, list[int]] | None = None,
    ) -> Pending:
        """Start to copy a run's files from the node to the local `folder`.

        remote_run_dir: The run's folder on the node.
        replica: The writer of the copies, shared by all links of a run; None to create one.
        rank: The node's rank.
        group: A number that is equal for nodes that share a file system.
        takes_files: Whether to mirror checkpoints and outputs too.
        log_limit: Bytes of each worker's log that the node keeps; 0 for no limit.
        have: Name -> [size, mtime in ns, inode] of files that the node need not send; None for the files in `folder`.

        Returns:
            The pending request, for which `answer` waits.
        """
        # All links of a run share one replica (local copy), so tell it this link's rank and group with every file.
        self._rank, self._group, self._mirrored = rank, group, remote_run_dir
        is_first = self._replica is None
        self._replica = self._replica or replica or Replica(folder.path)
        if have is None:
            have = self._replica.have() if is_first else {}
        asked = {"path": remote_run_dir, "attempt": attempt, "have": dict(have)}
        return self._connection.send("mirror", {**asked, "takes_files": takes_files, "log_limit": log_limit})

    def flush(self, *, is_last: bool = False) -> None:
        """Wait until the folder given to `mirror` has all of the run's files.

        is_last: Whether the run has ended on the node. If so, fetch the files of the script's working directory too.
        """
        self.end_flush(self.begin_flush(is_last=is_last))

    def begin_flush(self, *, is_last: bool = False) -> Pending:
        """Start a `flush` without waiting. Return the request, for `end_flush`."""
        # Use `in_order`: the answer must arrive only after all files that were sent before it are stored on this machine.
        pending = self._connection.requests.new(in_order=True)
        self._trouble.clear()
        self._connection.out.put({"op": "flush", "id": pending.number, "last": is_last})
        return pending

    def end_flush(self, pending: Pending) -> None:
        """Wait for the flush that `begin_flush` began; errors are as for `flush`."""
        self._connection.wait_for(pending, "flush", None)
        self._raise_trouble()

    def _file(self, header: Header, data: bytes) -> None:
        if self._replica is None:
            return
        try:
            self._replica.apply(header, data, rank=self._rank, group=self._group)
            # A file is complete only when its last piece has arrived.
            if header["how"] != "part" or header.get("end"):
                self._trouble.pop(header["file"], None)
        except (OSError, ValueError) as error:
            # The disk may be full. The node sends the file again after a backoff, and `flush` reports files that still fail.
            self._trouble[str(header.get("file"))] = error
            self._connection.out.put({"op": "again", "file": header.get("file")})

    def _raise_trouble(self) -> None:
        if not self._trouble:
            return
        shown, error = some(sorted(self._trouble), 3), next(iter(self._trouble.values()))
        raise OSError(getattr(error, "errno", None) or errno.EINVAL, getattr(error, "strerror", str(error)), shown)


def entries(source: Path, skip: Callable[[str], bool] = lambda name: False) -> Iterator[Frame]:
    """Yield frames for all files, links and folders below `source`, folders before their content.

    skip: Returns whether to leave out a path, given relative to `source`.

    Files that are deleted during the walk are left out. Files that become shorter are sent with their new size.
    """
    yield _about(".", "dir", os.stat(source)), b""
    yield from _below(str(source), "", skip)


def entries_of(files: Mapping[str, Path]) -> Iterator[Frame]:
    """Yield frames of a folder with these files, given as {name: local path}.

    The files become read-only on the node. Symbolic links are followed.

    Raises:
        OSError: A file can't be read. The file is not skipped, because the incomplete folder would look complete.
    """
    yield {"name": ".", "kind": "dir", "mode": 0o755, "mtime": 0}, b""
    made = set()
    for name, path in sorted(files.items()):
        # `parents` begins with the innermost folder, but the node must create the outermost folder first.
        for folder in reversed(Path(name).parents):
            if str(folder) != "." and folder not in made:
                made.add(folder)
                yield {"name": str(folder), "kind": "dir", "mode": 0o755, "mtime": 0}, b""
        for header, data in _file(os.path.realpath(path), name):
            # Several runs share these files, so make them read-only. Keep only the executable bit of their modes.
            mode = 0o555 if header.get("mode", 0) & 0o100 else 0o444
            yield header | ({"mode": mode} if "mode" in header else {}), data


def _below(folder: str, name: str, skip: Callable[[str], bool]) -> Iterator[Frame]:
    with os.scandir(folder) as found:
        # List the folder completely before descending, or a deep tree would keep one open descriptor per level.
        inside = sorted(found, key=lambda entry: entry.name)
    for entry in inside:
        mine = os.path.join(name, entry.name)
        if skip(mine):
            continue
        try:
            # Check for links first: is_dir and is_file follow links, so a link to a folder would be sent as a folder.
            if entry.is_symlink():
                yield {"name": mine, "kind": "link", "target": os.readlink(entry.path)}, b""
            elif entry.is_dir():
                yield _about(mine, "dir", entry.stat()), b""
                yield from _below(entry.path, mine, skip)
            elif entry.is_file():
                yield from _file(entry.path, mine)
        except FileNotFoundError:
            # The file was removed meanwhile, such as a temporary file of a running script.
            continue


def _file(path: str, name: str) -> Iterator[Frame]:
    with open(path, "rb", buffering=0) as file:
        about = _about(name, "file", os.fstat(file.fileno()))
        # Read one piece ahead, to know whether a piece is the last. An empty file has one empty piece.
        data = file.read(CHUNK_BYTES) or b""
        is_first = True
        while True:
            after = file.read(CHUNK_BYTES) if len(data) == CHUNK_BYTES else b""
            head = about if is_first else {"name": name, "kind": "more"}
            yield {**head, "end": not after}, data
            if not after:
                return
            data, is_first = after, False


def _about(name: str, kind: str, found: os.stat_result) -> Header:
    return {"name": name, "kind": kind, "mode": stat.S_IMODE(found.st_mode), "mtime": found.st_mtime_ns}
