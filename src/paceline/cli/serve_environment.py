"""The environment in which `paceline serve` loads a model: as `service deploy` does, that of the run which made it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cli import service_options
from paceline.cli.common import warn
from paceline.errors import ServingError
from paceline.job.environment import EnvironmentSpec
from paceline.launchers.environment import of_interpreter
from paceline.services.asked import check_environment
from paceline.serving.config import ServerConfig
from paceline.system.library import library_dir
from paceline.workspace import Workspace


@contextmanager
def in_environment(
    config: ServerConfig, given: Mapping[str, Any], own: EnvironmentSpec | None
) -> Iterator[ServerConfig]:
    """The configuration with the interpreter and the variables of its environment, which `env prune` spares meanwhile.

    given: the options' values. own: the environment of the run that made the first model. The lock that spares the
    environment is handed on to a program that takes this process's place.

    Raises:
        UserError: the environment is unknown, can't be built, or its interpreter is not there.
    """
    # Where the service's options look for requirements and the like.
    asked = service_options.environment({**given, "source": config.source_dir})
    spec = asked or own or EnvironmentSpec()
    variables = {**spec.environment_variables, **service_options.variables(given["env"])}
    check_environment(spec)
    if not spec.needs_build:
        yield replace(config, python=_interpreter(spec.python), environment=variables)
        return
    from paceline.environments.store import EnvironmentStore
    from paceline.services.prepare import prepare

    workspace_dir = Workspace.from_config().path
    built, setup = prepare(workspace_dir, spec, warn)
    with EnvironmentStore(workspace_dir / "environments").hold(built) as lock:
        os.set_inheritable(lock, True)
        shell = of_interpreter(setup, variables, library_dir(workspace_dir), os.environ)
        yield replace(config, python=setup.python, environment={**shell, **variables})


def _interpreter(python: str | None) -> str | None:
    """The interpreter; None for Paceline's own."""
    if python is None or python == sys.executable:
        return None
    if not Path(python).exists():
        raise ServingError(
            f"the model was made by the interpreter {python!r}, which is not there. Name another one with --python, or the "
            "packages that it needs with --pip."
        )
    return python
