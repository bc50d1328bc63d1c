"""Build the environment of a revision in a process beside the supervisor.

`python -m paceline.services.prepare SERVICE_DIR REVISION` is a separate process, because a build takes minutes and may
have to be stopped while another revision is served. The process reports on standard output, and writes `prepared.json`
into the revision's folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline.environments.built import Built
from paceline.environments.store import EnvironmentStore
from paceline.errors import EnvironmentBuildError, PacelineError
from paceline.job.environment import EnvironmentSpec
from paceline.job.plan import NodeSetup
from paceline.runs.driver_log import say
from paceline.services import store
from paceline.services.folder import MARK, ServiceFolder
from paceline.services.record import Revision
from paceline.system import processes
from paceline.system.files import read_json, write_json


def main(argv: list[str]) -> int:
    folder, number = ServiceFolder(Path(argv[0])), int(argv[1])
    result: dict[str, object]
    try:
        built, setup = prepare(folder.workspace_dir, store.revision(folder, number).environment, say)
        result = {"setup": setup.to_json(), "built": built.to_json()}
    except (PacelineError, OSError) as error:
        result = {"failure": str(error)}
    write_json(folder.revision(number).prepared, result)
    return 1 if "failure" in result else 0


def prepare(workspace_dir: Path, environment: EnvironmentSpec, say: Callable[[str], None]) -> tuple[Built, NodeSetup]:
    """Build a Python environment unless it exists. Return it, and settings for its processes.

    say: Called with each line of progress.
    """
    started = time.monotonic()
    environments = EnvironmentStore(workspace_dir / "environments")
    built = environments.ensure(environment, environment.python or sys.executable, say)
    say(f"environment {built.key} is ready ({time.monotonic() - started:.1f} s)")
    # On PATH, put the programs of a layered environment before those of its base interpreter, as in a run.
    folders = [str(built.bin_dir), *([os.path.dirname(built.base_python)] if built.is_layered else [])]
    return built, NodeSetup(
        python=str(built.python),
        variables=dict(built.variables),
        bin_dir=os.pathsep.join(dict.fromkeys(folders)),
        is_isolated=not built.is_layered,
    )


class Preparation:
    """The build of a revision's environment. Call `poll` until `setup` or `failure` is set.

    is_here: Whether the service runs on this machine. A remote run builds the environment itself.
    held: Locks that keep `paceline env prune` from removing the environment.
    """

    def __init__(self, folder: ServiceFolder, revision: Revision, *, is_here: bool = True) -> None:
        self._folder, self._number = folder, revision.number
        self._process: subprocess.Popen[bytes] | None = None
        self.setup: NodeSetup | None = None
        self.failure: str | None = None
        self.held = contextlib.ExitStack()
        environment = revision.environment
        if not is_here:
            self.setup = NodeSetup(python="")  # a remote run builds the environment on its node
        elif environment.needs_build:
            self._start()
        elif environment.python is not None and not Path(environment.python).exists():
            self.failure = f"the interpreter {environment.python!r} of the environment is not there."
        else:
            self.setup = NodeSetup(python=environment.python or sys.executable)

    def poll(self) -> bool:
        """Return True once the build has ended, or if no build was needed."""
        if self._process is None or self._process.poll() is None:
            return self._process is None
        process, self._process = self._process, None
        outcome = read_json(self._folder.revision(self._number).prepared)
        if not isinstance(outcome, dict):
            self.failure = f"the build of the environment ended with exit code {process.returncode}."
        elif "failure" in outcome:
            self.failure = outcome["failure"]
        else:
            try:
                store = EnvironmentStore(self._folder.workspace_dir / "environments")
                self.held.enter_context(store.hold(Built.from_json(outcome["built"])))
                self.setup = NodeSetup.from_json(outcome["setup"])
            except EnvironmentBuildError:
                # Build again: the environment was pruned after the build and before this process locked it.
                self._start()
                return False
        return True

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def stop(self) -> None:
        """Kill the build, and release the lock on the environment."""
        if self._process is not None:
            # Kill the build's child processes first: they hold the environment's lock, and can't be found without their parent.
            processes.kill_descendants(self._process.pid)
            self._process.kill()
            self._process.wait()
            self._process = None
        self.held.close()

    def _start(self) -> None:
        self._folder.revision(self._number).prepared.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.services.prepare", str(self._folder.path), str(self._number)],
            # Drop the variable that marks supervisors: the end of a build would spare processes that have it.
            env={name: text for name, text in os.environ.items() if name != processes.SUPERVISOR_VARIABLE}
            | {MARK: str(self._folder.path)},
            stdin=subprocess.DEVNULL,
            preexec_fn=processes.ends_with_parent(),  # noqa: PLW1509 - no lock is taken between fork and exec
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
