"""run, submit: load a supervisor while this process imports what a submission needs.

    words ── run id ──┬── what a submission imports ── check, copy ──┐
                      └── supervisor: interpreter, imports ──────────┴── begins

A run on this machine must wait until two programs have imported their modules: this program and the supervisor. The
supervisor needs only the run's folder. So it starts as soon as the run's id is known, if the workspace exists. If the
submission fails, the supervisor ends when this program ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any

from paceline.cli.options import Given, takes
from paceline.cli.run_options import RUN, words
from paceline.errors import WorkspaceError
from paceline.runs.ids import check_experiment_name, experiment_name, new_run_id
from paceline.system.detached_process import library_dir
from paceline.targets import supervisors
from paceline.workspace_dir import configured


@takes(*RUN)
def run(**given: Any) -> int:
    """Submit a script and follow it to its end.

    Exits with the script's exit code. Ctrl-C asks whether to detach or to cancel; a second Ctrl-C cancels.
    """
    return _begin(given, follow=True)


@takes(*RUN)
def submit(**given: Any) -> int:
    """Submit a script and return at once with the run's id."""
    return _begin(given, follow=False)


def _begin(given: Given, *, follow: bool) -> int:
    # Switch garbage collection off during the submission: collections would scan all imported modules and free nothing.
    gc.disable()
    file, description = words(given)
    # A job file may name another target, so start loading the supervisor early only for a job on this machine.
    run_id = None if file is not None or given["dry_run"] else load_supervisor(description)
    from paceline.cli.run import begin

    gc.freeze()
    gc.enable()
    return begin(file, description, given, follow=follow, run_id=run_id)


def load_supervisor(description: dict[str, Any]) -> str | None:
    """Start the supervisor process of a future run. Return the run's id.

    Return None without starting anything for a remote run, or if the workspace does not exist yet.
    """
    if description.get("compute_target", "local") != "local":
        return None
    # Ignore errors of the workspace or of the experiment's name here: the submission checks both again, and reports the errors.
    with contextlib.suppress(WorkspaceError, OSError):
        experiment = check_experiment_name(
            description.get("experiment") or experiment_name(description["source_directory"])
        )
        workspace_dir = Path(os.path.abspath(configured().expanduser()))
        library = library_dir(workspace_dir, create=False)
        # A workspace without a copy of Paceline is new. Create nothing in it yet: the submission may be refused.
        if (library / "paceline").exists():
            run_id = new_run_id(experiment)
            supervisors.load(workspace_dir / "runs" / run_id, library, sys.executable, supervisors.FOR_THIS_MACHINE)
            return run_id
    return None
