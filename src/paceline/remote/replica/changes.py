"""What is new below a run's folder since the other side was last told, as frames (`paceline.remote.wire`) about one name each.

    how    "grow"    bytes at the offset `at` of a file that is only added to, whose inode is `ino`. `cut`: what the other side
                     has of it is void, for this file is another ("new"), or has become shorter ("shrunk")
           "append"  likewise, of a file to which the other side adds lines of its own: to be added at the end
           "part"    a piece, at `at`, of a file that goes whole: all of one try have one `key`. The last has `end` and `mode`,
                     and gives the file its name; `drop` takes the pieces back
           "link"    with `target`; "dir"
           "gone"    the user has removed it
           "left"    it is left out, and `why`: a link that leads out of the run, a pipe (`paceline.system.links`)

`stamp` is what the file was like when it was read: [size, time of change in ns, inode]. Of a growing file, the first is how
much of it has been sent. A file that grew goes on from there; one that was cut, or replaced, goes again from its beginning. (One
that was cut in place and has grown beyond its old size between two looks passes for grown; no program of Paceline's does that.)

    small    logs, metrics, reports, notes: whenever somebody looks
    large    the user's files: once they rest, or when nothing changes any more
    record   run.json is read before all else and sent after it: whoever sees a run's end has everything that came before it

Login hosts run this text with their own Python, 3.6 or later: standard library alone, and annotations in quotes.
"""

import itertools
import json
import os
import stat
import time
from typing import Any, Container, Dict, Iterator, List, Sequence, Tuple  # noqa: UP035

if "entries" not in globals():  # there the texts of these modules stand above this one
    from paceline.remote.wire import CHUNK_BYTES
    from paceline.system.links import Entry, entries, open_below, target_in

Stamp = List[int]  # noqa: UP006
Frame = Tuple[Dict[str, Any], bytes]  # noqa: UP006

#: Folders whose files go as soon as they change, and those of the user's files, of any size. What is in neither, nor among
#: the names below, is of one machine alone: the lock, the target's settings, secrets. `work` comes at the end, when nothing is
#: in it but what the script has left.
SMALL = ("attempts", "metrics", "prepared", "logs")
LARGE, WORK = ("artifacts", "checkpoints", "outputs", "uploads"), "work"
RECORD, NOTES, DRIVER_LOG = "run.json", "notes.jsonl", "logs/driver.log"
FILES = ("data.json", "environment.json", "events.jsonl", "left_out.jsonl", NOTES)
#: Where nodes write and their supervisor does not see it, of the latter these alone; and links of this name it makes itself.
NODE_FILES, LIVE_LOGS = ("environment.json", NOTES), "logs/rank_"
#: Ends of small files that are only added to.
GROWING = (".log", ".jsonl", ".txt")
#: What a command beside a worker says: for whoever runs it alone.
COMMANDS = "exec_"
#: How long one of the user's files must have been left alone.
QUIET_S = 2.0
#: After so many names without news a pass over the user's files lets its caller see to other things.
_PAUSE = 500


class Changes:
    """What is new below `top`.

    known: name -> stamp of what the other side has; brought up to date with each frame. Where only its copy was looked at, the
    inode is 0: the copy is taken for one of what is here now. shared: files to which both sides add.
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
        """Take what these files hold now for known on the other side."""
        for name in names:
            self.known[name] = stamp_of(os.path.join(self.top, name)) or [0, 0, 0]

    def small(self, names: "Iterator[str]") -> "Iterator[Frame]":
        """What is new in these files, as it is."""
        for name in names:
            path = os.path.join(self.top, name)
            stamp = stamp_of(path)
            if stamp is None:
                continue  # gone meanwhile
            if os.path.islink(path):
                target = os.readlink(path)
                if not self._is_known(name, stamp) and target_in(name, target) is not None:
                    yield from self.whole(Entry(name, "link", target=target))
            elif name.endswith(GROWING) and os.path.isfile(path):
                size, _, inode = self.known.get(name, (0, 0, -1))
                if size != stamp[0] or inode not in (0, stamp[2]):
                    yield from self._growth(name)
            elif not self._is_known(name, stamp) and (os.path.isfile(path) or os.path.isdir(path)):
                yield from self.whole(Entry(name, "dir" if os.path.isdir(path) else "file", real=name), as_it_is=True)

    def large(self, final: bool = False, folders: "Sequence[str]" = LARGE) -> "Iterator[Frame | None]":
        """What is new among the user's files, each once it rests, and what is gone of them; None for a pause in between.

        final: nothing changes any more. Then all of them at once, and what is left out, by name.
        """
        present: set[str] = set()
        for folder in folders:
            for entry in entries(self.top, folder):
                if len(present) % _PAUSE == _PAUSE - 1:
                    yield None
                if entry.kind == "left":
                    # Until the end it may be on its way: a link to what is still to be written.
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

    def record(self, ends: "Container[str]") -> "tuple[dict[str, Any], bytes, bool]":
        """The run's record as a frame's header and bytes, and whether its status is one of these `ends`.

        It is the caller who sends it, after all that was new when it was read, and notes that in `known`.

        Raises:
            OSError: it can't be read.
        """
        with open(os.path.join(self.top, RECORD), "rb") as file:
            data, found = file.read(), os.fstat(file.fileno())
        header = {"file": RECORD, "how": "part", "key": next(self._keys), "at": 0, "end": True, "mode": 0o644}
        return dict(header, stamp=_stamp(found)), data, json.loads(data.decode()).get("status") in ends

    def whole(self, entry: "Entry", as_it_is: bool = False) -> "Iterator[Frame]":
        """A file, link or folder. What has changed while it was read is taken back, unless `as_it_is`."""
        name = entry.name
        if entry.kind != "file":
            stamp = stamp_of(os.path.join(self.top, entry.real or name)) or [0, 0, 0]
            self.known[name] = stamp
            extra = {"target": entry.target} if entry.kind == "link" else {}
            yield dict({"file": name, "how": entry.kind, "stamp": stamp}, **extra), b""
            return
        header: dict[str, Any] = {"file": name, "how": "part", "key": next(self._keys)}
        at = 0
        try:
            # By a way without links: what was a file when it was found must not lead elsewhere now.
            with open(open_below(self.top, entry.real), "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                header["stamp"] = _stamp(before)
                data = os.pread(file.fileno(), min(CHUNK_BYTES, before.st_size), 0)
                # A file that shrinks meanwhile ends where it ends now.
                while data and at + len(data) < before.st_size:
                    yield dict(header, at=at), data
                    at += len(data)
                    data = os.pread(file.fileno(), min(CHUNK_BYTES, before.st_size - at), at)
                after = os.fstat(file.fileno())
        except OSError as error:
            if at:
                yield dict(header, drop=True), b""
            if as_it_is and os.path.lexists(os.path.join(self.top, name)):
                self.known[name] = stamp_of(os.path.join(self.top, name)) or [0, 0, 0]  # told once
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
        header: dict[str, Any] = {"file": name, "how": "append" if name in self._shared else "grow"}
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
                    # Noted first: who takes this frame may not come back for the next one.
                    self.known[name] = [at + len(data), 0, found.st_ino]
                    yield dict(header, at=at, ino=found.st_ino, cut=cut), data
                    at, cut = next_data(file.fileno(), at + len(data), found.st_size), ""
                    self.known[name] = [at, 0, found.st_ino]
        except OSError:
            return  # gone, or not to be read: others of the run's files still are

    def _is_known(self, name: str, stamp: Stamp) -> bool:
        known = self.known.get(name)
        return known is not None and known[:2] == stamp[:2] and known[2] in (0, stamp[2])

    def _rests(self, name: str, stamp: Stamp) -> bool:
        """Whether a file is as it was some seconds ago. By this machine's clock: a file's own times may be another's."""
        last, since = self._resting.get(name, (None, 0.0))
        if last != stamp:
            since = time.monotonic()
            self._resting[name] = (stamp, since)
        return time.monotonic() - since >= QUIET_S

    def _gone(self, present: "set[str]", folders: "Sequence[str]") -> "Iterator[Frame]":
        """Old checkpoints are removed by the script that wrote the new ones; then the other side need not keep them either."""
        if not os.path.isdir(os.path.join(self.top, "checkpoints")):
            return  # the folder itself goes: that is the end of the run, not the script's doing
        looked_at = [folder for folder in folders if folder in LARGE]
        for name in sorted(self.known, reverse=True):  # what is in a folder before the folder
            if name.split("/", 1)[0] in looked_at and name not in present:
                yield {"file": name, "how": "gone", "stamp": self.known.pop(name)}, b""


def small_names(
    top: str, folders: "Sequence[str]" = SMALL, files: "Sequence[str]" = FILES, hidden: "Sequence[str]" = (COMMANDS,)
) -> "Iterator[str]":
    """Names of the small files below these folders, of the folders in them, and of those that lie beside them. In order: what
    is left out of a log is told (`gap_0.json`) before the log itself is sent (`rank_0.log`).

    hidden: beginnings of names that are left out, as are hidden ones and `.held`, which only holds disk space.
    """
    for folder in folders:
        for directory, below, inside in os.walk(os.path.join(top, folder)):
            below.sort()
            for one in below + sorted(inside):
                if not one.startswith((".", *hidden)) and not one.endswith(".held"):
                    yield os.path.relpath(os.path.join(directory, one), top)
    yield from files


def stamp_of(path: str) -> "Stamp | None":
    """[size, time of change in ns, inode], by which it is known whether a file has changed; None where there is none."""
    try:
        return _stamp(os.lstat(path))
    except OSError:
        return None


def next_data(fd: int, offset: int, size: int) -> int:
    """Where from `offset` on the next byte is that is in no hole of this file (`paceline.system.gaps`); `size` where none is."""
    try:
        return min(os.lseek(fd, offset, os.SEEK_DATA), size)
    except OSError as error:
        return size if error.errno == 6 else offset  # ENXIO; a file system that knows no holes has data everywhere
    except AttributeError:
        return offset


def _stamp(found: os.stat_result) -> Stamp:
    # A folder is as it is: what changes in it has names of its own.
    return [0, 0, 0] if stat.S_ISDIR(found.st_mode) else [found.st_size, found.st_mtime_ns, found.st_ino]
