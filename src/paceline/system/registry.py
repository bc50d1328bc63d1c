"""Store named JSON documents in a folder of the workspace, with or without versions.

    <folder>/<name>.json                 `Documents`: one document for each name
    <folder>/<name>/<version>.json       `Versions`: 1, 2, 3 ... for each name
    <folder>/<name>/<version>/           `VersionFolders`: 1, 2, 3 ... for each name, each a folder with a document and files
    <folder>/<name>/.last                the highest version ever used
    <folder>/.lock                       held while a version is added or removed

Processes of many machines may write at once. A document gets its name by a hard link, which fails if the name exists,
even on NFS. So a second writer of a name gets an error. Readers see complete documents only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paceline.system import locks
from paceline.system.files import names_in, read_json, write_json, write_whole
from paceline.system.names import did_you_mean, some

_T = TypeVar("_T")
_VERSION = re.compile(r"[1-9][0-9]*")
#: Error numbers of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


@dataclass(frozen=True)
class Documents:
    """A folder with one document for each name.

    rule: The pattern of valid names. Files with other names are ignored.
    mode: Permissions of the files that `put` writes, before the umask.
    """

    folder: Path
    rule: re.Pattern[str]
    mode: int = 0o666

    def names(self) -> list[str]:
        """Return the names that have a document, sorted."""
        stems = (name.removesuffix(".json") for name in names_in(self.folder) if name.endswith(".json"))
        return sorted(stem for stem in stems if self.rule.fullmatch(stem))

    def path(self, name: str) -> Path:
        """Return the path of a document, which may not exist."""
        assert self.rule.fullmatch(name), name
        return self.folder / f"{name}.json"

    def read(self, name: str) -> Any:
        """Return the document of this name; None if missing or not JSON."""
        return read_json(self.path(name))

    def add(self, name: str, document: Any) -> None:
        """Store a new document under a name, and sync the disk.

        Raises:
            FileExistsError: A document of this name exists.
            OSError: The document can't be written.
        """
        path = self.path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}")
        # Write and sync the file before it gets its name, so that readers see all of it, also after a power cut.
        write_whole(beside, json.dumps(document) + "\n", sync=True)
        try:
            os.link(beside, path)
        except OSError as error:
            if os.stat(beside).st_nlink == 2:
                return  # NFS made the link, lost the reply and retried, so the error is wrong
            if error.errno not in _NO_LINKS:
                raise
            with locks.locked(self.folder / ".lock"):
                if path.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
                os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    def put(self, name: str, document: Any) -> None:
        """Store a document, replacing an existing document of this name.

        Raises:
            OSError: The document can't be written.
        """
        path = self.path(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, document, sync=True, mode=self.mode)

    def remove(self, name: str) -> None:
        """Remove the document of this name, if it exists."""
        self.path(name).unlink(missing_ok=True)


class NamedDocuments(Mapping[str, _T]):
    """A mapping from name to an object that is stored as a JSON document.

    A damaged document counts as missing.
    """

    #: Class of the error that `find` raises.
    _error: ClassVar[type[Exception]]
    _title: ClassVar[str]  # the noun for a document in the message of `_error`
    _advice: ClassVar[str]  # advice in this message: how to create a document

    def __getitem__(self, name: str) -> _T:
        if (found := self._read(name)) is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._names() if self._read(name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def find(self, name: str) -> _T:
        """Return the object with this name.

        Raises:
            UserError: No object has this name; the message lists the names that exist.
        """
        if (found := self._read(name)) is None:
            raise self._error(
                f"there is no {self._title} {name!r}.{did_you_mean(name, self)} {self._title.capitalize()}s are: "
                f"{some([*self], 10) or 'none'}. {self._advice}"
            )
        return found

    def _names(self) -> Iterable[str]:
        """Return the sorted names of all documents, damaged documents included."""
        raise NotImplementedError

    def _read(self, name: str) -> _T | None:
        """Return the object with this name; None if its document is missing or damaged."""
        raise NotImplementedError


@dataclass(frozen=True)
class Versions:
    """A folder with versioned documents for each name. Version numbers are never reused."""

    folder: Path
    rule: re.Pattern[str]

    def of(self, name: str) -> Documents:
        """Return the store of `name`'s documents, one for each version."""
        assert self.rule.fullmatch(name), name
        return Documents(self.folder / name, _VERSION)

    def names(self) -> list[str]:
        """Return the names that have a version, sorted."""
        return [name for name in names_in(self.folder) if self.rule.fullmatch(name) and self.versions(name)]

    def versions(self, name: str) -> list[int]:
        """Return the versions of a name, ascending."""
        return sorted(map(int, self.of(name).names()))

    def read(self, name: str, version: int) -> Any:
        """Return a version's document; None if missing or not JSON."""
        return self.of(name).read(str(version))

    def add(self, name: str, make: Callable[[int], Any]) -> int:
        """Store a new version and return its number.

        The caller holds `locked()`. make: Called with the new version's number; returns the document.

        Raises:
            OSError: The document can't be written.
        """
        return self._take_number(name, lambda version: self.of(name).add(str(version), make(version)))

    def _take_number(self, name: str, put: Callable[[int], None]) -> int:
        """Call `put` with the next free version number.

        Return this number. `put` raises FileExistsError if the number is taken.
        """
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            last = read_json(folder / ".last")
            version = max([last if isinstance(last, int) else 0, *self.versions(name)]) + 1
            # Write the number first: if the process dies in between, a number is skipped instead of used twice.
            write_json(folder / ".last", version)
            # The number is taken only if locks in this folder do not work across machines: then try the next number.
            with contextlib.suppress(FileExistsError):
                put(version)
                return version

    def remove(self, name: str) -> None:
        """Remove a name with all its versions. The caller holds `locked()`."""
        folder = self.of(name).folder
        for version in self.versions(name):  # remove documents first, so that no version exists without its other files
            self.of(name).remove(str(version))
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.name != ".last":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process add or remove versions during a `with` block.

        Raises:
            OSError: The folder can't be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locks.locked(self.folder / ".lock"):
            yield


@dataclass(frozen=True)
class VersionFolders(Versions):
    """A registry whose versions are folders, each with a JSON file named `document`."""

    document: str = "version.json"

    def path(self, name: str, version: int) -> Path:
        """Return the folder of a version, which may not exist."""
        assert self.rule.fullmatch(name), name
        return self.folder / name / str(version)

    def versions(self, name: str) -> list[int]:
        """Return the versions of a name, ascending."""
        assert self.rule.fullmatch(name), name
        folder = self.folder / name
        found = (one for one in names_in(folder) if _VERSION.fullmatch(one))
        return sorted(int(one) for one in found if (folder / one / self.document).exists())

    def read(self, name: str, version: int) -> Any:
        """Return a version's document; None if missing or not JSON."""
        return read_json(self.path(name, version) / self.document)

    def add_folder(self, name: str, folder: Path, make: Callable[[int], Any]) -> int:
        """Rename a folder to the next version. Return the number. The caller holds `locked()`.

        folder: A folder on the registry's file system.
        make: Called with the version number; returns the document, which is then written into the folder.

        Raises:
            OSError: The folder can't be written or renamed.
        """
        return self._take_number(name, lambda version: self._put(name, version, folder, make(version)))

    def put_folder(self, name: str, version: int, folder: Path, document: Any) -> None:
        """Rename a folder to a given version.

        The caller holds `locked()`. `add_folder` then assigns only higher version numbers.

        Raises:
            FileExistsError: The version exists.
            OSError: The folder can't be written or renamed.
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
            # Renaming onto a non-empty folder fails, so an existing version is never replaced.
            os.rename(folder, self.path(name, version))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder)) from None

    def take_away(self, name: str, version: int, to: Path) -> None:
        """Remove a version by renaming its folder to `to`.

        Raises:
            OSError: The folder is missing, or can't be moved.
        """
        os.rename(self.path(name, version), to)
