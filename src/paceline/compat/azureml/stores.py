"""The names of datastores that every workspace in Azure has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.job.data_reference import Source

#: They mean the default store, unless one of that name was registered.
DEFAULT_NAMES = ("workspaceblobstore", "workspacefilestore", "workspaceartifactstore", "workspaceworkingdirectory")

#: The files of runs have places in a store in Azure: `ExperimentRun/dcid.<run id>/outputs`. Here they lie with the run.
ARTIFACTS = "workspaceartifactstore"
_OF_RUN = re.compile(r"ExperimentRun/dcid\.(\w[^/]*)/(.+)")


def place_in(workspace: Any, name: str | None, path: str) -> Source:
    """Return where a path of a store lies here."""
    if name == ARTIFACTS and (match := _OF_RUN.fullmatch(path)) is not None:
        from paceline.runs.folder import RunFolder

        return Source(path=str(RunFolder(Path(workspace.path, "runs", match[1]).absolute()).file(match[2])))
    return Source(datastore=real_name(workspace, name), path=path)


def real_name(workspace: Any, name: str | None) -> str:
    """The name under which the store is known here."""
    from paceline.data.stores.datastore import Datastore

    if name is None or (name in DEFAULT_NAMES and name not in Datastore.list(workspace)):
        return Datastore.get_default(workspace).name
    return name
