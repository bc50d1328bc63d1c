"""Inputs at the places in the script's folder that it was promised."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.job.job import Job
from paceline.job.plan import NodeSetup
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json, write_json


def link_inputs(job: Job, prepared: NodeSetup, work_dir: Path) -> None:
    """Let inputs appear at their `path_on_compute` in the working directory as well.

    Raises:
        DataError: something of the snapshot's is there.
    """
    for reference in job.inputs:
        if reference.path_on_compute is not None:
            link = work_dir / reference.path_on_compute
            try:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(prepared.inputs[reference.name])
            except OSError as error:
                raise DataError(
                    f"path_on_compute={reference.path_on_compute!r} of input {reference.name!r} can't be made in the "
                    f"script's folder: {error.strerror}. Choose a path that the source does not have."
                ) from error


def unlink_inputs(job: Job, folder: RunFolder) -> None:
    """Take the links away again, and folders that were made for them."""
    for reference in job.inputs:
        if reference.path_on_compute is not None:
            link = folder.work / reference.path_on_compute
            # What a script has put in the link's place is its own, and stays.
            if link.is_symlink():
                link.unlink()
                with contextlib.suppress(OSError):
                    # It goes up as long as folders are empty; that the first has files of the script in it is an error to it.
                    os.removedirs(link.parent)


def note(folder: RunFolder, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to what is kept of outputs. found: output -> values."""
    told = read_json(folder.data) or {}
    outputs = [one | dict(found.get(one["name"], {})) for one in told.get("outputs", ())]
    write_json(folder.data, told | {"outputs": outputs})


def note_datasets(folder: RunFolder, made: Mapping[str, str]) -> None:
    """Keep what the outputs were registered as. made: output -> "name:version"."""
    if made:
        note(folder, {name: {"dataset": dataset} for name, dataset in made.items()})
