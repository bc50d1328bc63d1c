"""The image of the workers' containers: there, and with what they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import paceline
from paceline.containers import HostFiles, Layer, Mount, check_image, ensure_layer, find_engine, key_of, probe
from paceline.errors import EngineError, EnvironmentBuildError, LauncherError
from paceline.job.environment import EnvironmentSpec
from paceline.node.output import say
from paceline.remote.staging.stage_in import Arrived
from paceline.runs.folder import RunFolder
from paceline.system.files import write_json


def prepare_container(
    environment: EnvironmentSpec, folder: RunFolder, mounts: Iterable[Mount], came: Arrived
) -> dict[str, Any]:
    """The part of `NodeSetup` that says how to start a container.

    mounts: what the workers need beside the run's folder. came: what came to this machine with the run.

    Raises:
        EnvironmentBuildError: no engine answers, the image can't be had, or it has no Python that will do.
    """
    assert environment.docker_image is not None
    try:
        engine = find_engine()
        image = check_image(engine, environment.docker_image, say)
        look = partial(probe, engine, image, run_id=folder.run_id, name=environment.docker_image, say=say)
        found = look(python=environment.python or "python3")
        layer = None
        if environment.needs_build:
            # Built in a container of the image, for its Python and its C library decide which wheels fit.
            layer = ensure_layer(
                folder.path.parent.parent / "environments" / "images",
                engine,
                image,
                run_id=folder.run_id,
                python=found.python,
                requirements=_lines(came.environment(environment)),
                is_exact=bool(environment.locked_pip),
                say=say,
            )
            # Read-only: several runs use the same layer.
            mount = Mount(path=Path(layer.prefix), read_only=True)
            mounts = [*mounts, mount]
            kept = _kept(environment, layer)
            write_json(folder.environment, came.as_submitted(kept))
            # With what it has installed: an mpirun, say.
            found = look(python=layer.python, mounts=[mount])
    except (LauncherError, EngineError) as error:
        raise EnvironmentBuildError(str(error)) from error
    library = Path(paceline.__file__).parent.parent  # as the workers have it: what its links lead to is found here
    say(f"{engine}: {environment.docker_image} has Python {'.'.join(map(str, found.version))}.")
    return {
        "python": layer.python if layer else found.python,
        "bin_dir": layer.bin_dir if layer else None,
        "variables": {"VIRTUAL_ENV": layer.prefix} if layer else {},
        "is_isolated": True,
        "container": {
            "engine": engine.to_json(),
            "image": image,
            "mounts": [[str(mount.path), mount.read_only] for mount in mounts],
            "host": HostFiles.here(engine, library).to_json(),
        },
        "open_mpi": (found.mpirun, found.mpirun_version) if found.mpirun else None,
    }


def _kept(environment: EnvironmentSpec, layer: Layer) -> dict[str, Any]:
    """The environment's record that is kept with the run, in the form of other environments' records."""
    return {
        "key": key_of(layer),
        "prefix": layer.prefix,
        "python": layer.python,
        "is_layered": True,
        "pip": list(layer.packages),
        "conda": [],
        "environment": environment.to_json(),
        "locked": replace(environment, locked_pip=layer.packages).to_json(),
    }


def _lines(environment: EnvironmentSpec) -> Sequence[str]:
    if environment.locked_pip:
        return environment.locked_pip
    return (*environment.pip_packages, *(environment.pip_requirements or "").splitlines())
