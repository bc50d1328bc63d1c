"""Verify the files of a model's version, and make verified copies."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelChangedError, ModelError
from paceline.models import keep
from paceline.models.record import ModelRecord
from paceline.system.files import copy_whole, remove_tree

_MAX_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A changed file of a model version.

    why: the end of a sentence that begins with the file's name, such as "has changed".
    """

    name: str
    why: str


def changes(
    folder: Path, record: ModelRecord, *, whole: bool = True, on_read: Callable[[int], object] = lambda size: None
) -> list[Changed]:
    """Return a model version's files that were changed, removed or added since registration.

    Args:
        folder: The version's folder of files.
        record: The model version.
        whole: Read every byte. Otherwise, files with the registered size and modification time count as unchanged.
        on_read: Called with the number of bytes read.
    """
    changed = [
        Changed(name=file.name, why=why)
        for file in record.files
        if (why := _change(folder / file.name, file.size_bytes, file.sha256, whole, on_read))
    ]
    known = {file.name for file in record.files}
    changed += [Changed(name=name, why="was not registered") for name in _names(folder) if name not in known]
    return changed


def refuse(record: ModelRecord, found: list[Changed]) -> None:
    """Raise ModelChangedError with the changed files, if there are any."""
    if found:
        listed = "; ".join(f"{change.name!r} {change.why}" for change in found[:_MAX_LISTED])
        more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise ModelChangedError(
            f"files of model {record.id} have changed since its registration: {listed}{more}. Register the files again, or "
            f"repeat its run: {f'paceline rerun {record.run_id}' if record.run_id else 'its record names no run'}."
        )


def _change(path: Path, size_bytes: int, sha256: str, whole: bool, on_read: Callable[[int], object]) -> str:
    try:
        status = os.lstat(path)
    except OSError:
        return "is not there"
    if not stat.S_ISREG(status.st_mode):
        return "is no longer a file"
    if status.st_size != size_bytes:
        return f"has {status.st_size:,} bytes in place of {size_bytes:,}"
    if not whole and keep.is_untouched(status, size_bytes):
        return ""
    try:
        return "" if keep.sha256_of(path, on_read) == sha256 else "has other content"
    except OSError as error:
        return f"can't be read: {error.strerror}"


def _names(folder: Path) -> Iterator[str]:
    for at, folders, names in os.walk(folder):
        for name in sorted([*names, *(link for link in folders if os.path.islink(os.path.join(at, link)))]):
            yield Path(at, name).relative_to(folder).as_posix()


def copy(files: Path, record: ModelRecord, target: Path, *, exist_ok: bool = False) -> Path:
    """Copy a model version's files into `target`. Return the copy's path.

    The copy is atomic: if the process is killed, no incomplete copy has the final path.

    Args:
        files: The version's folder of files.
        record: The model version.
        target: Destination folder.
        exist_ok: Replace an existing copy.

    Raises:
        ModelError: The copy exists and exist_ok is False, or the copy can't be written.
        ModelChangedError: A file has changed since its registration.
    """
    path = target / record.top
    if os.path.lexists(path) and not exist_ok:
        raise ModelError(
            f"{str(path)!r} exists already. --overwrite (exist_ok=True) replaces it; or name another folder."
        )
    beside = target / f".{record.top[:100]}.{secrets.token_hex(4)}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        try:
            for file in record.files:
                copied = beside / file.name
                try:
                    copy_whole(files / file.name, copied, top=files)
                except FileNotFoundError as error:
                    if not target.exists():
                        raise
                    raise ModelChangedError(f"file {file.name!r} of model {record.id} is not there.") from error
                if keep.sha256_of(copied) != file.sha256:
                    raise ModelChangedError(
                        f"file {file.name!r} of model {record.id} has other content than was registered. "
                        f"`paceline model verify {record.id}` looks at all of them."
                    )
                # Registered files are read-only because versions share them. Make the user's own copy writable.
                os.chmod(copied, 0o644)
                os.utime(copied)
            if os.path.lexists(path):
                old = target / f".{record.top[:100]}.{secrets.token_hex(4)}.old"
                os.rename(path, old)
                os.rename(beside / record.top, path)
                remove_tree(old)
            else:
                os.rename(beside / record.top, path)
        finally:
            remove_tree(beside)
    except OSError as error:
        place = error.filename2 or error.filename or target
        raise ModelError(f"{str(place)!r} can't be written: {error.strerror or error}. Name another folder.") from error
    return path
