"""Query a run's status in the cluster: its changes, and why it waits or ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import EngineError, PacelineError
from paceline.runs import states
from paceline.runs.failure import NODES_GONE
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, UNREACHABLE, JobStatus
from paceline.runs.store import replace_state, stored
from paceline.targets.kubernetes import many, readers, reasons, watch
from paceline.targets.kubernetes.manifests import port_of
from paceline.targets.kubernetes.objects import BatchJob, ClusterEvent, Pod, condition_of, index_of
from paceline.targets.kubernetes.ticket import Noted

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from paceline.targets.kubernetes.api import Cluster
Note = Callable[..., None]
_WAITING = (states.NOT_STARTED, states.QUEUED)
#: Prefix of the reason that the supervisor records for a preempted attempt.
_PREEMPTED = "preempted: "
#: Seconds for which the reason why a run waits is cached: `_NEW_S` in the first `_FRESH_S` s after submission, then `_FRESH_S`.
_NEW_S, _FRESH_S = 3.0, 60.0


@dataclass(frozen=True, kw_only=True)
class _Reason:
    """The cluster's explanation why a Job waits: the Job's events, or Kueue's message.

    Attributes:
        asked: Monotonic time at which this process asked the cluster for the explanation.
        versions: Resource versions of the Job and its pods at that time.
    """

    asked: float
    versions: tuple[str, ...]
    events: Sequence[ClusterEvent] = ()
    queue: str = ""


#: Name of a Job -> the reason why the Job waits, as this process last queried it.
_reasons: dict[str, _Reason] = {}


def look(cluster: Cluster, folder: RunFolder, noted: Noted, note: Note) -> JobStatus:
    """Update the local copy of the run's folder, and return the run's status.

    noted: Content of the run's `engine.json`. note: Adds values to that file.

    Raises:
        EngineError: The cluster does not answer.
        TargetError: The cluster refuses the request.
    """
    if (mirror := readers.kept_mirror(folder)) is not None:
        try:
            mirror.pull(folder)
        except (OSError, EOFError):
            readers.keep_mirror(folder, None)
        else:
            if stored(folder).status not in _WAITING or readers.has_all(folder):
                return JobStatus(state=RUNNING)
    job, all_pods = watch.job_and_pods(cluster, str(noted["workspace"]), str(noted["job_id"]))
    if job is None:
        said = f"Its Job {noted['job_id']} does not exist any more: somebody deleted it, or its time to live was over."
        return JobStatus(state=GONE, message=said)
    index, pods = int(noted.get("index") or 0), _own(all_pods, noted)
    _note_ends(noted, pods, note)
    if (digest := reasons.last_digest(pods)) is not None and noted.get("image_digest") != digest:
        note(image_digest=digest)
    pod = reasons.running_pod(pods, index)
    if pod is not None and not readers.has_all(folder):
        _update(cluster, folder, pod, noted)
    ended, away = reasons.ended_pod(pods, index), None
    if ended is not None and pod is None and not readers.has_all(folder):
        try:
            readers.read_log(cluster, folder, ended)
        except PacelineError as error:
            away = error
    if readers.has_all(folder):
        _reasons.pop(str(noted["job_id"]), None)
        return JobStatus(state=RUNNING)
    if (request := many.dropped(folder)) is not None:
        if pod is None and away is None:
            return JobStatus(state=GONE, cause="cancel", by=request.get("by"))
        if stored(folder).status in _WAITING:
            cancel_in_pod(cluster, folder, noted, request)  # the pod began before the cancel request was in its Secret
    return _status(cluster, folder, job, all_pods, away, noted)


def _own(pods: Sequence[Pod], noted: Noted) -> Sequence[Pod]:
    """Return only the run's own pods from its Job's `pods`."""
    return [pod for pod in pods if index_of(pod) == noted["index"]] if many.is_many(noted) else pods


def _note_ends(noted: Noted, pods: Sequence[Pod], note: Note) -> None:
    ends = dict(noted.get("ends") or {})
    for pod in pods:
        uid, end = pod["metadata"]["uid"], reasons.ended(pod)
        if end is not None and uid not in ends:
            ends[uid] = [end.cause, end.message]
    if ends != (noted.get("ends") or {}):
        note(ends=ends)


def explain(folder: RunFolder, noted: Noted) -> None:
    """Add to an ended run's record how its pods ended, as Kubernetes reports."""
    record, ends = stored(folder), list((noted.get("ends") or {}).values())
    if not record.is_terminal or not ends:
        return
    explained = replace(record, attempts=tuple(_explained(record.attempts, [said for _, said in ends])))
    cause, said = ends[-1]
    if (failure := record.failure) and failure.cause in NODES_GONE and said not in failure.message:
        failure = replace(failure, cause=cause, message=f"{said} {failure.message}")
        explained = replace(explained, failure=failure)
    if explained != record:
        replace_state(folder, explained)


def _explained(attempts: Sequence[Attempt], ends: list[str]) -> Iterator[Attempt]:
    """Yield a run's attempts. Add to each preempted attempt how its pod ended."""
    names: tuple[str, ...] = ()
    for attempt in attempts:
        if (attempt.reason or "").startswith(_PREEMPTED):
            # A pod's name is its hostname, which is the node's name in Paceline, followed by a random suffix.
            said = next((one for one in ends if one.startswith(tuple(f"Pod {name}-" for name in names))), None)
            if said is not None:
                ends.remove(said)
                attempt = replace(attempt, reason=f"{_PREEMPTED}{said.rstrip('.')}")  # noqa: PLW2901
        names = attempt.nodes
        yield attempt


def _status(
    cluster: Cluster,
    folder: RunFolder,
    job: BatchJob,
    all_pods: Sequence[Pod],
    away: PacelineError | None,
    noted: Noted,
) -> JobStatus:
    record, index, pods = stored(folder), int(noted.get("index") or 0), _own(all_pods, noted)
    conditions = job.get("status", {}).get("conditions", [])
    ended, is_one_of_many = reasons.ended_pod(pods, index), many.is_many(noted)
    end = reasons.ended(ended) if ended is not None else None
    if end is not None and end.cause == "engine":
        return JobStatus(state=GONE, cause=end.cause, message=end.message)
    if (end := reasons.hopeless(pods)) is not None:
        return JobStatus(state=GONE, cause=end.cause, message=end.message)
    if (failed := condition_of(conditions, "Failed")) is not None:
        why = reasons.first_sentence(failed.get("message", ""))
        return JobStatus(state=GONE, message=f"Its Job failed: {failed.get('reason')}: {why}.")
    if reasons.is_complete(job, index, is_one_of_many=is_one_of_many):
        # After code 404 the log is lost. Other errors may be temporary, such as code 401 from a kubelet that is shutting down.
        if isinstance(away, EngineError) or getattr(away, "code", 404) != 404:
            return JobStatus(state=UNREACHABLE, message=f"the run has ended, and its result is not here yet: {away}")
        return JobStatus(
            state=GONE, message="The run ended, but its pod's log, which had its result, can't be read any more."
        )
    if reasons.running_pod(pods, index) is not None and record.status not in _WAITING:
        return JobStatus(state=RUNNING)
    fresh_s = _NEW_S if time.time() - float(noted["submitted"]) < _FRESH_S else _FRESH_S
    reason = _reason(cluster, job, all_pods, fresh_s)
    text = reasons.waits_for(job, pods, reason.events, reason.queue, is_one_of_many=is_one_of_many)
    return JobStatus(state=QUEUED, message=text)


def _reason(cluster: Cluster, job: BatchJob, pods: Sequence[Pod], fresh_s: float) -> _Reason:
    """Return why a Job waits. An unchanged Job's cached answer is valid for `fresh_s`."""
    versions = tuple(sorted(one["metadata"].get("resourceVersion", "") for one in (job, *pods)))
    name, now = job["metadata"]["name"], time.monotonic()
    found = _reasons.get(name)
    if found is None or found.versions != versions or now - found.asked > fresh_s:
        found = _Reason(asked=now, versions=versions)
        with contextlib.suppress(PacelineError):
            if job.get("spec", {}).get("suspend"):
                found = replace(found, queue=_queue_text(cluster, job))
            elif sum(not reasons.is_over(pod) for pod in pods) < job.get("spec", {}).get("parallelism", 1):
                selector = f"involvedObject.uid={job['metadata']['uid']}"
                events = cast("list[ClusterEvent]", cluster.items("events", fieldSelector=selector))
                events.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
                found = replace(found, events=events)
        _reasons[name] = found
    return found


def _queue_text(cluster: Cluster, job: BatchJob) -> str:
    name = job["metadata"]["name"]
    for item in cast("list[dict[str, Any]]", cluster.items("workloads")):
        if any(owner.get("uid") == job["metadata"]["uid"] for owner in item["metadata"].get("ownerReferences", [])):
            found = condition_of(item.get("status", {}).get("conditions", []), "QuotaReserved", "False")
            return reasons.first_sentence(found.get("message", "")) if found else f"Kueue has room for {name}"
    return "Kueue has not seen its Job yet"


def _update(cluster: Cluster, folder: RunFolder, pod: Pod, noted: Noted) -> None:
    try:
        if not noted.get("forwards"):
            readers.read_log(cluster, folder, pod)
            return
        mirror = readers.PodMirror(_connected(cluster, folder, pod))
    except (PacelineError, OSError):
        return  # the pod's first process does not listen yet, or the API can't be reached
    try:
        mirror.pull(folder)
        readers.keep_mirror(folder, mirror)
    except (OSError, EOFError):
        mirror.close()


def cancel_in_pod(cluster: Cluster, folder: RunFolder, noted: Noted, request: Noted) -> bool:
    """Send a cancel request to the run's pod. Return False if it is unreachable."""
    if not (noted.get("forwards") and noted.get("submitted")):
        return False
    try:
        connection = connected(cluster, folder, noted)
        if connection is not None:
            with connection:
                readers.request_cancel(connection, request)
        return connection is not None
    except (EngineError, OSError, EOFError):
        return False


def connected(cluster: Cluster, folder: RunFolder, noted: Noted) -> Connection | None:
    """Return a connection to the run's pod 0, or None if it isn't running."""
    _, pods = watch.job_and_pods(cluster, str(noted["workspace"]), str(noted["job_id"]))
    pod = reasons.running_pod(pods, int(noted.get("index") or 0))
    return None if pod is None else _connected(cluster, folder, pod)


def _connected(cluster: Cluster, folder: RunFolder, pod: Pod) -> Connection:
    try:
        key = folder.exec_key.read_text(encoding="ascii")
    except OSError as error:
        raise EngineError(
            f"run {folder.run_id}: its key, {folder.exec_key}, can't be read: {error.strerror}. Run this as the user that "
            "submitted the run."
        ) from error
    return readers.connect(cluster, pod["metadata"]["name"], port_of(folder.run_id), key)
