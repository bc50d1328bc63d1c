"""What the server of a service is told: the service's record and one of its revisions, as `ServerConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.services import model_files
from paceline.services.folder import ServiceFolder
from paceline.services.record import Revision
from paceline.serving.config import ServedModel, ServerConfig


def config_of(
    folder: ServiceFolder,
    revision: Revision,
    /,
    *,
    workers: int,
    python: str | None,
    environment: Mapping[str, str],
    **where: Any,
) -> ServerConfig:
    """The configuration by which a server serves this revision.

    python, environment: of the model's processes. where: host, port, listen_fd, beat_fd, keys_file, tls_cert,
    tls_key and revision.

    Raises:
        ServingError: the server would refuse it.
        ModelError: a model is not in the registry any more.
    """
    place = folder.revision(revision.number)
    models = []
    for index, model in enumerate(revision.models):
        # Looked up each time: the workspace may have been moved, and the model be gone.
        is_registered = model["id"] is not None
        path = model_files.find(folder.workspace_dir, model["id"]).path if is_registered else place.model(index)
        models.append(
            ServedModel(
                name=model["name"],
                version=model["version"],
                path=str(path),
                hashes=str(place.hashes(index)) if is_registered else None,
                framework=model["framework"],
            )
        )
    return ServerConfig(
        name=folder.name,
        models=tuple(models),
        entry_script=revision.entry_script,
        source_dir=None if revision.entry_script is None else str(place.source),
        python=python,
        environment={**environment, **revision.variables},
        workers=workers,
        **revision.settings,
        **where,
    )
