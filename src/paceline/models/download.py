"""A copy of a version's files elsewhere, each checked on its way: whole, or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from paceline.errors import ModelChangedError, ModelError
from paceline.models import keep
from paceline.models.record import ModelRecord
from paceline.system.files import copy_whole, remove_tree


def copy(files: Path, record: ModelRecord, target: Path, *, exist_ok: bool = False) -> Path:
    """Copy the registered file or folder into the folder `target`, under its own name; the path of the copy.

    Killed in the middle, nothing is left under that name, or what was there before.
    exist_ok: replace what is there.

    Raises:
        ModelError: something of that name is there, and exist_ok=False; or it can't be written.
        ModelChangedError: a file is not as it was registered.
    """
    path = target / record.top
    if os.path.lexists(path) and not exist_ok:
        raise ModelError(
            f"{str(path)!r} is there already. --overwrite (exist_ok=True) replaces it; or name another folder."
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
                # Kept files are read-only, for they are shared; a copy is its owner's.
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
