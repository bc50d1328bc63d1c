"""Store what the workers have left in their output folders; before, see that it can be stored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any

from paceline.job.data_reference import DataReference
from paceline.job.job import Job
from paceline.node.output import Bar, say
from paceline.remote.staging.stage_in import Arrived, as_here
from paceline.remote.staging.stage_out import leave
from paceline.runs.folder import RunFolder


def check_outputs(references: Iterable[DataReference], came: Arrived) -> dict[str, Any]:
    """Nothing, if the outputs among them can be stored from this machine. Those that go home were looked at there.

    Raises:
        TransferError, DataError: a store that can't be written, or files are there that may not be replaced.
    """
    from paceline.data.transfer.upload import check_upload

    for reference in references:
        if reference.is_output and not came.goes_home(reference):
            check_upload(reference, came.stores_dir)
    return {}


def store_outputs(job: Job, folder: RunFolder, node_rank: int) -> dict[str, Any]:
    """Upload each output folder; what is stored goes from the run's folder, what could not be stays there, and so does what
    goes to a folder of the submitting machine. The result names what of them is no file of the run's, and was left out.

    Raises:
        TransferError, DataError: a file could not be stored.
    """
    from paceline.data.transfer.upload import upload_output

    stored, left_out, came = [], [], as_here(folder)
    for reference in job.inputs:
        path = folder.uploads / reference.name
        if not reference.is_output or not os.path.lexists(path):
            continue
        if came.goes_home(reference):
            left = leave(reference, folder, say)
            stored.append(reference.to_json())
        else:
            uploaded = upload_output(
                reference, folder.path, workspace_dir=came.stores_dir, say=say, progress=Bar(reference.name)
            )
            left = uploaded.left_out
            stored.append(reference.to_json() | {"files": uploaded.files, "bytes": uploaded.bytes})
            # Only now, when all of it is stored: whatever fails before leaves every file where its owner can find it.
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        left_out += [{"name": f"uploads/{reference.name}/{name}".removesuffix("/."), "why": why} for name, why in left]
    return {"outputs": stored, "left_out": left_out}
