"""Named JSON documents in a folder of the workspace, with or without versions.

    <folder>/<name>.json                 `Documents`: one document for each name
    <folder>/<name>/<version>.json       `Versions`: 1, 2, 3 ... for each name
    <folder>/<name>/<version>/           `VersionFolders`: the same, each a folder with a document and files
    <folder>/<name>/.last                the highest version that ever was
    <folder>/.lock                       held while a version is added or removed

Many processes of many machines may write at once. A document gets its name by a hard link, which fails where there is one
already, on NFS too; so of two writers one has the name and the other is told. Readers see whole documents alone.

What a name stands for, and the words in which a user is told that it is wrong, are the caller's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.system import locks
from paceline.system.files import names_in, read_json, write_json, write_whole

_VERSION = re.compile(r"[1-9][0-9]*")
#: What a file system without hard links answers.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


@dataclass(frozen=True)
class Documents:
    """A folder with one document for each name. rule: which names there can be; files of other names are passed over."""

    folder: Path
    rule: re.Pattern[str]

    def names(self) -> list[str]:
        """The names that have a document, sorted; none where there is no such folder."""
        stems = (name.removesuffix(".json") for name in names_in(self.folder) if name.endswith(".json"))
        return sorted(stem for stem in stems if self.rule.fullmatch(stem))

    def path(self, name: str) -> Path:
        """The path where the document of this name lies, or would lie."""
        assert self.rule.fullmatch(name), name
        return self.folder / f"{name}.json"

    def read(self, name: str) -> Any:
        """The document; None where there is none or it is not JSON."""
        return read_json(self.path(name))

    def add(self, name: str, document: Any) -> None:
        """Keep a new document, which survives a power cut.

        Raises:
            FileExistsError: there is one of this name.
            OSError: it can't be written.
        """
        path = self.path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}")
        # Whole and on the disk before it has its name: a reader finds all of it, after a power cut, too.
        write_whole(beside, json.dumps(document) + "\n", sync=True)
        try:
            os.link(beside, path)
        except OSError as error:
            if os.stat(beside).st_nlink == 2:
                return  # NFS has made the link, lost its answer, and asked again
            if error.errno not in _NO_LINKS:
                raise
            with locks.locked(self.folder / ".lock"):
                if path.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
                os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    def put(self, name: str, document: Any) -> None:
        """Keep a document in the place of one of this name, if there is one.

        Raises:
            OSError: it can't be written.
        """
        path = self.path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, document, sync=True)

    def remove(self, name: str) -> None:
        """Forget the document; one that is not there is no error."""
        self.path(name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Versions:
    """A folder with documents in versions for each name. A version's number is never given out twice."""

    folder: Path
    rule: re.Pattern[str]

    def of(self, name: str) -> Documents:
        """The versions of one name, as documents that are named by their number."""
        assert self.rule.fullmatch(name), name
        return Documents(self.folder / name, _VERSION)

    def names(self) -> list[str]:
        """The names that have a version, sorted."""
        return [name for name in names_in(self.folder) if self.rule.fullmatch(name) and self.versions(name)]

    def versions(self, name: str) -> list[int]:
        """The versions of this name, ascending; empty where there is none."""
        return sorted(map(int, self.of(name).names()))

    def read(self, name: str, version: int) -> Any:
        """The document; None where there is none or it is not JSON."""
        return self.of(name).read(str(version))

    def add(self, name: str, make: Callable[[int], Any]) -> int:
        """Keep a new version, and return its number. make: number -> document. The caller holds the lock (`locked`).

        Raises:
            OSError: it can't be written.
        """
        return self._take_number(name, lambda version: self.of(name).add(str(version), make(version)))

    def _take_number(self, name: str, put: Callable[[int], None]) -> int:
        """The number under which `put` has put something; it raises FileExistsError where another has the number."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            last = read_json(folder / ".last")
            version = max([last if isinstance(last, int) else 0, *self.versions(name)]) + 1
            # Before the version: killed in between, a number is skipped, which is better than one that is given twice.
            write_json(folder / ".last", version)
            # Only where the folder's locks hold for one machine alone can another have the number by now.
            with contextlib.suppress(FileExistsError):
                put(version)
                return version

    def remove(self, name: str) -> None:
        """Forget all versions of a name, with all else that lies beside them. The caller holds the lock."""
        folder = self.of(name).folder
        for version in self.versions(name):  # first, so that none is there without what lies beside it
            self.of(name).remove(str(version))
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.name != ".last":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A block in which no other process adds or removes a version here. The folder is made.

        Raises:
            OSError: the folder can't be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locks.locked(self.folder / ".lock"):
            yield


@dataclass(frozen=True)
class VersionFolders(Versions):
    """Versions that are folders, each with a document in a file of the name `document`; one without it is none."""

    document: str = "version.json"

    def path(self, name: str, version: int) -> Path:
        """The folder of this version, or where it would lie."""
        assert self.rule.fullmatch(name), name
        return self.folder / name / str(version)

    def versions(self, name: str) -> list[int]:
        """The versions of this name, ascending; empty where there is none."""
        assert self.rule.fullmatch(name), name
        folder = self.folder / name
        found = (one for one in names_in(folder) if _VERSION.fullmatch(one))
        return sorted(int(one) for one in found if (folder / one / self.document).exists())

    def read(self, name: str, version: int) -> Any:
        """The document; None where there is none or it is not JSON."""
        return read_json(self.path(name, version) / self.document)

    def add_folder(self, name: str, folder: Path, make: Callable[[int], Any]) -> int:
        """Make a folder the next version, by one rename, and return its number. The caller holds the lock (`locked`).

        folder: of the same file system; gone afterwards. make: number -> the document, which is written into it.

        Raises:
            OSError: it can't be written.
        """
        return self._take_number(name, lambda version: self._put(name, version, folder, make(version)))

    def put_folder(self, name: str, version: int, folder: Path, document: Any) -> None:
        """Make a folder the version of this number, given elsewhere; later numbers are above it. The caller holds the lock.

        Raises:
            FileExistsError: there is one.
            OSError: it can't be written.
        """
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        last = read_json(home / ".last")
        if not isinstance(last, int) or last < version:
            write_json(home / ".last", version)
        self._put(name, version, folder, document)

    def _put(self, name: str, version: int, folder: Path, document: Any) -> None:
        write_json(folder / self.document, document, sync=True)
        try:
            # Onto a folder that is not empty it fails, so nobody's version is ever replaced.
            os.rename(folder, self.path(name, version))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder)) from None

    def take_away(self, name: str, version: int, to: Path) -> None:
        """Make a version a folder of another name, by one rename: there is no such version from then on.

        Raises:
            OSError: there is none, or it can't be moved.
        """
        os.rename(self.path(name, version), to)
