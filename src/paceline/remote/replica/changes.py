"""List changes of a run's folder since the last listing, as frames (`paceline.remote.wire`) about one file each.

A frame's header has `how`, which is one of:

    "grow"    bytes at the offset `at` of an append-only file with inode `ino`. `cut` says that the copy must be
              emptied first, since the file was replaced ("new") or truncated ("shrunk")
    "append"  bytes of a file to which both machines append: append them
    "part"    a piece, at the offset `at`, of another file. Pieces that are sent together have one `key`. The
              last has `end` and `mode`, and completes the file; `drop` discards the pieces
    "link"    a symbolic link to `target`
    "dir"     a folder
    "gone"    the user's script has removed the file
    "left"    the file is not sent, for the reason `why`, such as a pipe or a link out of the run

`stamp` describes a file when it was read: [size, mtime in ns, inode]. For a growing file, size is the amount sent. If a
file grew, only the new bytes are sent. A file that was truncated or replaced is sent from its start.

    small    logs, metrics, reports and notes, which are sent at each call
    large    the user's files, which are sent once they are unchanged for a while, or at the end
    record   state.json, which is read first and sent last, so that readers of a final state have all earlier changes

Login hosts run this module with their own Python, 3.6 or later, so it needs only the standard library.
"""

import itertools
import json
import os
import stat
import time
from typing import Container, Iterator, List, Sequence  # noqa: UP035

if "entries" not in globals():  # a login host gets all modules joined into one text, without these imports
    from paceline.remote.wire import CHUNK_BYTES, Frame, Header
    from paceline.system.links import Entry, entries, open_below, target_in

Stamp = List[int]  # noqa: UP006

#: SMALL: folders whose files are sent at once. LARGE: folders of the user's files. WORK, the working directory, is sent at the
#: end. Other files (the lock, secrets, the target's settings, the job) are never sent, except those named below.
SMALL = ("attempts", "metrics", "prepared", "logs")
LARGE, WORK = ("artifacts", "checkpoints", "outputs", "uploads"), "work"
RECORD, NOTES, DRIVER_LOG = "state.json", "notes.jsonl", "logs/driver.log"
FILES = ("data.json", "environment.json", "events.jsonl", "left_out.jsonl", NOTES)
#: NODE_FILES: top-level files that nodes send. LIVE_LOGS: prefix of the links to live logs, which the supervisor makes itself.
NODE_FILES, LIVE_LOGS = ("environment.json", NOTES), "logs/rank_"
#: Suffixes of small files that only grow, because processes only append to them.
GROWING = (".log", ".jsonl", ".txt")
#: Prefix of the files with the output of `paceline exec`. Only the client that ran `paceline exec` reads these files.
COMMANDS = "exec_"
#: Seconds that a user's file must be unchanged before it is sent.
QUIET_S = 2.0
#: After this many names, a pass over the user's files yields None, so that its caller can do other work.
_PAUSE = 500


class Changes:
    """A detector of changes in the folder `top`, which another machine mirrors.

    known: Name -> [size, mtime in ns, inode] of the version in the copy, updated with each yielded frame. Inode 0 matches any.
    shared: Names of files to which both machines append lines.
    """

    def __init__(self, top: str, known: "dict[str, Stamp]", shared: "Sequence[str]" = (NOTES,)) -> None:
        self.top, self.known = top, known
        self._shared = shared
        for name, stamp in known.items():
            if stamp[2] == 0 and name.endswith(GROWING):
                stamp[2] = (stamp_of(os.path.join(top, name)) or [0, 0, -1])[2]
        self._keys = itertools.count(1)
        self._resting: dict[str, tuple[Stamp, float]] = {}
        self._left: set[tuple[str, str]] = set()

    def skip(self, names: "Sequence[str]") -> None:
        """Assume that the other machine has these files with their present content."""
        for name in names:
            self.known[name] = stamp_of(os.path.join(self.top, name)) or [0, 0, 0]

    def small(self, names: "Iterator[str]", skip_empty: bool = False) -> "Iterator[Frame]":
        """Yield frames of changed logs, metrics and reports, even if they still change.

        skip_empty: Leave out new logs without a byte, such as those of workers that are starting.
        """
        for name in names:
            path = os.path.join(self.top, name)
            stamp = stamp_of(path)
            if stamp is None:
                continue  # the file was removed meanwhile
            if os.path.islink(path):
                target = os.readlink(path)
                if not self._is_known(name, stamp) and target_in(name, target) is not None:
                    yield from self.whole(Entry(name, "link", target=target))
            elif name.endswith(GROWING) and os.path.isfile(path):
                size, _, inode = self.known.get(name, (0, 0, -1))
                is_skipped = skip_empty and not stamp[0] and name not in self.known
                if not is_skipped and (size != stamp[0] or inode not in (0, stamp[2])):
                    yield from self._growth(name)
            elif not self._is_known(name, stamp) and (os.path.isfile(path) or os.path.isdir(path)):
                yield from self.whole(Entry(name, "dir" if os.path.isdir(path) else "file", real=name), as_it_is=True)

    def large(self, final: bool = False, folders: "Sequence[str]" = LARGE) -> "Iterator[Frame | None]":
        """Yield frames of changed user files, once unchanged for two seconds.

        The function sometimes yields None, where the caller may pause. final: Yield also files that changed just now,
        and the names of files that are not sent.
        """
        present: set[str] = set()
        for folder in folders:
            for entry in entries(self.top, folder):
                if len(present) % _PAUSE == _PAUSE - 1:
                    yield None
                if entry.kind == "left":
                    # Report unsent entries only at the end: before, a link may lead to a file that does not exist yet.
                    if final and (entry.name, entry.why) not in self._left:
                        self._left.add((entry.name, entry.why))
                        yield {"file": entry.name, "how": "left", "why": entry.why}, b""
                    continue
                if entry.name == folder:
                    continue
                present.add(entry.name)
                stamp = stamp_of(os.path.join(self.top, entry.real or entry.name))
                if stamp is None or self._is_known(entry.name, stamp):
                    continue
                if final or self._rests(entry.name, stamp):
                    yield from self.whole(entry, as_it_is=final)
        yield from self._gone(present, folders)

    def record(self, ends: "Container[str]") -> "tuple[Header, bytes, bool]":
        """Return the frame of state.json (header, bytes), and whether the run has ended.

        ends: The final states. First send all changes made before this call, then this frame. Then update `known`.
        """
        with open(os.path.join(self.top, RECORD), "rb") as file:
            data, found = file.read(), os.fstat(file.fileno())
        header = {"file": RECORD, "how": "part", "key": next(self._keys), "at": 0, "end": True, "mode": 0o644}
        return dict(header, stamp=_stamp(found)), data, json.loads(data.decode()).get("status") in ends

    def whole(self, entry: "Entry", as_it_is: bool = False) -> "Iterator[Frame]":
        """Yield the frames that send a whole file, link or folder.

        If a file changes while its frames are sent, a last frame cancels them, unless `as_it_is`.
        """
        name = entry.name
        if entry.kind != "file":
            stamp = stamp_of(os.path.join(self.top, entry.real or name)) or [0, 0, 0]
            self.known[name] = stamp
            extra = {"target": entry.target} if entry.kind == "link" else {}
            yield dict({"file": name, "how": entry.kind, "stamp": stamp}, **extra), b""
            return
        header: Header = {"file": name, "how": "part", "key": next(self._keys)}
        at = 0
        try:
            # Don't follow links: a folder of the path may have been replaced by a link meanwhile.
            with open(open_below(self.top, entry.real), "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                header["stamp"] = _stamp(before)
                data = os.pread(file.fileno(), min(CHUNK_BYTES, before.st_size), 0)
                # Stop early if the file was truncated meanwhile.
                while data and at + len(data) < before.st_size:
                    yield dict(header, at=at), data
                    at += len(data)
                    data = os.pread(file.fileno(), min(CHUNK_BYTES, before.st_size - at), at)
                after = os.fstat(file.fileno())
        except OSError as error:
            if at:
                yield dict(header, drop=True), b""
            if as_it_is and os.path.lexists(os.path.join(self.top, name)):
                self.known[name] = stamp_of(os.path.join(self.top, name)) or [0, 0, 0]  # report the file only once
                why = "a file that can't be read: " + str(error.strerror or error)
                yield {"file": name, "how": "left", "why": why}, b""
            return
        if not as_it_is and _stamp(after) != _stamp(before):
            if at:
                yield dict(header, drop=True), b""
            return
        self.known[name] = _stamp(before)
        self._resting.pop(name, None)
        yield dict(header, at=at, end=True, mode=stat.S_IMODE(before.st_mode)), data

    def _growth(self, name: str) -> "Iterator[Frame]":
        header: Header = {"file": name, "how": "append" if name in self._shared else "grow"}
        try:
            with open(open_below(self.top, name), "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                size, _, inode = self.known.get(name, (0, 0, -1))
                cut = "new" if inode not in (0, found.st_ino) else "shrunk" if found.st_size < size else ""
                at = next_data(file.fileno(), 0 if cut else size, found.st_size)
                while True:
                    data = os.pread(file.fileno(), min(CHUNK_BYTES, found.st_size - at), at)
                    if not (data or cut):
                        return
                    # Update `known` before the yield, because the consumer may never resume this generator.
                    self.known[name] = [at + len(data), 0, found.st_ino]
                    yield dict(header, at=at, ino=found.st_ino, cut=cut), data
                    at, cut = next_data(file.fileno(), at + len(data), found.st_size), ""
                    self.known[name] = [at, 0, found.st_ino]
        except OSError:
            return  # the file was removed or is unreadable, so skip it

    def _is_known(self, name: str, stamp: Stamp) -> bool:
        known = self.known.get(name)
        return known is not None and known[:2] == stamp[:2] and known[2] in (0, stamp[2])

    def _rests(self, name: str, stamp: Stamp) -> bool:
        """Return whether a file has been unchanged for two seconds."""
        last, since = self._resting.get(name, (None, 0.0))
        if last != stamp:
            since = time.monotonic()
            self._resting[name] = (stamp, since)
        return time.monotonic() - since >= QUIET_S

    def _gone(self, present: "set[str]", folders: "Sequence[str]") -> "Iterator[Frame]":
        if not os.path.isdir(os.path.join(self.top, "checkpoints")):
            return  # the copy of an ended run was removed as a whole, so the script has removed no checkpoint
        looked_at = [folder for folder in folders if folder in LARGE]
        for name in sorted(self.known, reverse=True):  # reversed, so that files come before their folder
            if name.split("/", 1)[0] in looked_at and name not in present:
                yield {"file": name, "how": "gone", "stamp": self.known.pop(name)}, b""


def small_names(
    top: str, folders: "Sequence[str]" = SMALL, files: "Sequence[str]" = FILES, hidden: "Sequence[str]" = (COMMANDS,)
) -> "Iterator[str]":
    """Yield the names of logs, metrics and reports below `folders`, then `files`.

    The description of a log's truncation (`gap_0.json`) precedes the log (`rank_0.log`).

    hidden: Prefixes of file names to leave out, besides "." and the files `*.held`, which only reserve disk space.
    """
    for folder in folders:
        for directory, below, inside in os.walk(os.path.join(top, folder)):
            below.sort()
            for one in below + sorted(inside):
                if not one.startswith((".", *hidden)) and not one.endswith(".held"):
                    yield os.path.relpath(os.path.join(directory, one), top)
    yield from files


def stamp_of(path: str) -> "Stamp | None":
    """Return [size, mtime in ns, inode] of a file, which identifies its version, or None."""
    try:
        return _stamp(os.lstat(path))
    except OSError:
        return None


def next_data(fd: int, offset: int, size: int) -> int:
    """Return the offset of a sparse file's next data, from `offset` on."""
    try:
        return min(os.lseek(fd, offset, os.SEEK_DATA), size)
    except OSError as error:
        return size if error.errno == 6 else offset  # 6 is ENXIO: no data follows. Otherwise take all bytes as data
    except AttributeError:
        return offset


def _stamp(found: os.stat_result) -> Stamp:
    # For a folder return a constant, so that a change inside the folder does not count as a change of the folder itself.
    return [0, 0, 0] if stat.S_ISDIR(found.st_mode) else [found.st_size, found.st_mtime_ns, found.st_ino]
