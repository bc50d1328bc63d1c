"""Scan a source folder: find its files, and the files that have not changed since the last scan.

A file keeps its hash if its size, times, inode and mode equal those of the last scan. But its times must be clearly
older than that scan, because a file may change twice within a clock tick. Git uses the same rule.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import SnapshotError
from paceline.snapshot.git import tracked_files
from paceline.snapshot.ignore import ALWAYS, AT_THE_TOP, Ignore
from paceline.system.files import read_json
from paceline.system.linked import RESULTS, SECRET, VALUES, VIRTUAL_ENVIRONMENT, NotCopied, is_secret

MAX_BYTES = 300 * 1024 * 1024
MAX_FILES = 2000
_RESULTS = "results of earlier runs"
#: Size in bytes from which an untracked file counts as data.
_DATA_BYTES = 50 * 1024 * 1024
#: Names of the variables that lift `MAX_BYTES` and `MAX_FILES` if they are "off". The second is the Azure SDK's.
LIMIT_VARIABLE = "PACELINE_SNAPSHOT_LIMIT"
_AZURE_LIMIT_VARIABLE = "AML_SNAPSHOT_NO_FILE_LIMIT"

#: A time in nanoseconds that is longer than the timestamp granularity of any file system in use.
_CLOCK_TICK_NS = 50_000_000

#: Stamp of a file: size, mtime, ctime, inode, mode.
Stamp: TypeAlias = "tuple[int, int, int, int, int]"


@dataclass
class Tree:
    """The result of a scan. Paths are relative to the source, with `/`.

    Attributes:
        files: Path -> stamp of the file: its size, times, inode and mode.
        links: Path -> target of the link.
        directories: All folders, including empty ones.
        hashes: Path -> hash of a file that is unchanged since the last scan.
        not_copied: Excluded files and folders. The run's working directory has links to them, except to results of
            earlier runs.
        kept: Files and folders included despite an ignore pattern. The next scan decides again about them.
    """

    source: Path
    files: dict[str, Stamp] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    not_copied: list[NotCopied] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    ignore_key: list[list[str]] = field(default_factory=list)
    scanned_ns: int = 0
    last_id: str | None = None

    @property
    def size(self) -> int:
        return sum(stamp[0] for stamp in self.files.values())

    def to_cache(self, snapshot_id: str) -> dict[str, object]:
        """Return JSON of this scan for `cache_file`. All hashes must be known."""
        return {
            "id": snapshot_id,
            "rules": self.ignore_key,
            "kept": self.kept,
            "scanned_ns": self.scanned_ns,
            "files": {path: [*stamp, self.hashes[path]] for path, stamp in self.files.items()},
            "directories": self.directories,
        }


def stamp_of(found: os.stat_result) -> Stamp:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_mode


def scan(
    source: Path,
    cache_file: Path,
    leave_out: Path,
    files_out: Sequence[Path] = (),
    opened: frozenset[str] | None = None,
    wanted: frozenset[str] = frozenset(),
    is_whole: bool = False,
) -> Tree:
    """Return the files, links and folders below `source`.

    Args:
        source: The folder to scan.
        cache_file: The cache of the last scan.
        leave_out: The workspace folder, which is excluded if it is below `source`.
        files_out: Files and folders to exclude.
        opened: Paths, relative to `source`, that are copied even if an ignore rule excludes them: the script, its
            folder, the working directory and their parents. Other excluded files are linked from the run. None if the
            run can't have such links: then a file that can't be copied is an error.
        wanted: Folders, relative to `source`, that the run gets links to because they hold earlier runs' results.
        is_whole: Whether to include files beyond the limits, and files excluded by ignore files.

    Raises:
        SnapshotError: A file can't be read. With `opened=None`, also: the folder exceeds the limits, or has a link to a
            path outside or a special file such as a socket.
    """
    tree = _Scan(source, read_json(cache_file) or {}, leave_out, files_out, opened, wanted, is_whole).run()
    if opened is None and not is_whole:
        _check_limits(tree)
    return tree


class _TooManyFilesError(Exception):
    pass


class _Scan:
    def __init__(
        self,
        source: Path,
        cache: dict[str, Any],
        leave_out: Path,
        files_out: Sequence[Path],
        opened: frozenset[str] | None,
        wanted: frozenset[str],
        is_whole: bool,
    ) -> None:
        self._opened, self._is_whole = opened, is_whole
        self._wanted = wanted
        self._is_git = (source / ".git").exists()
        self._tracked: frozenset[str] | None = None
        #: How many more files the current folder may have before it is linked instead of copied. None if it can't be linked.
        self._left: int | None = None
        self._tree = Tree(source=source, scanned_ns=time.time_ns(), last_id=cache.get("id"))
        self._ignore = Ignore(source)
        self._known: dict[str, list[Any]] = cache.get("files", {})
        self._known_directories = set(cache.get("directories", ()))
        self._known_ignore, self._known_kept = cache.get("rules"), set(cache.get("kept", ()))
        self._trusted_ns = cache.get("scanned_ns", 0) - _CLOCK_TICK_NS
        self._leave_out = os.path.realpath(leave_out)
        self._files_out = frozenset(os.path.realpath(path) for path in files_out)
        self._root = os.path.realpath(source)

    def run(self) -> Tree:
        # The walk reads ignore files on its way. The last scan's decisions are only valid if all ignore files are unchanged.
        trust = self._known_ignore is not None
        self._walk("", trust=trust)
        self._tree.ignore_key = self._ignore.key()
        # If an ignore file has changed, scan the source again without the last scan's decisions.
        if trust and self._tree.ignore_key != self._known_ignore:
            files_out = [*map(Path, self._files_out)]
            return _Scan(
                self._tree.source, {}, Path(self._leave_out), files_out, self._opened, self._wanted, self._is_whole
            ).run()
        if self._opened is not None:
            self._link_largest()
        return self._tree

    def _walk(self, directory: str, *, trust: bool) -> None:
        tree, known, prefix = self._tree, self._known, f"{directory}/" if directory else ""
        try:
            with os.scandir(os.path.join(tree.source, directory)) as opened:
                entries = sorted(opened, key=lambda entry: entry.name)
        except FileNotFoundError:
            # A subfolder was removed after its parent was listed ("" is the top folder).
            if directory:
                tree.directories.remove(directory)
            return
        except OSError as error:
            if directory and self._opened is not None:
                tree.directories.remove(directory)
                self._leave(directory, "it can't be read", is_folder=True)
                return
            raise SnapshotError(
                f"folder {directory or '.'!r} of {str(tree.source)!r} can't be read: {error.strerror}. "
                "Change its permissions or name it in .amlignore."
            ) from error
        names = {entry.name for entry in entries}
        if self._ignore.file_name in names and not self._is_whole:
            self._ignore.enter(directory)
        for entry in entries:
            name, path = entry.name, prefix + entry.name
            if name in ALWAYS:
                continue
            is_directory = entry.is_dir(follow_symlinks=False)
            if not directory and name in AT_THE_TOP:
                self._leave(path, "the place of the run's own outputs", is_folder=os.path.isdir(entry.path))
                continue
            if self._files_out and not is_directory and os.path.realpath(entry.path) in self._files_out:
                self._leave(path, VALUES)
                continue
            # Trust the last scan for entries that it included. Test all other entries: the cache does not list excluded entries.
            is_known = path in (self._known_directories if is_directory else known)
            decided = trust and is_known and path not in self._known_kept
            why = None if decided else self._ignore.ignores(path, is_directory=is_directory)
            # Keep an entry that git tracks even if an ignore pattern matches it, because the entry belongs to the project.
            if why is not None:
                if self._opened is None or not (path in self._opened or self._has_tracked(path)):
                    # Treat a link to a folder as a file, as patterns of ignore files do.
                    self._leave(path, why, is_folder=os.path.isdir(entry.path))
                    continue
                tree.kept.append(path)
            # Look for secrets even if the last scan included the entry, because git may no longer track it.
            is_open = self._opened is None or path in self._opened
            if not is_open and is_secret(name, is_folder=is_directory) and not self._is_tracked(path):
                self._leave(path, SECRET, is_folder=is_directory)
                continue
            with contextlib.suppress(FileNotFoundError):  # removed after the listing, such as an editor's swap file
                if is_directory:
                    self._directory(path, trust=trust)
                elif entry.is_symlink():
                    target = self._link_target(path)
                    if target is not None:
                        tree.links[path] = target
                else:
                    self._file(path, entry)

    def _leave(self, path: str, why: str, *, is_folder: bool = False) -> None:
        if self._opened is None:
            return
        # Never link a folder of results, because the run would write its own outputs into this folder.
        is_result = path in AT_THE_TOP or (is_folder and self._holds_results(path) and path not in self._wanted)
        is_environment = is_folder and _is_environment(os.path.join(self._tree.source, path))
        text = _RESULTS if is_result else VIRTUAL_ENVIRONMENT if is_environment else why
        self._tree.not_copied.append(NotCopied(path=path, why=text, is_linked=not is_result, is_folder=is_folder))

    def _holds_results(self, path: str) -> bool:
        absolute = os.path.join(self._tree.source, path)
        if os.path.basename(path) not in RESULTS or os.path.islink(absolute):
            return False
        try:
            return not any(name.endswith(".py") for name in os.listdir(absolute)) and not self._has_tracked(path)
        except OSError:
            return False

    def _has_tracked(self, path: str) -> bool:
        return self._is_git and self._ignore.file_name == ".gitignore" and self._is_tracked(path)

    def _is_tracked(self, path: str) -> bool:
        if self._tracked is None:
            files = tracked_files(self._tree.source)
            above = {"/".join(parts[:n]) for parts in (file.split("/") for file in files) for n in range(1, len(parts))}
            self._tracked = frozenset(files) | above
        return path in self._tracked

    def _directory(self, path: str, *, trust: bool) -> None:
        absolute = os.path.join(self._tree.source, path)
        if (real := os.path.realpath(absolute)) == self._leave_out or real in self._files_out:
            return
        is_open = self._opened is not None and path in self._opened
        if not is_open and _is_environment(absolute):
            # A virtual environment holds installed files, not source.
            return self._leave(path, VIRTUAL_ENVIRONMENT, is_folder=True)
        if self._opened is None or is_open:
            self._tree.directories.append(path)
            return self._walk(path, trust=trust)
        if self._holds_results(path):
            return self._leave(path, _RESULTS, is_folder=True)
        is_group = self._left is None and not self._is_git
        # Leave out hidden folders outside of a git repository, because they hold caches and settings.
        if is_group and os.path.basename(path).startswith("."):
            return self._leave(path, "a hidden folder", is_folder=True)
        self._tree.directories.append(path)
        try:
            if is_group:
                self._left = MAX_FILES
            self._walk(path, trust=trust)
        except _TooManyFilesError:
            if not is_group:
                raise
            self._take_back(path)
            self._leave(path, f"more than {MAX_FILES} files", is_folder=True)
        finally:
            if is_group:
                self._left = None

    def _take_back(self, path: str) -> None:
        tree, below = self._tree, f"{path}/"
        for parts in (tree.files, tree.links, tree.hashes):
            for name in [name for name in parts if name.startswith(below)]:
                del parts[name]
        tree.directories[:] = [name for name in tree.directories if name != path and not name.startswith(below)]
        tree.not_copied[:] = [excluded for excluded in tree.not_copied if not excluded.path.startswith(below)]

    def _link_largest(self) -> None:
        """Exclude the largest untracked files and folders until the limits are met."""
        tree = self._tree
        if tree.size <= MAX_BYTES and len(tree.files) <= MAX_FILES:
            return
        assert self._opened is not None
        groups: dict[str, list[int]] = {}
        for path, stamp in tree.files.items():
            parts = path.split("/")
            # Name the topmost folder that has no included or tracked file. If there is no such folder, name the file itself.
            names = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
            group = next((name for name in names if name not in self._opened and not self._has_tracked(name)), None)
            if group is not None:
                total = groups.setdefault(group, [0, 0])
                total[0] += stamp[0]
                total[1] += 1
        while groups and (tree.size > MAX_BYTES or len(tree.files) > MAX_FILES):
            by = 0 if tree.size > MAX_BYTES else 1
            largest = max(groups, key=lambda group: groups[group][by])
            del groups[largest]
            is_folder = largest not in tree.files
            if is_folder:
                self._take_back(largest)
            else:
                del tree.files[largest]
                tree.hashes.pop(largest, None)
            self._leave(largest, "too large to copy", is_folder=is_folder)

    def _file(self, path: str, entry: os.DirEntry[str]) -> None:
        stamp = stamp_of(entry.stat(follow_symlinks=False))
        if self._opened is not None:
            if not stat.S_ISREG(stamp[4]):
                return self._leave(path, "neither a file, a folder nor a link")
            if stamp[0] > _DATA_BYTES and not self._has_tracked(path):
                return self._leave(path, "too large to copy")
            if not os.access(entry.path, os.R_OK):
                return self._leave(path, "it can't be read")
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise _TooManyFilesError
        if not stat.S_ISREG(stamp[4]):
            raise SnapshotError(
                f"{path!r} is neither a file, a folder nor a link (a socket, a pipe or a device). "
                "Remove it or name it in .amlignore."
            )
        self._tree.files[path] = stamp
        before = self._known.get(path)
        # Compare ctime too: programs can reset mtime.
        if before is not None and tuple(before[:5]) == stamp and max(stamp[1], stamp[2]) < self._trusted_ns:
            self._tree.hashes[path] = before[5]

    def _link_target(self, path: str) -> str | None:
        """Return the target for a symbolic link's copy, or None to exclude the link."""
        absolute = os.path.join(self._root, path)
        target = os.readlink(absolute)
        resolved = os.path.realpath(absolute)
        # Compare with a separator at the end: "/home/ann/src-old" begins with "/home/ann/src", but is another folder.
        if resolved != self._root and not resolved.startswith(self._root + os.sep):
            if self._opened is not None:
                self._leave(path, f"a link to {target}", is_folder=os.path.isdir(absolute))
                return None
            raise SnapshotError(
                f"{path!r} is a link to {target!r}, outside {str(self._tree.source)!r}: a copy of the tree would not hold it. "
                "Copy its target into the tree, or name the link in .amlignore."
            )
        by_name = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if os.path.isabs(target) or by_name.split(os.sep)[0] == "..":
            # Make the link relative: an absolute link, or one that leaves the tree and returns, would lead to the original.
            target = os.path.relpath(resolved, os.path.dirname(absolute))
        return target


def _is_environment(path: str) -> bool:
    return os.path.exists(os.path.join(path, "pyvenv.cfg"))


def _check_limits(tree: Tree) -> None:
    if os.environ.get(LIMIT_VARIABLE, "").lower() == "off" or os.environ.get(_AZURE_LIMIT_VARIABLE):
        return
    size, count = tree.size, len(tree.files) + len(tree.links)
    if size <= MAX_BYTES and count <= MAX_FILES:
        return
    tops: dict[str, list[int]] = {}
    for path, stamp in tree.files.items():
        top = tops.setdefault(path.split("/", 1)[0], [0, 0])
        top[0] += stamp[0]
        top[1] += 1
    by_size = size > MAX_BYTES
    largest = sorted(tops.items(), key=lambda item: item[1][0 if by_size else 1], reverse=True)[:3]
    named = ", ".join(f"{name!r} ({total / 2**20:.0f} MiB, {files} files)" for name, (total, files) in largest)
    raise SnapshotError(
        f"{str(tree.source)!r} holds {size / 2**20:.0f} MiB in {count} files; a snapshot takes {MAX_BYTES // 2**20} MiB and "
        f"{MAX_FILES} files. Most of it: {named}. Name in .amlignore what the script does not need (data belongs on a "
        f"shared path), or lift the limits with {LIMIT_VARIABLE}=off."
    )
