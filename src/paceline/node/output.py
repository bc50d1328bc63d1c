"""Print the progress of a node's preparation, and store the outputs of its workers."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable

from paceline.job.data_reference import DataReference
from paceline.job.job import Job
from paceline.remote.staging.stage_in import Arrived, as_here
from paceline.remote.staging.stage_out import leave
from paceline.runs.folder import RunFolder

_WIDTH = 24
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
#: Seconds between two updates of the progress bar.
_EVERY_S = 0.2

#: Whether standard output ends with a progress bar without a newline, and when (`_drawn_at`) it was drawn.
_drawn = False
_drawn_at = 0.0


def say(text: str) -> None:
    """End a progress bar's line, and print a text."""
    close()
    print(text, flush=True)


class Bar:
    """The progress bar of one transfer, called with finished and total bytes and files."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, done_bytes: int, total_bytes: int, done_files: int, total_files: int) -> None:
        global _drawn, _drawn_at
        now = time.monotonic()
        if now - _drawn_at < _EVERY_S:
            return
        _drawn, _drawn_at = True, now
        print(f"\r{bar_text(self._what, done_bytes, total_bytes, done_files, total_files)}", end="", flush=True)


def bar_text(what: str, done_bytes: int, total_bytes: int, done_files: int, total_files: int) -> str:
    """Return the text "train  [######----]  60 %  120 of 200 MB, 12 of 20 files"."""
    share = done_bytes / total_bytes if total_bytes else 1.0
    filled = min(_WIDTH, int(share * _WIDTH))
    unit, name = next(((size, name) for size, name in _UNITS if total_bytes >= size), (1, "B"))
    digits = 0 if unit == 1 else 1
    return (
        f"{what}  [{'#' * filled}{'-' * (_WIDTH - filled)}] {min(share, 1.0):4.0%}  "
        f"{done_bytes / unit:.{digits}f} of {total_bytes / unit:.{digits}f} {name}, {done_files} of {total_files} files"
    )


def close() -> None:
    """End the line of a progress bar."""
    global _drawn
    if _drawn:
        _drawn = False
        sys.stdout.write("\n")
        sys.stdout.flush()


def check_outputs(references: Iterable[DataReference], came: Arrived) -> dict[str, object]:
    """Raise an error if this machine cannot store the run's outputs.

    Skip outputs that the submitting machine stores. `came` describes the files that were sent with the run. The result is empty.

    Raises:
        TransferError, DataError: A store can't be written, or has files that must not be replaced.
    """
    from paceline.data.transfer.upload import check_upload

    for reference in references:
        if reference.is_output and not came.goes_home(reference):
            check_upload(reference, came.stores_dir)
    return {}


def store_outputs(job: Job, folder: RunFolder, node_rank: int) -> dict[str, object]:
    """Upload each output folder, and remove the folder afterwards.

    Keep the folders of outputs that the submitting machine stores. Return stored outputs and excluded files as JSON.

    Raises:
        TransferError, DataError: A file can't be stored.
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
            # Remove the folder only after all files are stored: if an upload fails, the user finds all of them here.
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        left_out += [{"name": f"uploads/{reference.name}/{name}".removesuffix("/."), "why": why} for name, why in left]
    return {"outputs": stored, "left_out": left_out}
