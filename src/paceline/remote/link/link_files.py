"""Files to and from a node, and questions about them: a link's part that has to do with its disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.remote.agent.send_queue import BULK
from paceline.remote.link.connection import AgentConnection
from paceline.remote.link.messages import Pending
from paceline.remote.replica.apply import Replica
from paceline.remote.wire import CHUNK_BYTES
from paceline.runs.folder import RunFolder
from paceline.system.names import some


class LinkFiles:
    """The part of `Link` that has to do with files.

    Its calls raise `LinkError` where the node is lost, and OSError for what the agent met with.
    """

    _connection: AgentConnection

    def __init__(self) -> None:
        #: What comes of the run's files goes here, once there is a mirror there.
        self._replica: Replica | None = None
        self._rank = self._group = 0
        self._mirrored = ""
        self._trouble: dict[str, OSError | ValueError] = {}

    def put_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file, whole or not at all; its folder is made."""
        self._connection.ask("file", data, timeout_s=60.0, path=path, mode=mode)

    def put_tree(
        self, source: Path, path: str, *, how: str = "replace", skip: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Send a folder, whole or not at all; links, modes and times are kept.

        how: "keep" leaves what is there (a name that tells the content), "replace" takes its place, "merge" adds the
            files to what is there. skip: names, relative to `source`, that are not sent.
        """
        self._put(entries(source, skip), path, how)

    def put_files(self, files: Mapping[str, Path], path: str) -> None:
        """Send a folder of these files, by their names in it, whole or not at all; what is at `path` already is replaced.

        Raises:
            OSError: also where one can't be read here.
        """
        self._put(entries_of(files), path, "replace")

    def _put(self, frames: Iterable[tuple[dict[str, Any], bytes]], path: str, how: str) -> None:
        pending = self._connection.requests.new()
        # Of the same kind as its entries: frames keep their order within a kind, so that it comes before them.
        self._connection.out.put({"op": "tree", "id": pending.number, "path": path, "how": how}, kind=BULK)
        # The link is lost; `wait_for` says why, which a broken pipe does not.
        with contextlib.suppress(BrokenPipeError):
            for header, data in frames:
                if pending.is_done:
                    break  # an error: no room, say
                self._send_entry(pending, header, data)
            self._send_entry(pending, {"kind": "finish"}, b"")
        # No time limit: a large folder takes as long as it takes, and a node that is lost ends the wait.
        self._connection.wait_for(pending, f"put {path}", None)

    def _send_entry(self, pending: Pending, header: dict[str, Any], data: bytes) -> None:
        # Waits for room, so that a folder of any size takes little memory.
        self._connection.out.put({"op": "entry", "of": pending.number, **header}, data, kind=BULK, wait=True)

    def make_folders(self, paths: Sequence[str], mode: int = 0o777) -> None:
        """Make folders, and those above them."""
        self._connection.ask("mkdirs", timeout_s=20.0, paths=list(paths), mode=mode)

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link, in the place of one that is there."""
        self._connection.ask("link", timeout_s=20.0, path=path, target=target)

    def make_scratch(self, path: str) -> str:
        """Make a folder for sockets and shared memory, which goes when the agent does; the socket at which the agent hears
        what asks for the remote shell.
        """
        header, _ = self._connection.ask("scratch", timeout_s=20.0, path=path)
        return str(header["socket"])

    def remove(self, path: str) -> None:
        """Remove a tree; what is mirrored from it is so no longer."""
        self._connection.ask("remove", timeout_s=600.0, path=path)
        if path == self._mirrored:
            self.drop_mirror()

    def drop_mirror(self) -> None:
        """Let nothing more come of the mirrored folder: the next one that is mirrored over this link is another run's."""
        self._replica, self._mirrored = None, ""

    def names_in(self, path: str) -> list[str]:
        """The names in a folder, sorted."""
        return list(self._connection.ask("list", path=path)[0]["names"])

    def exists(self, path: str) -> bool:
        return bool(self._connection.ask("exists", path=path)[0]["ok"])

    def sees(self, path: str, token: str) -> bool:
        """True if there is a file at `path` on the node that says `token`."""
        return bool(self._connection.ask("sees", path=path, token=token)[0]["ok"])

    def inode(self, path: str) -> int:
        """Return the number of a file or folder there, the same on all machines that mount its file system; 0 for none."""
        return int(self._connection.ask("inode", path=path)[0]["found"])

    def have(self, path: str) -> dict[str, list[int]]:
        """What is below a folder there: name -> stamp (`paceline.remote.replica.changes`); {} where there is none."""
        found: dict[str, list[int]] = self._connection.ask("have", timeout_s=120.0, path=path)[0]["found"]
        return found

    def census(self, path: str) -> tuple[int, int]:
        """(number of files and links, bytes in them) below a folder; (-1, -1) where there is none."""
        count, size = self._connection.ask("census", timeout_s=120.0, path=path)[0]["found"]
        return count, size

    def disk(self, path: str) -> tuple[int, int, int]:
        """The disk of a folder there: bytes that can still be written, bytes in all, number of the file system."""
        free, total, number = self._connection.ask("disk", timeout_s=5.0, path=path)[0]["found"]
        return free, total, number

    def load(self, gpus: Sequence[str], workers: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """How busy the node is (`paceline.observe.node.load`), since it was asked last. gpus: the devices that count; none for
        all. workers: as `LoadMeter.look` is given.
        """
        asked = None if workers is None else dict(workers)
        found: dict[str, Any] = self._connection.ask("load", timeout_s=2.0, gpus=list(gpus), workers=asked)[0]["found"]
        return found

    def oom_kills(self) -> int:
        """The number of processes that the node's kernel has killed for memory so far, as far as can be seen."""
        return int(self._connection.ask("oom_kills", timeout_s=3.0)[0]["found"])

    def free_ports(self, count: int) -> list[int]:
        """Free ports there: no process listens on them now."""
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
    ) -> None:
        """Have what the run writes on the node here as well, from now on.

        replica: shared by links to one folder. rank, group: of the node, and of those that see one folder. takes_files:
        checkpoints and outputs too. log_limit: bytes that the node keeps of each worker's log; 0 for no limit. have: name ->
        stamp of what is not to be sent; default: what is here.
        """
        # The links to one folder share a replica, so each says with its files who has sent them.
        self._rank, self._group, self._mirrored = rank, group, remote_run_dir
        is_first = self._replica is None
        self._replica = self._replica or replica or Replica(folder.path)
        if have is None:
            have = self._replica.have() if is_first else {}
        self._connection.ask(
            "mirror",
            timeout_s=60.0,
            path=remote_run_dir,
            attempt=attempt,
            have=dict(have),
            takes_files=takes_files,
            log_limit=log_limit,
        )

    def flush(self, *, is_last: bool = False) -> None:
        """Wait until all that the run has written on the node is here, checkpoints and outputs too.

        is_last: the run has ended there. What its script has left in the working directory comes too.

        Raises:
            OSError: some of it could not be written here.
        """
        # In order: the answer must not overtake the files that were sent before it, which may still wait to be written here.
        pending = self._connection.requests.new(in_order=True)
        self._trouble.clear()
        self._connection.out.put({"op": "flush", "id": pending.number, "last": is_last})
        self._connection.wait_for(pending, "flush", None)
        self._raise_trouble()

    def _file(self, header: dict[str, Any], data: bytes) -> None:
        if self._replica is None:
            return
        try:
            self._replica.apply(header, data, rank=self._rank, group=self._group)
            # Of a file in pieces only the last one says that all of it is here.
            if header["how"] != "part" or header.get("end"):
                self._trouble.pop(header["file"], None)
        except (OSError, ValueError) as error:
            # No room, say. The node sends it again, later and later; what is still missing at the end `flush` tells.
            self._trouble[str(header.get("file"))] = error
            self._connection.out.put({"op": "again", "file": header.get("file")})

    def _raise_trouble(self) -> None:
        if not self._trouble:
            return
        shown, error = some(sorted(self._trouble), 3), next(iter(self._trouble.values()))
        raise OSError(getattr(error, "errno", None) or errno.EINVAL, getattr(error, "strerror", str(error)), shown)


def entries(source: Path, skip: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Frames of everything below `source` that `skip` does not name: folders before what is in them.

    What vanishes meanwhile is left out; what shrinks comes as far as it goes.
    """
    yield _about(".", "dir", os.stat(source)), b""
    yield from _below(str(source), "", skip)


def entries_of(files: Mapping[str, Path]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Frames of a tree of these files, by their names in it: read-only, and what a link leads to in the link's place.

    Raises:
        OSError: one can't be read. A tree of which something is missing would pass for whole.
    """
    yield {"name": ".", "kind": "dir", "mode": 0o755, "mtime": 0}, b""
    made = set()
    for name, path in sorted(files.items()):
        # `parents` begins with the innermost folder, and the node makes them from the outside in.
        for folder in reversed(Path(name).parents):
            if str(folder) != "." and folder not in made:
                made.add(folder)
                yield {"name": str(folder), "kind": "dir", "mode": 0o755, "mtime": 0}, b""
        for header, data in _file(os.path.realpath(path), name):
            # Runs share such a tree, so nobody may write to it; all that is kept of the modes is whether a file can be
            # executed.
            mode = 0o555 if header.get("mode", 0) & 0o100 else 0o444
            yield header | ({"mode": mode} if "mode" in header else {}), data


def _below(folder: str, name: str, skip: Callable[[str], bool]) -> Iterator[tuple[dict[str, Any], bytes]]:
    with os.scandir(folder) as found:
        # Listed whole and closed before going down: a deep tree would hold a descriptor for each level otherwise.
        inside = sorted(found, key=lambda entry: entry.name)
    for entry in inside:
        mine = os.path.join(name, entry.name)
        if skip(mine):
            continue
        try:
            # Asked first, for is_dir and is_file follow links: a link to a folder would be sent as a folder.
            if entry.is_symlink():
                yield {"name": mine, "kind": "link", "target": os.readlink(entry.path)}, b""
            elif entry.is_dir():
                yield _about(mine, "dir", entry.stat()), b""
                yield from _below(entry.path, mine, skip)
            elif entry.is_file():
                yield from _file(entry.path, mine)
        except FileNotFoundError:
            # It went while the tree was read, such as a temporary file of a script that runs.
            continue


def _file(path: str, name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    with open(path, "rb", buffering=0) as file:
        about = _about(name, "file", os.fstat(file.fileno()))
        # One piece is read ahead, so that the last one can say that it is; an empty file is one empty piece.
        data = file.read(CHUNK_BYTES) or b""
        is_first = True
        while True:
            after = file.read(CHUNK_BYTES) if len(data) == CHUNK_BYTES else b""
            head = about if is_first else {"name": name, "kind": "more"}
            yield {**head, "end": not after}, data
            if not after:
                return
            data, is_first = after, False


def _about(name: str, kind: str, found: os.stat_result) -> dict[str, Any]:
    return {"name": name, "kind": kind, "mode": stat.S_IMODE(found.st_mode), "mtime": found.st_mtime_ns}
