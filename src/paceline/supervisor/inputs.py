"""A run's data as its supervisor sees it: kept while the run lasts, and at the places the script was promised."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.job.job import Job
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json


@contextlib.contextmanager
def views(job: Job, run_id: str) -> Iterator[None]:
    """While it lasts, nobody removes the folders in which the run finds its data; after it they are gone."""
    if all(reference.is_output for reference in job.inputs):
        yield
        return
    from paceline.data.transfer.cache import DataCache

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
