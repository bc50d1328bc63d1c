"""One Job for many runs of one pod each, such as trials: each index of the Job is a run.

    engine.json     "index": the run's number in the Job, "count": the number of runs, "dropped": whether the Secret has
                    this run's `dropped.json`
    dropped.json    the cancel request of a run whose pod could not be reached; {} for a run that can't begin

The API can't end one index of a Job. So a Secret that each pod mounts as a file has the cancel requests. A pod reads the file
at its start, and then every second. The kubelet updates the file within about a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.remote.staging.stage_out_local import has_all
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import engine, note_engine
from paceline.system import locks
from paceline.system.files import read_json, write_json
from paceline.targets.kubernetes import manifests
from paceline.targets.kubernetes.ticket import DROPPED, Noted, message

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster
    from paceline.targets.kubernetes.settings import KubernetesSettings

_LOCK = "dropped.lock"


def is_many(noted: Noted) -> bool:
    """Return whether a run's Job has more than one run."""
    return bool(noted.get("count"))


def runs_of(folder: RunFolder, noted: Noted) -> list[RunFolder]:
    """Return the folders of all runs of a run's Job."""
    parent, _, number = folder.run_id.rpartition("_")
    first = int(number) - int(noted["index"])
    numbers = range(first, first + int(noted["count"]))
    return [RunFolder(folder.path.with_name(f"{parent}_{one}")) for one in numbers]


def submitted(folder: RunFolder, noted: Noted) -> Noted | None:
    """Return a run's `engine.json` that says that `folder`'s Job was submitted, or None.

    The Job has several runs. A program that was killed may have recorded the submission in only some of them.
    """
    found = (engine(other) for other in runs_of(folder, noted))
    return next((one for one in found if one.get("submitted") and one.get("job_id") == noted["job_id"]), None)


def dropped(folder: RunFolder) -> Noted | None:
    """Return the content of a run's `dropped.json`; None without this file."""
    found: Noted | None = read_json(folder.path / DROPPED)
    return found


def drop(cluster: Cluster, settings: KubernetesSettings, folder: RunFolder, noted: Noted, request: Noted) -> None:
    """Request that a run's pod end, or not begin the run.

    request: The content of the run's cancel request; {} if the run can't begin, although no user canceled it.

    Raises:
        EngineError, TargetError: The cluster does not answer, or refuses the Secret with the request.
    """
    write_json(folder.path / DROPPED, request)
    if not noted.get("uid"):
        return  # the submission has not recorded its Job yet
    runs = runs_of(folder, noted)
    names = manifests.ObjectNames(
        job=str(noted["job_id"]), run_id=runs[0].run_id, workspace=str(noted["workspace"]), secrets={}, count=len(runs)
    )
    with locks.locked(folder.path.parent.parent / _LOCK):
        requests = {run.run_id: found for run in runs if (found := dropped(run)) is not None}
        body = manifests.start_manifest(
            settings, names, str(noted["uid"]), {DROPPED: message(requests)}, names.dropped, immutable=False
        )
        # Delete the Secret and create a new one, because the user's Role need not allow changing Secrets.
        cluster.delete("secrets", names.dropped)
        cluster.create("secrets", body)
    note_engine(folder, "kubernetes", dropped=True)


def is_job_needed(folder: RunFolder, noted: Noted) -> bool:
    """Return whether the Job's other runs are live or have uncopied files."""
    # Check the last runs first, because they probably end last. `any` stops at the first run that is not over.
    others = (run for run in reversed(runs_of(folder, noted)) if run.run_id != folder.run_id and run.path.exists())
    return any(not (engine(run).get("gone") or has_all(run)) for run in others)
