"""`python -m paceline.services.prepare SERVICE_DIR REVISION`: build a revision's environment, as a run's is built.

A process of its own, for a build takes minutes and may have to be cut short while another revision is being served. Says on
standard output what it does; leaves `prepared.json` in the revision's folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.job.environment import EnvironmentSpec
from paceline.job.plan import NodeSetup
from paceline.runs.driver_log import say
from paceline.services import store
from paceline.services.folder import ServiceFolder
from paceline.system.files import write_json

if TYPE_CHECKING:
    from paceline.environments.built import Built


def main(argv: list[str]) -> int:
    folder, number = ServiceFolder(Path(argv[0])), int(argv[1])
    result: dict[str, Any]
    try:
        environment = EnvironmentSpec.from_json(dict(store.revision(folder, number).environment))
        built, setup = prepare(folder.workspace_dir, environment, say)
        result = {"setup": setup.to_json(), "built": built.to_json()}
    except (PacelineError, OSError) as error:
        result = {"failure": str(error)}
    write_json(folder.revision(number).prepared, result)
    return 1 if "failure" in result else 0


def prepare(workspace_dir: Path, environment: EnvironmentSpec, say: Callable[[str], None]) -> tuple[Built, NodeSetup]:
    """The environment, built where it is not there yet, and what a process needs to run in it. say: is told what happens.

    Raises:
        EnvironmentSpecError, EnvironmentBuildError: it can't be built.
    """
    from paceline.environments.store import EnvironmentStore

    started = time.monotonic()
    environments = EnvironmentStore(workspace_dir / "environments")
    built = environments.ensure(environment, environment.python or sys.executable, say)
    say(f"environment {built.key} is ready ({time.monotonic() - started:.1f} s)")
    # Behind a layer's programs those of its base, as for a run.
    folders = [str(built.bin_dir), *([os.path.dirname(built.base_python)] if built.is_layered else [])]
    return built, NodeSetup(
        python=str(built.python),
        variables=dict(built.variables),
        bin_dir=os.pathsep.join(dict.fromkeys(folders)),
        is_isolated=not built.is_layered,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
