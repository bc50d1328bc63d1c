"""Differences between the sources of two runs: their snapshots, compared file by file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Larger files are reported as different, without a diff.
_LARGEST_TEXT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A file that differs between two runs.

    Attributes:
        status: "added", "removed" or "changed".
        text: Lines of a unified diff with header; empty for binary files and those over 1 MiB.
        plus: Number of added lines.
        minus: Number of removed lines.
    """

    name: str
    status: str
    text: tuple[str, ...] = ()

    @property
    def plus(self) -> int:
        return sum(line.startswith("+") for line in self.text[2:])

    @property
    def minus(self) -> int:
        return sum(line.startswith("-") for line in self.text[2:])


def file_changes(a: Path, b: Path) -> Iterator[FileChange]:
    """Yield each file that differs between the folders `a` and `b`, by name, following links."""
    mine, theirs = _files(a), _files(b)
    for name in sorted(mine | theirs):
        status = "added" if name not in mine else "removed" if name not in theirs else "changed"
        if status == "changed" and _is_same(a / name, b / name):
            continue
        before, after = (_text(top / name) if name in there else "" for top, there in ((a, mine), (b, theirs)))
        text: tuple[str, ...] = ()
        if before is not None and after is not None:
            names = (f"a/{name}" if name in mine else "/dev/null", f"b/{name}" if name in theirs else "/dev/null")
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="")
            text = tuple(lines)
        yield FileChange(name=name, status=status, text=text)


def _files(top: Path) -> set[str]:
    found = set[str]()
    for folder, folders, names in os.walk(top):
        # os.walk lists a link to a folder among the folders; here it is one name.
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found |= {os.path.relpath(os.path.join(folder, name), top) for name in (*names, *links)}
    return found


def _is_same(a: Path, b: Path) -> bool:
    if a.is_symlink() or b.is_symlink():
        return a.is_symlink() and b.is_symlink() and os.readlink(a) == os.readlink(b)
    # Equal files of snapshots are hard links, which need no reading.
    if os.path.samefile(a, b):
        return True
    return a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()


def _text(path: Path) -> str | None:
    """Return the file as text, or None if it is binary."""
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.stat().st_size > _LARGEST_TEXT:
        return None
    data = path.read_bytes()
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
