"""The image of the workers' containers: there, and with what they need."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.containers import check_image, find_engine, probe
from paceline.environments.environment import Environment
from paceline.errors import EnvironmentBuildError, LauncherError
from paceline.node.output import say


def prepare_container(environment: Environment, run_id: str, mounts: Iterable[Path]) -> dict[str, Any]:
    """The part of `Prepared` that says how to start a container. mounts: what the workers need beside the run's folder.

    Raises:
        EnvironmentBuildError: no engine answers, the image can't be had, or it has no Python that will do.
    """
    assert environment.docker_image is not None
    try:
        engine = find_engine()
        image = check_image(engine, environment.docker_image, say)
        assert image is not None, "nobody asked to stop"
        found = probe(
            engine,
            image,
            run_id=run_id,
            python=environment.python or "python3",
            name=environment.docker_image,
            say=say,
        )
    except LauncherError as error:
        raise EnvironmentBuildError(str(error)) from error
    assert found is not None, "nobody asked to stop"
    say(f"{engine}: {environment.docker_image} has Python {'.'.join(map(str, found.version))}.")
    return {
        "python": found.python,
        "container": {
            "engine": engine.to_json(),
            "image": image,
            "mounts": sorted({str(path) for path in mounts}),
        },
        "open_mpi": (found.mpirun, found.mpirun_version) if found.mpirun else None,
    }
