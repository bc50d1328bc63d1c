"""The specs of requested revisions, which are checked, and the models that they name."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from paceline.errors import ServiceError
from paceline.job.environment import EnvironmentSpec
from paceline.services.record import ServingOptions
from paceline.system.files import copy_whole

_MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class RevisionSpec:
    """The values of a requested revision, before anything is written.

    models: References such as "digits:3", registered models, or paths of files and folders.
    entry_script: Path relative to source_directory; None serves the model without a script.
    environment: None for the environment in which the first model was made.
    """

    models: tuple[object, ...] = ()
    entry_script: str | None = None
    source_directory: str | None = None
    environment: EnvironmentSpec | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: ServingOptions = field(default_factory=ServingOptions)


def make_spec(
    models: object,
    *,
    entry_script: str | os.PathLike[str] | None = None,
    source_directory: str | os.PathLike[str] | None = None,
    environment: EnvironmentSpec | None = None,
    environment_variables: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
) -> RevisionSpec:
    """Check the values of a new revision, and return its spec.

    Raises:
        ServiceError: No model is given, the script is missing, or a value is not valid.
    """
    script, folder = script_of(entry_script, source_directory)
    if environment is not None:
        check_environment(environment)
    return RevisionSpec(
        models=as_models(models),
        entry_script=script,
        source_directory=folder,
        environment=environment,
        variables=as_variables(environment_variables),
        settings=as_settings(settings or {}),
    )


def changed_spec(before: RevisionSpec, *, settings: Mapping[str, object] | None = None, **changes: Any) -> RevisionSpec:
    """Return a copy of a spec in which `changes` and `settings` replace values."""
    return replace(before, settings=as_settings({**before.settings, **(settings or {})}), **changes)


def as_models(models: object) -> tuple[object, ...]:
    """Return a tuple of models, from one model or several."""
    listed = tuple(models) if isinstance(models, Sequence) and not isinstance(models, str) else (models,)
    listed = tuple(each for each in listed if each is not None)
    if not listed:
        raise ServiceError("a service needs a model. Name one, such as 'digits:3', or the path of a file.")
    return listed


def as_settings(values: Mapping[str, object]) -> ServingOptions:
    """Return settings without None values, for which the server has defaults.

    Raises:
        ServiceError: A name is unknown. The values are checked when the revision is written.
    """
    known = list(ServingOptions.__annotations__)
    if unknown := sorted(set(values) - set(known)):
        raise ServiceError(f"there is no setting {unknown[0]!r} of a service. There are {', '.join(known)}.")
    return cast(ServingOptions, {name: value for name, value in values.items() if value is not None})


def as_variables(values: Mapping[str, object] | None) -> dict[str, str]:
    """Return environment variables as strings."""
    texts = {str(name): str(value) for name, value in (values or {}).items()}
    for name, value in texts.items():
        if not name or "=" in name or "\0" in name + value:
            raise ServiceError(
                f"environment variable {name!r}: a name has a character or more, no '=', and no NUL, which no value has either."
            )
    return texts


def check_workers(workers: object) -> int:
    """Check and return the number of workers, from 1 to 1024."""
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= _MOST_WORKERS:
        raise ServiceError(
            f"workers must be a whole number from 1 to {_MOST_WORKERS}, got {workers!r}. "
            "`paceline service stop` stops the service."
        )
    return workers


def check_environment(environment: object) -> None:
    if not isinstance(environment, EnvironmentSpec):
        raise ServiceError(f"environment must be an Environment, got {environment!r}. Make or get a registered one.")
    if environment.docker_image is not None:
        raise ServiceError(
            f"the environment has docker_image={environment.docker_image!r}, and a service's processes do not run in containers. "
            "Write a folder with a Dockerfile of its own instead: paceline package MODEL --entry SCRIPT -o DIR."
        )


def script_of(entry: Any, source: Any) -> tuple[str | None, str | None]:
    """Return (script's relative path, source folder); (None, None) without a script.

    Raises:
        ServiceError: The script is missing, or is not in that folder.
    """
    if entry is None:
        if source is not None:
            raise ServiceError(
                f"source_directory={os.fspath(source)!r} without entry_script: nothing of it would be run. Name the script too."
            )
        return None, None
    script = Path(os.fspath(entry)).expanduser()
    if script.suffix != ".py":
        raise ServiceError(f"entry_script={str(script)!r} is not a Python file. Name a .py file with init() and run().")
    # As in a run's settings, the script's path is relative to source_directory.
    if source is None:
        top, path = script.absolute().parent, script.absolute()
    else:
        top = Path(os.fspath(source)).expanduser().absolute()
        if not top.is_dir():
            raise ServiceError(
                f"source_directory={os.fspath(source)!r} is not a folder. Name the folder that holds the script."
            )
        path = top / script
    if not path.is_file():
        raise ServiceError(f"entry_script={str(script)!r}: there is no such file in {str(top)!r}.")
    inside = Path(os.path.relpath(os.path.normpath(path), top))
    if inside.parts[0] == "..":
        raise ServiceError(
            f"entry_script={str(script)!r} lies outside of source_directory={str(top)!r}. Name a folder that holds it."
        )
    return inside.as_posix(), str(top)


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """The files of a model to serve.

    id: The model's version in the registry ("digits:3"); None for files outside of the registry.
    environment: Exact environment of the run that made the model, if known.
    known_environment: Full record of that environment (`paceline.models.lineage`).
    digests: SHA-256 of each file, by its name below `path`. Empty for files outside of the registry.
    """

    id: str | None
    name: str
    version: str
    path: Path
    framework: str | None = None
    environment: EnvironmentSpec | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    known_environment: dict[str, Any] = field(default_factory=dict)

    def copy_into(self, folder: Path) -> None:
        """Copy the model's file or folder into a new folder."""
        target = folder / self.path.name
        if self.path.is_dir():
            shutil.copytree(self.path, target)
        else:
            copy_whole(self.path, target)

    def hash_lines(self) -> str:
        """Return the digests as lines in the format of sha256sum."""
        return "".join(f"{digest}  {name}\n" for name, digest in sorted(self.digests.items()))


def find_model(workspace_dir: Path, reference: object) -> FoundModel:
    """Find a model: a registered one, or a file or folder.

    A string that has a `/` or begins with a dot counts as a path.

    Raises:
        UserError: The model does not exist, or its files have changed since its registration.
    """
    if isinstance(reference, (str, os.PathLike)):
        text = os.fspath(reference)
        if isinstance(reference, os.PathLike) or "/" in text or text.startswith("."):
            return _at(Path(text).expanduser())
        return _registered(workspace_dir, text)
    if hasattr(reference, "name") and hasattr(reference, "version"):
        return _registered(workspace_dir, f"{reference.name}:{reference.version}")
    raise ServiceError(
        f"{reference!r} is not a model. Give a registered one, 'NAME:VERSION', or the path of a file or folder."
    )


def _at(path: Path) -> FoundModel:
    path = path.absolute()
    if not path.exists():
        raise ServiceError(
            f"model {str(path)!r}: there is no such file or folder. A registered model is named without a slash, such as "
            "'digits:3'."
        )
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.name).lstrip("._-") or "model"
    return FoundModel(id=None, name=name[:255], version="1", path=path)


def _registered(workspace_dir: Path, reference: str) -> FoundModel:
    from paceline import models
    from paceline.models import registry

    record = models.resolve(workspace_dir, reference)
    known = record.run.get("environment") or {}
    spec = known.get("locked") or known.get("asked")
    return FoundModel(
        id=record.id,
        name=record.name,
        version=str(record.version),
        path=registry.files_dir(workspace_dir, record),
        framework=record.framework,
        environment=EnvironmentSpec.from_json(spec) if spec else None,
        known_environment=dict(known),
        digests={file.name: file.sha256 for file in record.files},
    )
