"""Which services need a registered model: its files are read again whenever a process of theirs is started."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError
from paceline.services import store
from paceline.services.folder import ServiceFolder
from paceline.services.record import GONE


def of_model(workspace_dir: Path, model_id: str) -> list[str]:
    """The names of the services that serve this version ("digits:3"), are about to, or will when they are started."""
    return [folder.name for folder in store.all_folders(workspace_dir) if model_id in _models(folder)]


def _models(folder: ServiceFolder) -> set[str]:
    wanted = store.wanted(folder)
    if wanted.state == GONE:
        return set()
    try:
        served = store.stored(folder).revision
        numbers = {wanted.revision, *([] if served is None else [served])}
        return {name for number in numbers for name in store.revision(folder, number).model_names}
    except PacelineError:
        return set()  # deleted meanwhile
