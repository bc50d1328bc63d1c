"""The datastore names that every Azure workspace has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data import Source

if TYPE_CHECKING:
    from paceline import Workspace

#: Names of the stores that Azure creates for each workspace. They mean the default store, unless the user registers such a name.
DEFAULT_NAMES = ("workspaceblobstore", "workspacefilestore", "workspaceartifactstore", "workspaceworkingdirectory")

#: In Azure, this store contains a run's files at `ExperimentRun/dcid.<run id>/outputs`. Here, the run's folder contains them.
ARTIFACTS = "workspaceartifactstore"
_OF_RUN = re.compile(r"ExperimentRun/dcid\.(\w[^/]*)/(.+)")


def place_in(workspace: Workspace, name: str | None, path: str) -> Source:
    """Return where Paceline keeps the files of `path` in an Azure store.

    The location is in a datastore of the workspace. For Azure's store of run artifacts, it is in the folder of the run.
    """
    if name == ARTIFACTS and (match := _OF_RUN.fullmatch(path)) is not None:
        from paceline.runs import RunFolder

        return Source(path=str(RunFolder(Path(workspace.path, "runs", match[1]).absolute()).file(match[2])))
    return Source(datastore=real_name(workspace, name), path=path)


def real_name(workspace: Workspace, name: str | None) -> str:
    from paceline import Datastore

    if name is None or (name in DEFAULT_NAMES and name not in Datastore.list(workspace)):
        return Datastore.get_default(workspace).name
    return name
