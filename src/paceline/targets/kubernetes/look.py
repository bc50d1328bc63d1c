"""Query a run's status in the cluster: its changes, and why it waits or ended.

Watches keep local copies of a workspace's Jobs and pods current.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import EngineError, PacelineError, TargetError
from paceline.remote.staging.stage_out_local import has_all
from paceline.runs import states, store
from paceline.runs.failure import NODES_GONE
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, UNREACHABLE, JobStatus, note_engine
from paceline.targets.kubernetes import manifests, many, readers, reasons
from paceline.targets.kubernetes.objects import (
    WORKSPACE_LABEL,
    BatchJob,
    ClusterEvent,
    KubeObject,
    Pod,
    condition_of,
    index_of,
)
from paceline.targets.kubernetes.ticket import Noted

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from paceline.targets.kubernetes.api import Cluster
_WAITING = (states.NOT_STARTED, states.QUEUED)
#: Prefix of the reason that the supervisor records for a preempted attempt.
_PREEMPTED = "preempted: "
#: Seconds for which the reason why a run waits is cached: `_NEW_S` in the first `_FRESH_S` s after submission, then `_FRESH_S`.
_NEW_S, _FRESH_S = 3.0, 60.0
#: Minimum seconds between two list requests: before the first watch has started, and after a watch has broken.
_LIST_S, _RELIST_S = 0.3, 3.0
#: If no caller has read a watch's data for this many seconds, the watch is not renewed at its end.
_IDLE_S = 60.0
_JOB_LABEL = "batch.kubernetes.io/job-name"


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


def look(cluster: Cluster, folder: RunFolder, noted: Noted) -> JobStatus:
    """Update the local copy of the run's folder, and return the run's status.

    noted: Content of the run's `engine.json`.

    Raises:
        EngineError: The cluster does not answer.
        TargetError: The cluster refuses the request.
    """
    if (mirror := readers.kept_mirror(folder)) is not None:
        try:
            mirror.pull(folder)
        except (OSError, EOFError):
            readers.keep_mirror(folder, None)
            mirror = None
        else:
            if store.stored(folder).status not in _WAITING or has_all(folder):
                return JobStatus(state=RUNNING)
    job, all_pods = job_and_pods(cluster, str(noted["workspace"]), str(noted["job_id"]))
    if job is None:
        said = f"Its Job {noted['job_id']} does not exist any more: somebody deleted it, or its time to live was over."
        return JobStatus(state=GONE, message=said)
    is_one_of_many, index = many.is_many(noted), int(noted.get("index") or 0)
    is_complete = reasons.is_complete(job, index, is_one_of_many=is_one_of_many)
    if is_complete and not any(
        index_of(pod) == index and pod.get("status", {}).get("phase") == "Succeeded" for pod in all_pods
    ):
        all_pods = _pods_of(cluster, str(noted["job_id"]))  # query again: the watched pods may be older than the Job
    pods = [pod for pod in all_pods if index_of(pod) == index] if is_one_of_many else all_pods
    _note_ends(folder, noted, pods)
    pod, ended = reasons.running_pod(pods, index), reasons.ended_pod(pods, index)
    is_fetched = has_all(folder) or (mirror is not None and pod is not None)
    away = None if is_fetched else _fetch(cluster, folder, noted, pod, ended)
    if has_all(folder):
        _reasons.pop(str(noted["job_id"]), None)
        return JobStatus(state=RUNNING)
    is_waiting = store.stored(folder).status in _WAITING
    if (request := many.dropped(folder)) is not None:
        if pod is None and away is None:
            return JobStatus(state=GONE, cause="cancel", by=request.get("by"))
        if is_waiting:
            cancel_in_pod(cluster, folder, noted, request)  # the pod began before the cancel request was in its Secret
    # A running pod 0 has replaced the pods that ended, and an elastic run does not need each pod.
    end = reasons.ended(ended) if ended is not None and pod is None else None
    if end is None or end.cause != "engine":
        end = reasons.hopeless(pods) if pod is None or is_waiting else None
    if end is not None:
        return JobStatus(state=GONE, cause=end.cause, message=end.message)
    if (failed := condition_of(job, "Failed")) is not None:
        why = reasons.first_sentence(failed.get("message", ""))
        return JobStatus(state=GONE, message=f"Its Job failed: {failed.get('reason')}: {why}.")
    if is_complete:
        # Wait after any refusal: a kubelet that starts answers 404 until it knows its pods, and one that shuts down 401.
        if isinstance(away, EngineError) or hasattr(away, "code"):
            return JobStatus(state=UNREACHABLE, message=f"the run has ended, and its result is not here yet: {away}")
        lost = "The run ended, but its pod's log, which had its result, can't be read any more."
        return JobStatus(state=GONE, message=lost)
    if pod is not None and not is_waiting:
        return JobStatus(state=RUNNING)
    fresh_s = _NEW_S if time.time() - float(noted["submitted"]) < _FRESH_S else _FRESH_S
    reason = _reason(cluster, job, all_pods, fresh_s)
    text = reasons.waits_for(job, pods, reason.events, reason.queue, is_one_of_many=is_one_of_many)
    return JobStatus(state=QUEUED, message=text)


def _note_ends(folder: RunFolder, noted: Noted, pods: Sequence[Pod]) -> None:
    """Add to `engine.json` how pods ended, and the digest of their image."""
    known: dict[str, list[str]] = noted.get("ends") or {}
    others = sorted((pod for pod in pods if pod["metadata"]["uid"] not in known), key=reasons.ended_at)
    ends = {
        pod["metadata"]["uid"]: [end.cause, end.message] for pod in others if (end := reasons.ended(pod)) is not None
    }
    new = {"ends": {**known, **ends}, "image_digest": reasons.last_digest(pods)}
    if changed := {name: value for name, value in new.items() if value and value != noted.get(name)}:
        note_engine(folder, "kubernetes", **changed)


def explain(folder: RunFolder, noted: Noted) -> None:
    """Add to an ended run's record how its pods ended, as Kubernetes reports."""
    record, ends = store.stored(folder), list((noted.get("ends") or {}).values())
    if not record.is_terminal or not ends:
        return
    explained = replace(record, attempts=tuple(_explained(record.attempts, [said for _, said in ends])))
    if (failure := record.failure) and failure.cause in NODES_GONE:
        # The last end of a pod on the failed node, or else the last end of all.
        cause, said = max(reversed(ends), key=lambda end: end[1].startswith(f"Pod {failure.node}-"))
        if said not in failure.message:
            explained = replace(explained, failure=replace(failure, cause=cause, message=f"{said} {failure.message}"))
    if explained != record:
        store.replace_state(folder, explained)


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


def _reason(cluster: Cluster, job: BatchJob, pods: Sequence[Pod], fresh_s: float) -> _Reason:
    """Return why a Job waits, cached for `fresh_s` seconds unless the Job changes."""
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
                events = cluster.items("events", fieldSelector=selector)
                events.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
                found = replace(found, events=events)
        _reasons[name] = found
    return found


def _queue_text(cluster: Cluster, job: BatchJob) -> str:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    for workload in cluster.items("workloads"):
        if any(owner.get("uid") == uid for owner in workload["metadata"].get("ownerReferences", [])):
            found = condition_of(workload, "QuotaReserved", "False")
            return reasons.first_sentence(found.get("message", "")) if found else f"Kueue has room for {name}"
    return "Kueue has not seen its Job yet"


def _fetch(
    cluster: Cluster, folder: RunFolder, noted: Noted, pod: Pod | None, ended: Pod | None
) -> PacelineError | None:
    """Update the run's folder from its pod. Return why an ended pod's log can't be read."""
    if pod is None:
        try:
            if ended is not None:
                readers.read_log(cluster, folder, ended, fresh_s=0.0)  # also after a recent read: it is complete now
        except PacelineError as error:
            return error
        return None
    try:
        if not noted.get("forwards"):
            readers.read_log(cluster, folder, pod)
            return None
        mirror = readers.PodMirror(_connected(cluster, folder, pod))
    except (PacelineError, OSError):
        return None  # the pod's first process does not listen yet, or the API can't be reached
    try:
        mirror.pull(folder)
        readers.keep_mirror(folder, mirror)
    except (OSError, EOFError):
        mirror.close()
    return None


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
    _, pods = job_and_pods(cluster, str(noted["workspace"]), str(noted["job_id"]))
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
    return readers.connect(cluster, pod["metadata"]["name"], manifests.port_of(folder.run_id), key)


def job_and_pods(cluster: Cluster, workspace: str, name: str) -> tuple[BatchJob | None, Sequence[Pod]]:
    """Return a run's Job, None if it does not exist, and its pods.

    Raises:
        EngineError: The API does not answer.
        ApiRefusedError: The user may not read the objects.
    """
    jobs, pods = _watched(cluster, workspace)
    if (job := jobs.read().get(name)) is None:
        # The watched list may not have a new Job yet, so query the API.
        job = cluster.get("jobs", name)
        return job, _pods_of(cluster, name) if job else []
    return job, [pod for pod in pods.read().values() if pod["metadata"].get("labels", {}).get(_JOB_LABEL) == name]


def _pods_of(cluster: Cluster, job: str) -> Sequence[Pod]:
    """Query the API for a Job's pods."""
    return cluster.items("pods", labelSelector=f"{_JOB_LABEL}={job}")


@functools.lru_cache(maxsize=16)
def _watched(cluster: Cluster, workspace: str) -> tuple[Watched, Watched]:
    selector = f"{WORKSPACE_LABEL}={workspace}"
    return Watched(cluster, "jobs", selector), Watched(cluster, "pods", selector)


class Watched:
    """A local, thread-safe copy of the cluster's objects of one kind.

    The first read only lists the objects, because most programs read once. A later read lists them again and starts a
    watch, which keeps the copy current. After a watch has ended, the next read lists the objects again.
    """

    def __init__(self, cluster: Cluster, kind: str, selector: str) -> None:
        self._cluster, self._kind, self._selector = cluster, kind, selector
        self._found: dict[str, KubeObject] = {}
        self._is_watching = False
        self._pause_s = _LIST_S
        self._listed = self._read = float("-inf")
        self._guard = threading.Lock()

    def read(self) -> dict[str, KubeObject]:
        """Return {name: object}, at most some seconds old.

        Raises:
            EngineError: The API does not answer.
            ApiRefusedError: The user may not list the objects.
        """
        with self._guard:
            self._read = now = time.monotonic()
            if not self._is_watching and now - self._listed >= self._pause_s:
                items, version = self._cluster.listed(self._kind, labelSelector=self._selector)
                self._found = {one["metadata"]["name"]: one for one in items}
                self._is_watching = self._listed > 0
                self._listed = now
                if self._is_watching:
                    self._pause_s = _RELIST_S
                    threading.Thread(target=self._watch, args=(version,), name="paceline-watch", daemon=True).start()
            return dict(self._found)

    def _watch(self, version: str) -> None:
        began = float("-inf")
        with contextlib.suppress(EngineError, TargetError):
            # Renew only a watch that has lasted a while. A watch that ends at once would be renewed without a pause.
            while time.monotonic() - began > _RELIST_S and time.monotonic() - self._read < _IDLE_S:
                began = time.monotonic()
                for kind, found in self._cluster.watch(self._kind, version, labelSelector=self._selector):
                    version = found["metadata"]["resourceVersion"]
                    with self._guard:
                        if kind == "DELETED":
                            self._found.pop(found["metadata"]["name"], None)
                        elif kind != "BOOKMARK":
                            self._found[found["metadata"]["name"]] = found
        with self._guard:
            self._is_watching = False
