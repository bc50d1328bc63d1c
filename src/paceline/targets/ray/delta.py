"""A run's folder that changes, as parts that follow each other: what one machine records, another replays.

A store takes whole objects only, so a log that grows is not stored again and again, but by what has come to it. A part is
a sequence of pieces, each a JSON header of 4-byte big-endian length and then its bytes:

    {"path": "logs/driver.log", "at": 512, "bytes": 64}                          a file that only grows
    {"path": "outputs/model.pt", "of": 3, "at": 0, "bytes": 99, "last": true, "mode": 420, "mtime_ns": ...}   a whole file,
                                                                                 or one of the pieces of its 3rd version
    {"path": "notes.jsonl", "append": true, "bytes": 40}                         lines that are written on both sides
    {"path": "logs/rank_0.log", "link": "../attempts/1/rank_0.log"}
    {"path": "outputs/empty", "folder": true}
    {"path": "checkpoints/1.pt", "gone": true}
    {"end": true}                                                                nothing follows any more

The record comes last in a part: whoever sees a run's end sees all that came before it. Links among the user's files are
resolved where they are recorded (`system.links`); what is left out of them the record says. Whoever can write to the store
can write parts: no name and no link of theirs leads out of the folder, or to what is of one machine alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.runs import states
from paceline.system.files import read_json
from paceline.system.links import entries, open_below, target_in

_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 4 << 20
#: Of one machine alone, or sent by other means.
_OWN = frozenset(
    {
        "lock",
        "ballast",
        "snapshot",
        "closing",
        "gone",
        "engine.json",
        "target.json",
        "cancel.json",
        "home.json",
        "secrets.json",
        "exec",
        "exec_key",
    }
)
_RECORD, _NOTES = "run.json", "notes.jsonl"
_GROWING = (".log", ".jsonl", ".txt")
#: Folders of the user's files, of any size: each is sent once it has not changed for a while.
_LARGE = frozenset({"checkpoints", "outputs", "artifacts", "uploads", "work"})
_SETTLED_S = 2.0


@dataclass
class _Known:
    """How far a file has been recorded. size: of a growing file, the bytes so far."""

    size: int = 0
    mtime_ns: int = -1
    inode: int = 0
    link: str | None = None


class DeltaRecorder:
    """Records a run's folder `top`, part by part. part_bytes: about how large a part may grow."""

    def __init__(self, top: Path, part_bytes: int = 16 << 20) -> None:
        self._top = top
        self._part_bytes = part_bytes
        self._known: dict[str, _Known] = {}
        self._count = 0
        #: A pass over the user's files, which may take many parts; whether it was begun when nothing changed any more.
        self._pass: Iterator[bytes] | None = None
        self._pass_is_final = False

    def skip_present(self) -> None:
        """Take what is there now for known on the other side."""
        for name, path in _walk(self._top, _is_small):
            for _ in self._changes(name, path):
                pass

    def part(self, *, is_final: bool = False) -> bytes | None:
        """What has changed since the last part, or a piece of it; None where nothing has.

        is_final: nothing changes any more. Then None comes once all has been recorded, the run's end last of all.
        """
        pieces: list[bytes] = []
        for name, path in _walk(self._top, _is_small):
            if name != _RECORD:
                pieces += self._changes(name, path)
        all_large = self._take_large(pieces, is_final)
        record = self._top / _RECORD
        if (all_large and is_final) or not _is_terminal(record):
            pieces += self._changes(_RECORD, record)
        return b"".join(pieces) or None

    def _take_large(self, pieces: list[bytes], is_final: bool) -> bool:
        """Go on with the pass over the user's files until the part is large enough; whether a final pass is through."""
        size = sum(map(len, pieces))
        while True:
            if self._pass is None:
                self._pass, self._pass_is_final = self._large(is_final), is_final
            for piece in self._pass:
                pieces.append(piece)
                size += len(piece)
                if size >= self._part_bytes:
                    return False
            self._pass = None
            if not is_final or self._pass_is_final:
                return True

    def _large(self, is_final: bool) -> Iterator[bytes]:
        seen = set()
        for folder in sorted(_LARGE if is_final else _LARGE - {"work"}):
            for entry in entries(os.fspath(self._top), folder):
                if entry.kind == "left":
                    continue
                seen.add(entry.name)
                if entry.kind == "link":
                    yield from self._linked(entry.name, entry.target)
                else:
                    yield from self._changes(entry.name, self._top / entry.real, settled=is_final)
        for name in [name for name in self._known if _top_of(name) in _LARGE and name not in seen]:
            del self._known[name]
            yield _piece({"path": name, "gone": True})

    def _linked(self, name: str, target: str) -> Iterator[bytes]:
        known = self._known.setdefault(name, _Known())
        if known.link != target:
            self._known[name] = _Known(link=target)
            yield _piece({"path": name, "link": target})

    def _changes(self, name: str, path: Path, *, settled: bool = False) -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                if _is_small(_top_of(name)) and target_in(name, target := os.readlink(path)) is not None:
                    yield from self._linked(name, target)
                return
            known = self._known.setdefault(name, _Known())
            if stat.S_ISDIR(status.st_mode):
                if known.inode == 0:
                    known.inode = 1
                    yield _piece({"path": name, "folder": True})
            elif not stat.S_ISREG(status.st_mode):
                return
            elif name.endswith(_GROWING) and _is_small(_top_of(name)):
                yield from self._growth(name, path, known, status)
            elif (known.size, known.mtime_ns, known.inode) != (status.st_size, status.st_mtime_ns, status.st_ino) and (
                settled or _is_small(_top_of(name)) or time.time() - status.st_mtime > _SETTLED_S
            ):
                known.size, known.mtime_ns, known.inode = status.st_size, status.st_mtime_ns, status.st_ino
                known.link = None
                yield from self._whole(name, path, status)

    def _opened(self, path: Path) -> IO[bytes]:
        """A file that was found a moment ago, by a way without links.

        Raises:
            FileNotFoundError: it has gone, or one has come in its way.
        """
        try:
            return open(open_below(os.fspath(self._top), path.relative_to(self._top).as_posix()), "rb")
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EINVAL):
                raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
            raise

    def _growth(self, name: str, path: Path, known: _Known, status: os.stat_result) -> Iterator[bytes]:
        if status.st_ino != known.inode or status.st_size < known.size:
            known.inode, known.size = status.st_ino, 0
            if status.st_size == 0 and name != _NOTES:
                yield _piece({"path": name, "at": 0})
        with self._opened(path) as file:
            file.seek(known.size)
            while data := file.read(_CHUNK_BYTES):
                header: dict[str, Any] = {"path": name}
                header |= {"append": True} if name == _NOTES else {"at": known.size}
                known.size += len(data)
                yield _piece(header, data)

    def _whole(self, name: str, path: Path, status: os.stat_result) -> Iterator[bytes]:
        self._count += 1
        at = 0
        with self._opened(path) as file:
            while True:
                data = file.read(_CHUNK_BYTES)
                header: dict[str, Any] = {"path": name, "of": self._count, "at": at}
                at += len(data)
                if at >= status.st_size or not data:
                    header |= {"last": True, "mode": stat.S_IMODE(status.st_mode), "mtime_ns": status.st_mtime_ns}
                yield _piece(header, data)
                if "last" in header:
                    return


def end_part() -> bytes:
    """The part after which nothing follows."""
    return _piece({"end": True})


def ends(part: bytes) -> bool:
    """Whether it is a part after which nothing follows."""
    return any(header.get("end") for header, _ in _pieces(part))


def replay(part: bytes, top: Path, take_record: Callable[[bytes], None] | None = None) -> bool:
    """Do to the folder `top` what a part says; whether it was the last. Doing it twice does no harm.

    take_record: puts the run's record in its place, which is no file like others.

    Raises:
        ValueError: the part is no part, or names something outside the folder.
    """
    is_end = False
    for header, data in _pieces(part):
        if header.get("end"):
            is_end = True
            continue
        path = _inside(top, str(header["path"]))
        if header.get("gone"):
            _remove(path)
        elif header.get("folder"):
            if path.is_symlink() and _top_of(str(header["path"])) in _LARGE:
                path.unlink()  # the user's own, there in a folder's place before
            path.mkdir(parents=True, exist_ok=True)
        elif "link" in header:
            _link(str(header["path"]), path, str(header["link"]))
        elif "of" in header:
            beside = _replay_whole(path, header, data)
            if header.get("last") and take_record is not None and header["path"] == _RECORD:
                take_record(beside.read_bytes())
                beside.unlink()
            elif header.get("last"):
                _put_in_place(beside, path, header)
        else:
            _replay_growth(path, header, data)
    return is_end


def _replay_growth(path: Path, header: Mapping[str, Any], data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_append = bool(header.get("append"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if is_append else 0)
    fd = os.open(path, flags, 0o666)
    try:
        if not is_append:
            at = int(header["at"])
            if at == 0:
                os.ftruncate(fd, 0)
            os.lseek(fd, at, os.SEEK_SET)
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)


def _replay_whole(path: Path, header: Mapping[str, Any], data: bytes) -> Path:
    """Write a piece of a file; where, until it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name[:200]}.{int(header['of'])}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if header["at"] else os.O_TRUNC)
    with open(os.open(beside, flags, 0o666), "r+b", buffering=0) as file:
        file.seek(int(header["at"]))
        file.write(data)
    return beside


def _put_in_place(beside: Path, path: Path, header: Mapping[str, Any]) -> None:
    os.chmod(beside, int(header["mode"]) & 0o777)
    os.utime(beside, ns=(int(header["mtime_ns"]),) * 2)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    os.replace(beside, path)


def _link(name: str, path: Path, target: str) -> None:
    meant = target_in(name, target)
    if meant is None:
        raise ValueError(f"the link {name!r} to {target!r} leads out of the run's folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name[:200]}.link")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    beside.symlink_to(meant)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    os.replace(beside, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _inside(top: Path, name: str) -> Path:
    """The path of this name below `top`, none of whose folders is a link.

    Raises:
        ValueError: it leads outside, or is that of what is of one machine alone.
    """
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"the name {name!r} is none of a file below a folder")
    if parts[0] in _OWN or parts[0].startswith("."):
        raise ValueError(f"the name {name!r} is none that comes from the other side")
    path = top
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{name!r} lies behind a link")
    return path / parts[-1]


def _walk(top: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file, link and folder below `top`; `is_wanted` says of which entries of the top itself."""
    todo = [""]
    while todo:
        inside = todo.pop()
        try:
            entries = sorted(os.scandir(top / inside), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            if not is_wanted(_top_of(name)) or (entry.name.startswith(".") and _is_small(_top_of(name))):
                continue
            if name.startswith("attempts/") and (entry.name.endswith(".held") or entry.name.startswith("exec_")):
                continue
            yield name, top / name
            if entry.is_dir(follow_symlinks=False):
                todo.append(name)


def _top_of(name: str) -> str:
    return name.split("/", 1)[0]


def _is_small(top: str) -> bool:
    return top not in _LARGE and top not in _OWN


def _is_terminal(record: Path) -> bool:
    return (read_json(record) or {}).get("status") in states.TERMINAL


def _piece(header: Mapping[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps({**header, "bytes": len(data)}, ensure_ascii=True).encode()
    return _LENGTH.pack(len(text)) + text + data


def _pieces(part: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    at = 0
    while at < len(part):
        if at + 4 > len(part):
            raise ValueError("the part is cut short")
        (length,) = _LENGTH.unpack_from(part, at)
        header = json.loads(part[at + 4 : at + 4 + length])
        at += 4 + length
        size = int(header.get("bytes", 0))
        if at + size > len(part):
            raise ValueError("the part is cut short")
        yield header, part[at : at + size]
        at += size
