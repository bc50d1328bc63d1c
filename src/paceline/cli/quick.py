"""`paceline run` and `submit` of what is plainly right: without the parser, and with a supervisor that is loaded meanwhile.

    words ── read ── run id ──┬── what a submission imports ── check, copy ──┐
                              └── supervisor: interpreter, imports ──────────┴── begins

A run on this machine waits for two interpreters that import about as much. Nothing that the second needs depends on the first,
but for the run's folder. So the supervisor is started as soon as that is known, in a workspace that is there. If nothing comes of
the submission, the supervisor ends with this program.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

from paceline.cli.options import read
from paceline.cli.run_options import RUN, experiment_name, words
from paceline.errors import WorkspaceError
from paceline.runs.ids import check_experiment_name, new_run_id
from paceline.system.detached_process import library_dir
from paceline.targets import supervisors
from paceline.workspace_dir import configured

# Not typing's, as in `paceline.cli.options`.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any


def reading(verb: str, given_words: Sequence[str]) -> Callable[[], int] | None:
    """Return the rest of `run` or `submit` with these words, to be called; None where the parser has to read them.

    Raises:
        JobError: they name nothing that could run.
    """
    given = read(RUN, given_words)
    if given is None:
        return None
    # What is loaded stays until the end: the collector would look at all of it again and again.
    gc.disable()
    file, description = words(given)
    # A job file may name another target than this machine, and is read only later.
    run_id = None if file is not None or given["dry_run"] else _load_supervisor(description)

    def go_on() -> int:
        from paceline.cli.run import begin

        gc.freeze()
        gc.enable()
        return begin(file, description, given, follow=verb == "run", run_id=run_id)

    return go_on


def _load_supervisor(description: dict[str, Any]) -> str | None:
    """Start to load the supervisor of the run that is to come; the run's id. None, and nothing is started, where it runs
    elsewhere, or in a workspace that is not there yet. What is wrong is said when the run is submitted.
    """
    if description.get("compute_target", "local") != "local":
        return None
    # The same errors come again, and are said, when the run is submitted.
    with contextlib.suppress(WorkspaceError, OSError):
        experiment = check_experiment_name(
            description.get("experiment") or experiment_name(description["source_directory"])
        )
        workspace_dir = Path(os.path.abspath(configured().expanduser()))
        library = library_dir(workspace_dir, create=False)
        # In a workspace that is not there yet nothing may be made before the call is known to be right.
        if (library / "paceline").exists():
            run_id = new_run_id(experiment)
            run_dir = workspace_dir / "runs" / run_id
            supervisors.load(run_dir, library, sys.executable, supervisors.FOR_THIS_MACHINE)
            return run_id
    return None
