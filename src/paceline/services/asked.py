"""What somebody asks a service to be: checked values, before anything is written or started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paceline.errors import ServiceError
from paceline.job.environment import EnvironmentSpec
from paceline.services.record import ServiceSettings

#: As many as anybody has cores for.
_MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class RevisionSpec:
    """A revision as it was asked for.

    models: references ("digits:3"), registered models, or paths of files and folders.
    entry_script: relative to source_directory; None where the model is served as it is.
    environment: None for the first model's own.
    """

    models: tuple[Any, ...] = ()
    entry_script: str | None = None
    source_directory: str | None = None
    environment: EnvironmentSpec | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: ServiceSettings = field(default_factory=ServiceSettings)


def asked(
    models: Any,
    *,
    entry_script: str | os.PathLike[str] | None = None,
    source_directory: str | os.PathLike[str] | None = None,
    environment: EnvironmentSpec | None = None,
    environment_variables: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RevisionSpec:
    """The revision that these values describe, with the script found and its folder absolute.

    Raises:
        ServiceError: no model, a script that is not there, or a value that is none.
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


def changed(before: RevisionSpec, *, settings: Mapping[str, Any] | None = None, **changes: Any) -> RevisionSpec:
    """What was asked for with some of it changed. ServiceSettings that are not named stay."""
    both = {**before.settings.given(), **(settings or {})}
    return replace(before, settings=as_settings(both), **changes)


def as_models(models: Any) -> tuple[Any, ...]:
    """One model or several, as a tuple.

    Raises:
        ServiceError: there is none.
    """
    given = tuple(models) if isinstance(models, Sequence) and not isinstance(models, str) else (models,)
    given = tuple(each for each in given if each is not None)
    if not given:
        raise ServiceError("a service needs a model. Name one, such as 'digits:3', or the path of a file.")
    return given


def as_settings(values: Mapping[str, Any]) -> ServiceSettings:
    """The settings with these values; None for the server's own.

    Raises:
        ServiceError: an unknown name. What the server would refuse is refused when the revision is written.
    """
    known = [each.name for each in fields(ServiceSettings)]
    if unknown := sorted(set(values) - set(known)):
        raise ServiceError(f"there is no setting {unknown[0]!r} of a service. There are {', '.join(known)}.")
    return ServiceSettings(**values)


def as_variables(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Environment variables, as text.

    Raises:
        ServiceError: a name or value that no environment can carry.
    """
    texts = {str(name): str(value) for name, value in (values or {}).items()}
    for name, value in texts.items():
        if not name or "=" in name or "\0" in name + value:
            raise ServiceError(
                f"environment variable {name!r}: a name has a character or more, no '=', and no NUL, which no value has either."
            )
    return texts


def check_workers(workers: Any) -> int:
    """The same number.

    Raises:
        ServiceError: it is no whole number of 1 or more.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= _MOST_WORKERS:
        raise ServiceError(
            f"workers={workers!r} is no whole number of 1 to {_MOST_WORKERS}. "
            "To have none for a while, `paceline service stop` the service."
        )
    return workers


def check_environment(environment: Any) -> None:
    if not isinstance(environment, EnvironmentSpec):
        raise ServiceError(f"environment={environment!r} is no Environment. Make one, or get a registered one.")
    if environment.docker_image is not None:
        raise ServiceError(
            f"the environment has docker_image={environment.docker_image!r}, and a service's processes do not run in containers. "
            "Write a folder with a Dockerfile of its own instead: paceline package MODEL --entry SCRIPT -o DIR."
        )


def script_of(entry: Any, source: Any) -> tuple[str | None, str | None]:
    """(script relative to its folder, that folder), or two times None.

    Raises:
        ServiceError: there is no such script, or it is not in that folder.
    """
    if entry is None:
        if source is not None:
            raise ServiceError(
                f"source_directory={os.fspath(source)!r} without entry_script: nothing of it would be run. Name the script too."
            )
        return None, None
    script = Path(os.fspath(entry)).expanduser()
    if script.suffix != ".py":
        raise ServiceError(f"entry_script={str(script)!r} is no Python file. Name a .py file with init() and run().")
    # Beside source_directory first, as for runs; without one, the script's own folder is its source.
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
