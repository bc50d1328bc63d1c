"""Prepare outputs on the supervisor's machine, for the submitting machine to store them in its folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.errors import TransferError
from paceline.job.data_reference import DataReference
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json, write_json


def leave(reference: DataReference, folder: RunFolder, say: Callable[[str], None]) -> tuple[tuple[str, str], ...]:
    """Record an output's file names and sizes, for the submitting machine to check.

    Replace links by the files to which they lead. Some entries can't be stored, such as links out of the run's folder.
    Report these entries to `say`, and return them as (name, reason).

    Raises:
        DataError: A datastore can't store a file of this name.
        TransferError: A file can't be read.
    """
    from paceline.data.transfer.upload import left_out_text, output_files

    path = folder.uploads / reference.name
    try:
        files, left_out = output_files(reference, folder.path)
        for name, why in left_out:
            say(left_out_text(reference, name, why))
        # Rewrite an output only if it has links or excluded files. Most outputs have only plain files.
        if left_out or _has_links(path):
            _make_plain(path, files)
        found = {name: _size(path / name) for name, _ in files}
    except OSError as error:
        raise TransferError(
            f"output {reference.name!r}: reading {str(error.filename)!r} failed: {error.strerror or error}. Fix that."
        ) from error
    folder.left.parent.mkdir(exist_ok=True)
    write_json(folder.left, {**(read_json(folder.left) or {}), reference.name: found})
    say(f"output {reference.name!r}: {len(files)} files, to be stored by the submitting machine")
    return tuple(left_out)


def _has_links(top: Path) -> bool:
    return top.is_symlink() or any(
        os.path.islink(os.path.join(directory, name))
        for directory, folders, files in os.walk(top)
        for name in (*folders, *files)
    )


def _make_plain(top: Path, files: list[tuple[str, Path]]) -> None:
    beside = top.with_name(f".{top.name}.plain")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        for name, file in files:
            target = beside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                # Prefer a hard link, which takes no space, but needs the same file system and often the same owner.
                os.link(file, target, follow_symlinks=False)
            except OSError:
                shutil.copyfile(file, target, follow_symlinks=False)
        # Remove only the link, and keep its target. `rmtree` refuses a link.
        top.unlink() if top.is_symlink() else shutil.rmtree(top)
        os.rename(beside, top)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _size(file: Path) -> int:
    # Open each file, so that an unreadable file is reported now instead of later on the submitting machine.
    with open(file, "rb") as opened:
        return os.fstat(opened.fileno()).st_size
