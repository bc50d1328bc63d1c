"""Write revisions of a service, and convert them to configurations of the server.

`revision.json` is written last: a folder without this file does not count as a revision.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import snapshot
from paceline.errors import ServiceError, ServingError
from paceline.job.environment import EnvironmentSpec
from paceline.runs.record import user_name, utc_now
from paceline.services import store
from paceline.services.folder import RevisionFolder, ServiceFolder
from paceline.services.record import Revision, RevisionModel
from paceline.services.revision_spec import FoundModel, RevisionSpec, find_model
from paceline.serving.api import ServedModel, ServerConfig
from paceline.system.files import PRIVATE, remove_tree, write_json


def write(folder: ServiceFolder, spec: RevisionSpec, *, why: str, source_of: Revision | None = None) -> Revision:
    """Write the next revision. The caller holds the lock of `store.editing`.

    spec: Models, script, environment and settings.
    why: Reason for the revision, shown to people.
    source_of: The revision whose source folder is copied; None for the present source folder.

    Raises:
        UserError: A model is missing or has changed, the source can't be copied, or the server refuses a setting.
        ServiceError: The disk is full or read-only.
    """
    place = folder.revision(store.next_number(folder))
    try:
        place.path.mkdir(parents=True)
        try:
            made = _fill(folder, place, spec, why=why, source_of=source_of)
            check_served(folder, made)
            # Write the description last. Only this user may read it, because its variables may be secrets.
            write_json(place.description, made.to_json(), mode=PRIVATE)
        except BaseException:
            remove_tree(place.path)
            raise
    except OSError as error:
        raise not_written(folder.path, error) from error
    return made


def not_written(path: Path, error: OSError) -> ServiceError:
    return ServiceError(
        f"the service can't be written to {str(path)!r}: {error.strerror or error}. Free some space, or name another "
        "workspace (PACELINE_WORKSPACE)."
    )


def _fill(
    folder: ServiceFolder, place: RevisionFolder, spec: RevisionSpec, *, why: str, source_of: Revision | None
) -> Revision:
    found_models = [find_model(folder.workspace_dir, each) for each in spec.models]
    environment = spec.environment or found_models[0].environment or EnvironmentSpec()
    taken = None
    if spec.source_directory is not None and source_of is not None:
        shutil.copytree(folder.revision(source_of.number).source, place.source, symlinks=True)
        taken = source_of.snapshot_id
    elif spec.source_directory is not None:
        taken = _copy_source(folder, place, spec)
    models = [_model(place, index, each) for index, each in enumerate(found_models)]
    return Revision(
        number=place.number,
        models=tuple(models),
        entry_script=spec.entry_script,
        source_directory=spec.source_directory,
        snapshot_id=taken,
        environment=environment,
        variables={**environment.environment_variables, **spec.variables},
        settings=spec.settings,
        created_utc=utc_now(),
        created_by=user_name(),
        why=why,
    )


def spec_of(folder: ServiceFolder, revision: Revision) -> RevisionSpec:
    """Return the spec from which `write` would make this revision again."""
    return RevisionSpec(
        models=tuple(
            model.id or folder.revision(revision.number).model(index) / str(model.file)
            for index, model in enumerate(revision.models)
        ),
        entry_script=revision.entry_script,
        source_directory=revision.source_directory,
        environment=revision.environment,
        variables=dict(revision.variables),
        settings=revision.settings,
    )


def check_served(folder: ServiceFolder, revision: Revision) -> None:
    """Raise ServiceError if the server would refuse the revision's configuration."""
    try:
        config_of(folder, revision, workers=1, python=None, environment={})
    except ServingError as error:
        raise ServiceError(str(error)) from error


def _model(place: RevisionFolder, index: int, model: FoundModel) -> RevisionModel:
    if model.id is None:
        model.copy_into(place.model(index))
    else:
        place.hashes(index).parent.mkdir(exist_ok=True)
        place.hashes(index).write_text(model.hash_lines())
    file = model.path.name if model.id is None else None
    return RevisionModel(id=model.id, name=model.name, version=model.version, framework=model.framework, file=file)


def _copy_source(folder: ServiceFolder, place: RevisionFolder, spec: RevisionSpec) -> str:
    assert spec.source_directory is not None
    taken = snapshot.take(Path(spec.source_directory), folder.workspace_dir / "snapshots", folder.workspace_dir)
    if spec.entry_script not in taken.files:
        raise ServiceError(
            f"entry_script {spec.entry_script!r} is left out of the copy of {spec.source_directory!r} by .amlignore or "
            ".gitignore. Let the script in."
        )
    # Copy the snapshot: a script may write into its folder, and pruning removes snapshots that no run uses.
    shutil.copytree(taken.path, place.source, symlinks=True)
    return taken.id


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
    """Return the server's configuration for a revision of a service.

    python: Interpreter of the model processes.
    environment: Variables of the model processes.
    where: The fields host, port, listen_fd, heartbeat_fd, keys_file, tls_cert, tls_key and revision of the result.

    Raises:
        ServingError: The server would refuse the configuration.
        ModelError: A model is no longer in the registry.
    """
    place = folder.revision(revision.number)
    models = []
    for index, model in enumerate(revision.models):
        # Look up a registered model's path each time, because the workspace may have moved.
        is_registered = model.id is not None
        path = find_model(folder.workspace_dir, model.id).path if is_registered else place.model(index)
        models.append(
            ServedModel(
                name=model.name,
                version=model.version,
                path=str(path),
                hashes=str(place.hashes(index)) if is_registered else None,
                framework=model.framework,
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
