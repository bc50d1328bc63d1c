"""Check the jobs of schedules, and submit their runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.children.child import is_cut_off
from paceline.errors import ScheduleError
from paceline.job.template import Templates
from paceline.job_files import job_file, pipeline_file, sweep_file
from paceline.job_files.description import Asked, asked
from paceline.runs import read, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import new_run_id
from paceline.schedules.occurrences import Occurrence
from paceline.schedules.schedule import TAG, Schedule
from paceline.submit import submit_again
from paceline.submit.values import places_of


def check_job(schedule: Schedule, workspace_dir: Path) -> None:
    """Raise ScheduleError if the job is invalid, or needs secrets or notification URLs from the shell.

    A timer does not have the variables of the shell.
    """
    wanted = _wanted(schedule, workspace_dir, "now")
    wanted.check(workspace_dir)
    for name, place in [item for job in wanted.jobs for item in places_of(job).items()]:
        if place.startswith("env:") and name not in wanted.values:
            raise ScheduleError(
                f"{place} is a variable of your shell, which a timer does not have. Name a file or a keyring in the job file, as "
                "`env_file: .env`, `secrets: {NAME: keyring:service/user}` or `notify: [slack:keyring:service/user]`."
            )


def start(workspace_dir: Path) -> Callable[[Schedule, Occurrence, Callable[[str], None]], None]:
    """Return a function that submits a run of a schedule.

    Its arguments: the schedule, the time or event that starts the run, and a callback that gets the run's id at the beginning.
    """

    def submit(schedule: Schedule, occurrence: Occurrence, keep: Callable[[str], None]) -> None:
        what = occurrence.what or "by hand"
        tags: Mapping[str, str] = {TAG: schedule.name, "trigger": what}
        if schedule.search_path:
            # cron gives its programs a short PATH, so use the user's PATH.
            os.environ["PATH"] = schedule.search_path
        if occurrence.run_id is not None:
            folder = RunFolder(workspace_dir / "runs" / occurrence.run_id)
            if folder.path.exists():
                # An earlier submission of this run was killed. Unless the run has begun, complete the submission now.
                # Reading the record of a sweep or a pipeline starts its controller.
                record = read.record(folder)
                tags_and_properties.set_tags(folder.notes, tags)
                wanted = _wanted(schedule, workspace_dir, what)
                if type(wanted) is Asked and record.job is not None and is_cut_off(folder):
                    keep(occurrence.run_id)
                    submit_again(folder, wanted.values)
                return
        wanted = _wanted(schedule, workspace_dir, what)
        run_id = new_run_id(wanted.experiment)
        keep(run_id)
        wanted.tags.update(tags)
        wanted.submit(workspace_dir, run_id=run_id)

    return submit


def _wanted(schedule: Schedule, workspace_dir: Path, what: str) -> Asked | pipeline_file.PipelineFile:
    path, text, offered = Path(schedule.file or ""), None, {"trigger": what}
    if schedule.template is not None:
        template = Templates(workspace_dir).find(schedule.template)
        path, text = template.path, template.text
    if "steps" in {key.value for key, _ in job_file.composed(path, text).value}:
        if schedule.arguments is not None:
            raise ScheduleError(f"{str(path)!r} is a pipeline, which takes parameters (NAME=VALUE), but no arguments.")
        return pipeline_file.read(path, schedule.parameters, text=text, offered=offered)
    found = job_file.read(
        path, ("sweep",), text=text, parameters=schedule.parameters, offered=offered, arguments=schedule.arguments
    )
    is_sweep, section = "sweep" in found, found.pop("sweep", None)
    wanted = asked(found, workspace_dir)
    return sweep_file.AskedSweep.of(wanted, section, path) if is_sweep else wanted
