"""Write the folder of a packaged service.

<folder>/Dockerfile, .dockerignore, README.md
<folder>/requirements.txt, constraints.txt   exact package versions of the model's run and of the server
<folder>/service.json                        the server's configuration, with paths below the folder
<folder>/start.py                            the start command, also without a container
<folder>/library/paceline/                   the server; all of Paceline if the script imports azureml
<folder>/models/<n>/, hashes/<n>             the models' files, and their SHA-256
<folder>/source/                             the script's folder
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline import snapshot
from paceline.environments.sdk_packages import without_sdk_packages
from paceline.errors import ServiceError, ServingError
from paceline.job.environment import EnvironmentSpec
from paceline.services.package import versions
from paceline.services.revision_spec import FoundModel, RevisionSpec, check_workers, find_model
from paceline.serving.api import ServedModel, ServerConfig
from paceline.system.files import remove_tree, write_json
from paceline.system.names import is_one_line

#: The folder of the package `paceline`: this file is at services/package/ in it.
_LIBRARY = Path(__file__).resolve().parents[2]
#: Matches the name of an image, with its registry, tag and digest.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
#: Parts of Paceline that a server needs. A script that imports azureml needs all of Paceline.
_PARTS = ("__init__.py", "py.typed", "errors.py", "system", "serving")

DOCKERIGNORE = "README.md\nDockerfile\n.dockerignore\n**/__pycache__\n"


def package(
    workspace_dir: Path,
    spec: RevisionSpec,
    folder: Path,
    *,
    name: str | None = None,
    workers: int = 1,
    base: str | None = None,
    overwrite: bool = False,
    elsewhere: bool = False,
) -> Path:
    """Write the folder of a packaged service, completely or not at all.

    spec: Models, script, environment and settings.
    name: Name of the service; by default the first model's name.
    base: Base image; by default `python:<the run's version>-slim`.
    overwrite: Replace the folder of an earlier package.
    elsewhere: Write the folder for a run whose node has Paceline and builds the environment.

    Raises:
        UserError: A model or script is missing, the environment can't be installed elsewhere, or the folder is in use.
    """
    check_workers(workers)
    if name is not None and not is_one_line(name):
        raise ServiceError(f"name={name!r} has a line break or a control character. Write it without.")
    # Refuse other characters: a backslash at the end would join this line of the Dockerfile with the next line.
    if base is not None and not _IMAGE.fullmatch(base):
        raise ServiceError(f"base={base!r} must be the name of an image, such as 'python:3.12-slim'.")
    folder = folder.expanduser().absolute()
    _check_folder(folder, overwrite=overwrite)
    found_models = [find_model(workspace_dir, each) for each in spec.models]
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        beside.mkdir(parents=True)
        try:
            _fill(
                beside,
                workspace_dir,
                spec,
                found_models,
                # Don't copy the new package into itself: users often write it into the script's folder.
                leave_out=(beside, folder),
                name=name or found_models[0].name,
                workers=workers,
                base=base,
                elsewhere=elsewhere,
            )
            if overwrite:
                remove_tree(folder)
            os.rename(beside, folder)
        except BaseException:
            remove_tree(beside)
            raise
    except OSError as error:
        raise ServiceError(f"{str(folder)!r} can't be written: {error.strerror or error}.") from error
    return folder


def _check_folder(folder: Path, *, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not overwrite):
        raise ServiceError(f"{str(folder)!r} is there already. Name another folder, or say --overwrite.")
    if any(folder.iterdir()) and not (folder / "service.json").exists():
        raise ServiceError(f"{str(folder)!r} holds something else than a packaged service. Name another folder.")
    if not any(folder.iterdir()):
        folder.rmdir()


def _fill(
    folder: Path,
    workspace_dir: Path,
    spec: RevisionSpec,
    found_models: Sequence[FoundModel],
    *,
    leave_out: Sequence[Path],
    name: str,
    workers: int,
    base: str | None,
    elsewhere: bool,
) -> None:
    models = [_copy_model(folder, index, each) for index, each in enumerate(found_models)]
    source = None
    if spec.source_directory is not None:
        source = folder / "source"
        taken = snapshot.take(
            Path(spec.source_directory), workspace_dir / "snapshots", workspace_dir, leave_out=leave_out
        )
        shutil.copytree(taken.path, source, symlinks=True)
    try:
        config = ServerConfig(
            name=name,
            models=tuple(models),
            entry_script=spec.entry_script,
            source_dir=None if source is None else "source",
            environment=dict(spec.variables),
            workers=workers,
            **spec.settings,
        )
    except ServingError as error:
        raise ServiceError(str(error)) from error
    values = {
        key: value
        for key, value in config.to_json().items()
        if key not in ("host", "port", "listen_fd", "heartbeat_fd", "python")
    }
    write_json(folder / "service.json", values)
    shutil.copy(Path(__file__).with_name("start.py"), folder / "start.py")
    if elsewhere:
        return
    _copy_library(
        folder / "library" / "paceline", _PARTS if not versions.uses_azureml(source) else os.listdir(_LIBRARY)
    )
    known = found_models[0].known_environment
    environment = spec.environment or found_models[0].environment
    if environment is not None:
        environment, _ = without_sdk_packages(environment)
    packages = known.get("packages") or () if spec.environment is None else ()
    own = versions.of_environment(environment, packages, found_models[0].framework, source)
    both = versions.merged(own, versions.server_versions())
    _check_lines(both)
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in both.requirements))
    (folder / "constraints.txt").write_text("".join(f"{line}\n" for line in both.constraints))
    image = base or f"python:{_python_version(known, environment)}-slim"
    (folder / "Dockerfile").write_text(dockerfile(image))
    (folder / ".dockerignore").write_text(DOCKERIGNORE)
    (folder / "README.md").write_text(readme(name, [each.id or each.name for each in found_models], image))


def _check_lines(both: versions.PackageVersions) -> None:
    for line in (*both.requirements, *both.constraints):
        if not is_one_line(line):
            raise ServiceError(
                f"the model's run names the package {line!r}, which is more than one line. Name its packages: "
                "--requirements FILE or --pip PACKAGE."
            )


def _copy_model(folder: Path, index: int, model: FoundModel) -> ServedModel:
    place = folder / "models" / str(index)
    if model.id is None:
        model.copy_into(place)
    else:
        # Copy the files and make the copies writable: the registry's own files are read-only, and versions share them.
        shutil.copytree(model.path, place, copy_function=_copy_writable)
    hashes = None
    if model.digests:
        hashes = folder / "hashes" / str(index)
        hashes.parent.mkdir(exist_ok=True)
        hashes.write_text(model.hash_lines())
    return ServedModel(
        name=model.name,
        version=model.version,
        path=f"models/{index}",
        hashes=None if hashes is None else f"hashes/{index}",
        framework=model.framework,
    )


def _copy_writable(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    return target


def _copy_library(target: Path, parts: Iterable[str]) -> None:
    target.mkdir(parents=True)
    for part in parts:
        if part == "__pycache__":
            continue
        source = _LIBRARY / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / part)


def _python_version(known: Mapping[str, object], environment: EnvironmentSpec | None) -> str:
    version = (environment.python_version if environment is not None else None) or known.get("python_version")
    parts = str(version).split(".") if version else [str(number) for number in sys.version_info[:2]]
    return ".".join(parts[:2])


def dockerfile(base: str) -> str:
    """Return the text of the Dockerfile, which starts from the image `base`."""
    return f"""\
FROM {base}
WORKDIR /service
COPY requirements.txt constraints.txt ./
RUN python -m pip install --no-cache-dir -r requirements.txt -c constraints.txt
COPY --chown=65534:65534 . .
# Nothing is written below /service.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65534:65534
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s CMD ["python", "start.py", "--check", "--port", "8000"]
CMD ["python", "start.py", "--host", "0.0.0.0", "--port", "8000"]
"""


def readme(name: str, models: Sequence[str], base: str) -> str:
    """Return the README of a package."""
    return f"""\
# {name}

Serves {", ".join(models)}. Written by `paceline package`; neither Paceline nor the workspace is needed.

In a container (podman or docker), on {base}:

```sh
podman build -t {name.lower()} .
podman run --rm -p 8000:8000 -e PACELINE_KEY=a-long-random-key {name.lower()}
curl -H 'Authorization: Bearer a-long-random-key' -d '{{"data": []}}' http://localhost:8000/score
```

Without one, in an environment of its own:

```sh
python -m venv .venv
.venv/bin/pip install -r requirements.txt -c constraints.txt
.venv/bin/python start.py --port 8000
```

`start.py --help` has the options. `constraints.txt` has the exact versions of the run that made the model.
"""
