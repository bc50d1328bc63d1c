"""A revision written: its models found, its source copied, its description last; without that it counts for nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceline import snapshot
from paceline.errors import ServiceError, ServingError
from paceline.job.environment import EnvironmentSpec
from paceline.runs.record import user_name, utc_now
from paceline.services import model_files, store
from paceline.services.asked import RevisionSpec
from paceline.services.folder import RevisionFolder, ServiceFolder
from paceline.services.model_files import FoundModel
from paceline.services.record import Revision, ServiceSettings
from paceline.system.files import PRIVATE, remove_tree, write_json


def write(
    folder: ServiceFolder,
    asked: RevisionSpec,
    *,
    why: str,
    source_of: Revision | None = None,
) -> Revision:
    """Write the next revision. Within `store.asking`.

    source_of: the source of this revision is taken again; by default it is copied as it is now.

    Raises:
        UserError: a model that is not there or has been changed, a source that can't be copied, a setting that the server
            refuses.
        ServiceError: the disk is full, or may not be written to.
    """
    number = store.next_number(folder)
    place = folder.revision(number)
    try:
        place.path.mkdir(parents=True)
        try:
            made = _fill(folder, place, asked, why=why, source_of=source_of)
            check_served(folder, made)
            # Last: a revision is there once its description is. Its variables may be secrets.
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
    folder: ServiceFolder,
    place: RevisionFolder,
    asked: RevisionSpec,
    *,
    why: str,
    source_of: Revision | None,
) -> Revision:
    found = [model_files.find(folder.workspace_dir, each) for each in asked.models]
    environment = asked.environment or found[0].environment or EnvironmentSpec()
    taken = None
    if asked.source_directory is not None and source_of is not None:
        shutil.copytree(folder.revision(source_of.number).source, place.source, symlinks=True)
        taken = source_of.snapshot_id
    elif asked.source_directory is not None:
        taken = _copy_source(folder, place, asked)
    models = [_model(place, index, each) for index, each in enumerate(found)]
    return Revision(
        number=place.number,
        models=tuple(models),
        entry_script=asked.entry_script,
        source_directory=asked.source_directory,
        snapshot_id=taken,
        environment=environment.to_json(),
        variables={**environment.environment_variables, **asked.variables},
        settings=asked.settings.given(),
        created_utc=utc_now(),
        created_by=user_name(),
        why=why,
    )


def as_asked(folder: ServiceFolder, revision: Revision) -> RevisionSpec:
    """What was asked for by a revision that is there, for one that differs in something."""
    return RevisionSpec(
        models=tuple(
            model["id"] or folder.revision(revision.number).model(index) / model["file"]
            for index, model in enumerate(revision.models)
        ),
        entry_script=revision.entry_script,
        source_directory=revision.source_directory,
        environment=EnvironmentSpec.from_json(dict(revision.environment)),
        variables=dict(revision.variables),
        settings=ServiceSettings(**revision.settings),
    )


def check_served(folder: ServiceFolder, revision: Revision) -> None:
    """Let the server look at what it will be given.

    Raises:
        ServiceError: it would refuse that.
    """
    from paceline.services.server_config import config_of

    try:
        config_of(folder, revision, workers=1, python=None, environment={})
    except ServingError as error:
        raise ServiceError(str(error)) from error


def _model(place: RevisionFolder, index: int, found: FoundModel) -> dict[str, Any]:
    """What the revision says of a model. One that is in no registry is copied; of others, the server compares the bytes."""
    said = {"id": found.id, "name": found.name, "version": found.version, "framework": found.framework}
    if found.id is None:
        said["file"] = found.path.name
        found.copy_into(place.model(index))
        return said
    place.hashes(index).parent.mkdir(exist_ok=True)
    place.hashes(index).write_text(found.hash_lines())
    return said


def _copy_source(folder: ServiceFolder, place: RevisionFolder, asked: RevisionSpec) -> str:
    assert asked.source_directory is not None
    snapshots = folder.workspace_dir / "snapshots"
    taken = snapshot.take(Path(asked.source_directory), snapshots, folder.workspace_dir)
    if asked.entry_script not in taken.files:
        raise ServiceError(
            f"entry_script {asked.entry_script!r} is left out of the copy of {asked.source_directory!r} by .amlignore or "
            ".gitignore. Let the script in."
        )
    # A copy of the service's own: scripts write beside themselves, and a snapshot goes when no run uses it.
    shutil.copytree(taken.path, place.source, symlinks=True)
    return taken.id
