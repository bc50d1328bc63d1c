"""The names of datastores that every workspace in Azure has."""

from __future__ import annotations

from typing import Any

#: They mean the default store, unless one of that name was registered.
DEFAULT_NAMES = ("workspaceblobstore", "workspacefilestore", "workspaceartifactstore", "workspaceworkingdirectory")


def real_name(workspace: Any, name: str | None) -> str:
    """The name under which the store is known here."""
    from paceline.data.stores.datastore import Datastore

    if name is None or (name in DEFAULT_NAMES and name not in Datastore.list(workspace)):
        return Datastore.get_default(workspace).name
    return name
