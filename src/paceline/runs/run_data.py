"""Inputs as links in the script's folder, and the notes on stored outputs (`data.json`)."""

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
    """Link inputs to their `path_on_compute` in the working directory.

    Raises:
        DataError: The snapshot has a file there.
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
    """Remove the links of inputs, and folders that were created for them."""
    for reference in job.inputs:
        if reference.path_on_compute is not None:
            link = folder.work / reference.path_on_compute
            # A file that the script put in the link's place stays.
            if link.is_symlink():
                link.unlink()
                with contextlib.suppress(OSError):
                    # removedirs goes up while folders are empty, and raises if the first one is not.
                    os.removedirs(link.parent)


def note(folder: RunFolder, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Add values to the notes on outputs. found: output -> values."""
    told = read_json(folder.data) or {}
    outputs = [one | dict(found.get(one["name"], {})) for one in told.get("outputs", ())]
    write_json(folder.data, told | {"outputs": outputs})


def note_datasets(folder: RunFolder, made: Mapping[str, str]) -> None:
    """Note the datasets that outputs were registered as. made: output -> "name:version"."""
    if made:
        note(folder, {name: {"dataset": dataset} for name, dataset in made.items()})
