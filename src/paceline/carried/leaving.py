"""Output folders that go home: left, where the run's supervisor is, so that all that is in them can be brought away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.data.reference import DataReference
from paceline.errors import TransferError
from paceline.runs.files import read_json, write_json
from paceline.runs.folder import RunFolder


def leave(reference: DataReference, folder: RunFolder, say: Callable[[str], None]) -> None:
    """Note the files of an output folder, by which it is seen at home whether all have come; links become files.

    As when they are stored: names that are no files are left out, and named to `say`.

    Raises:
        DataError: a name that no store takes.
        TransferError: a file can't be read.
    """
    from paceline.data.upload import files_below

    path = folder.uploads / reference.name
    files, left_out = files_below(path)
    for name in left_out:
        say(f"output {reference.name!r}: {name!r} is no file, and is left out")
    try:
        if left_out or _has_links(path):
            _make_plain(path, files)
        found = {name: _size(path / name) for name, _ in files}
    except OSError as error:
        raise TransferError(
            f"output {reference.name!r}: reading {str(error.filename)!r} failed: {error.strerror or error}. Mend that."
        ) from error
    folder.left.parent.mkdir(exist_ok=True)
    write_json(folder.left, {**(read_json(folder.left) or {}), reference.name: found})
    say(f"output {reference.name!r}: {len(files)} files, to be stored by the submitting machine")


def _has_links(top: Path) -> bool:
    return any(
        os.path.islink(os.path.join(directory, name))
        for directory, folders, files in os.walk(top)
        for name in (*folders, *files)
    )


def _make_plain(top: Path, files: list[tuple[str, Path]]) -> None:
    """Have these files in the folder and nothing else: what a link leads to may be nowhere else."""
    beside = top.with_name(f".{top.name}.plain")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        for name, file in files:
            target = beside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(os.path.realpath(file), target)
            except OSError:
                shutil.copyfile(file, target)
        shutil.rmtree(top)
        os.rename(beside, top)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _size(file: Path) -> int:
    with open(file, "rb") as opened:
        return os.fstat(opened.fileno()).st_size
