"""Store what the workers have left in their output folders."""

from __future__ import annotations

import shutil
from typing import Any

from paceline.job import Job
from paceline.node.output import Bar, say
from paceline.runs.folder import RunFolder


def store_outputs(job: Job, folder: RunFolder, node_rank: int) -> dict[str, Any]:
    """Upload each output folder; what is stored goes from the run's folder, what could not be stays there.

    Raises:
        TransferError, DataError: a file could not be stored.
    """
    from paceline.data.upload import upload_folder

    stored = []
    for reference in job.inputs:
        path = folder.uploads / reference.name
        if not reference.is_output or not path.is_dir():
            continue
        uploaded = upload_folder(
            reference, path, workspace_dir=folder.path.parent.parent, say=say, progress=Bar(reference.name)
        )
        stored.append(reference.to_json() | {"files": uploaded.files, "bytes": uploaded.bytes})
        shutil.rmtree(path)
    return {"outputs": stored}
