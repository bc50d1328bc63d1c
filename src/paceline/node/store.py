"""Store what the workers have left in their output folders; before, see that it can be stored."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

from paceline.carried.arrived import arrived, stores_dir
from paceline.data.reference import DataReference
from paceline.job import Job
from paceline.node.output import Bar, say
from paceline.runs.folder import RunFolder


def check_outputs(references: Iterable[DataReference], folder: RunFolder) -> dict[str, Any]:
    """Nothing, if the outputs among them can be stored from this machine.

    Raises:
        TransferError, DataError: a store that can't be written, or files are there that may not be replaced.
    """
    from paceline.data.upload import check_upload

    for reference in references:
        if reference.is_output:
            check_upload(reference, stores_dir(folder, arrived(folder)))
    return {}


def store_outputs(job: Job, folder: RunFolder, node_rank: int) -> dict[str, Any]:
    """Upload each output folder; what is stored goes from the run's folder, what could not be stays there.

    Raises:
        TransferError, DataError: a file could not be stored.
    """
    from paceline.data.upload import upload_folder

    stored, records = [], stores_dir(folder, arrived(folder))
    for reference in job.inputs:
        path = folder.uploads / reference.name
        if not reference.is_output or not path.is_dir():
            continue
        uploaded = upload_folder(reference, path, workspace_dir=records, say=say, progress=Bar(reference.name))
        stored.append(reference.to_json() | {"files": uploaded.files, "bytes": uploaded.bytes})
        shutil.rmtree(path)
    return {"outputs": stored}
