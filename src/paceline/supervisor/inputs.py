"""A run's data as its supervisor sees it: kept while the run lasts, and at the places the script was promised."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import DataError
from paceline.job import Job
from paceline.plan import Prepared
from paceline.runs.files import read_json
from paceline.runs.folder import RunFolder


@contextlib.contextmanager
def views(job: Job, run_id: str) -> Iterator[None]:
    """While it lasts, nobody removes the folders in which the run finds its data; after it they are gone."""
    if all(reference.is_output for reference in job.inputs):
        yield
        return
    from paceline.data.cache import DataCache

    cache = DataCache()
    cache.drop_dead_views()  # of runs that were killed
    held = cache.hold_view(run_id)
    try:
        yield
    finally:
        cache.drop_views(run_id)
        os.close(held)


def hold_environment(folder: RunFolder) -> contextlib.AbstractContextManager[None]:
    """While it lasts, `paceline env prune` leaves the run's environment alone."""
    from paceline.environments.built import Built
    from paceline.environments.store import EnvironmentStore

    kept, environments = read_json(folder.environment), folder.path.parent.parent / "environments"
    if Path(kept["prefix"]).is_relative_to(environments / "images"):
        from paceline.containers import hold_layer

        return hold_layer(environments / "images", kept["key"])
    return EnvironmentStore(environments).hold(Built.from_json(kept))


def link_inputs(job: Job, prepared: Prepared, work_dir: Path) -> None:
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
            if link.is_symlink():
                link.unlink()
                with contextlib.suppress(OSError):
                    os.removedirs(link.parent)
