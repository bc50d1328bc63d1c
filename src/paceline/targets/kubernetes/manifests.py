"""The manifests of a run's objects in a Kubernetes cluster, as pure functions of job and settings.

Job NAME            one pod for each node; index 0 has the supervisor. The Job owns the next three: its deletion
                    removes them. A Job of many runs has a pod for each run, by index
Service NAME        headless, so that pods find index 0 as NAME-0.NAME
Secret NAME         the run's folder, a description of the run (ticket), and the program that each pod starts first.
                    Many runs also have Secrets NAME-part-1, ...
Secret NAME-dropped with many runs: the canceled runs whose pods can't be reached (`many`)
Secrets by content  parts of Paceline's library and of the source, named by a hash, which runs share

A service has a Deployment NAME, with a pod for each model process. It owns a Service NAME, by which programs in the cluster
find the pods, and a Secret NAME-HASH with the keys, the ticket and the first program.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.job.job import Job
from paceline.targets.kubernetes.objects import CONTAINER, WORKSPACE_LABEL
from paceline.targets.kubernetes.settings import Json, KubernetesSettings, Manifest, bytes_of

#: Folders in a pod: for the run and its workspace, for the volume, for the run's Secret, and for the Secrets with code.
TOP, VOLUME, START, CODE = "/paceline", "/paceline/volume", "/etc/paceline/start", "/etc/paceline/code"
#: Seconds that the supervisor has after the workers' grace period to record the run's end.
END_S = 30
#: The most bytes of data in a Secret. The API's limit of 1 MiB includes the names of the entries.
SECRET_BYTES = 900 << 10
#: Label with a Secret's kind. Annotations (next line): run id, Secrets' names, and number of an archive's Secrets.
KIND_LABEL = "paceline/kind"
RUN_ANNOTATION, SECRETS_ANNOTATION, PARTS_ANNOTATION = "paceline/run-id", "paceline/secrets", "paceline/parts"
#: Annotation with the number of runs of a Job that has many runs. `RUN_ANNOTATION` then has the first run's id.
COUNT_ANNOTATION = "paceline/runs"
_MANAGED = "app.kubernetes.io/managed-by"
#: Label selector that matches all Kubernetes objects that Paceline has created.
MANAGED_SELECTOR = f"{_MANAGED}=paceline"

#: Labels of a service's objects: its name, and the hash of its pods' content. Annotation: the text that identifies the content.
SERVICE_LABEL, CONTENT_LABEL, VERSION_ANNOTATION = "paceline/service", "paceline/content", "paceline/version"
#: The port of a service's pods, and of its Service.
POD_PORT, SERVICE_PORT = 8000, 80

#: Environment variables with the pod's address, and with the number of earlier pods of the same index that have failed.
ADDRESS_VARIABLE, FAILURES_VARIABLE = "PACELINE_POD_IP", "PACELINE_POD_FAILURES"

_PORTS = range(20000, 30000)
#: Seconds between the announcement of a service pod's end and SIGTERM, in which clients learn not to choose the pod.
_UNLISTED_S = 3


@dataclass(frozen=True, kw_only=True)
class ObjectNames:
    """The names of a run's objects in the cluster.

    Attributes:
        secrets: File name in the pod -> name of the Secret with the file, a packed part of Paceline's library or the source.
        count: The number of runs of a Job with many runs, whose first id is `run_id`; 0 for a Job of one run.
        at_once: How many runs of the Job may run at the same time.
        parts: Names of further Secrets with the folders of the Job's runs.
        service: The name of a service and its Deployment; "" for runs. `job` is then the name of its Secret NAME-HASH.
    """

    job: str
    run_id: str
    workspace: str
    secrets: Mapping[str, str]
    count: int = 0
    at_once: int = 0
    parts: Sequence[str] = ()
    service: str = ""

    @property
    def dropped(self) -> str:
        """The name of the Secret with the Job's canceled runs."""
        return f"{self.job}-dropped"


@dataclass(frozen=True, kw_only=True)
class ServiceContent:
    """The models and the program of a service's pods.

    Attributes:
        version: Text that identifies the content, such as the revision's number.
        ticket: JSON object with the name of the program, which is a module of Paceline, and with values for this program.
        package: Archive with the models and the user's source, which the program unpacks.
        drain_s: Seconds for which a pod that Kubernetes ends may finish its open requests.
        start_s: Seconds in which a new pod has to answer its first request.
    """

    version: str
    ticket: Mapping[str, object]
    package: bytes
    drain_s: float
    start_s: float


def job_name(run_id: str) -> str:
    """Return the name of a run's Job, a DNS label."""
    experiment = run_id.rpartition("_")[0].rpartition("_")[0]
    plain = re.sub(r"[^a-z0-9]+", "-", experiment.lower()).strip("-")[:30].strip("-") or "run"
    tail = run_id.rpartition("_")[2].lower()
    if not re.fullmatch(r"[0-9a-f]{8}", tail):
        tail = hashlib.sha256(run_id.encode()).hexdigest()[:10]
    return f"pl-{plain}-{tail}"


def many_name(run_ids: Sequence[str]) -> str:
    """Return the name of a Job for runs with consecutively numbered ids."""
    return job_name(f"{run_ids[0]}-{run_ids[-1].rpartition('_')[2]}" if len(run_ids) > 1 else run_ids[0])


def workspace_label(path: str) -> str:
    """Return the label that marks a workspace's objects in the cluster."""
    return hashlib.sha256(path.encode()).hexdigest()[:20]


def port_of(run_id: str) -> int:
    """Return the port of a run's pod 0, picked by `run_id`'s hash."""
    return _PORTS[zlib.crc32(run_id.encode()) % len(_PORTS)]


def job_manifest(job: Job, settings: KubernetesSettings, names: ObjectNames) -> Manifest:
    """Return the manifest of a run's Job."""
    labels, annotations = {}, {SECRETS_ANNOTATION: ",".join(sorted(names.secrets.values()))}
    pods = at_once = job.node_count
    if names.count:
        pods, at_once = names.count, min(names.count, names.at_once)
        annotations[COUNT_ANNOTATION] = str(names.count)
    if settings.queue:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
        if names.count and at_once > 1:
            # Let Kueue start the Job as soon as there is room for one of its runs. By default Kueue waits for room for all.
            annotations["kueue.x-k8s.io/job-min-parallelism"] = "1"
    spec: Manifest = {
        "completions": pods,
        "parallelism": at_once,
        **({} if names.count else {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}),
        "ttlSecondsAfterFinished": settings.keep_s,
        # Create a queued Job as suspended. Kueue resumes it once there is room for all pods.
        "suspend": bool(settings.queue),
        "template": _merged(_pod(job, settings, names), settings.template),
    }
    metadata = _metadata(settings, names.workspace, labels, {RUN_ANNOTATION: names.run_id, **annotations})
    return dict(_merged(_constants()["job"], {"metadata": {"name": names.job, **metadata}, "spec": spec}))


def service_manifest(settings: KubernetesSettings, names: ObjectNames, owner: str) -> Manifest:
    """Return the headless Service's manifest, which gives a Job's pods DNS names."""
    selector = {"batch.kubernetes.io/job-name": names.job}
    spec: Manifest = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return _object("Service", _owned(settings, names, owner, names.job), spec=spec)


def deployment_manifest(
    settings: KubernetesSettings, names: ObjectNames, content: ServiceContent, count: int, earlier: Collection[str] = ()
) -> Manifest:
    """Return the manifest of a service's Deployment with `count` pods.

    earlier: Names of Secrets that earlier pods of the service use. A cleanup (`prune`) keeps the Secrets that the manifest names.
    """
    job = Job(entry_script="start.py", grace_period_seconds=content.drain_s + _UNLISTED_S)
    chosen = {SERVICE_LABEL: names.service, WORKSPACE_LABEL: names.workspace}
    used = set(names.secrets.values())
    pause = [settings.python, "-S", "-c", f"import time; time.sleep({_UNLISTED_S})"]
    container: Manifest = {
        "name": CONTAINER,
        "startupProbe": {"failureThreshold": int(content.start_s)},
        "lifecycle": {"preStop": {"exec": {"command": pause}}},
    }
    about: Manifest = {
        "labels": {**chosen, CONTENT_LABEL: names.job.rpartition("-")[2]},
        "annotations": {SECRETS_ANNOTATION: ",".join(sorted(used))},
    }
    pod = _merged(_pod(job, settings, names), _constants()["service_pod"])
    pod = _merged(pod, {"metadata": about, "spec": {"containers": [container]}})
    annotations = {VERSION_ANNOTATION: content.version, SECRETS_ANNOTATION: ",".join(sorted({*used, *earlier}))}
    metadata = {"name": names.service, **_metadata(settings, names.workspace, chosen, annotations)}
    template = _merged(pod, settings.template)
    spec: Manifest = {"replicas": count, "selector": {"matchLabels": chosen}, "template": template}
    return dict(_merged(_constants()["deployment"], {"metadata": metadata, "spec": spec}))


def in_cluster_manifest(settings: KubernetesSettings, names: ObjectNames, owner: str) -> Manifest:
    """Return the Service through which programs in the cluster reach a deployed model."""
    selector = {SERVICE_LABEL: names.service, WORKSPACE_LABEL: names.workspace}
    port: Manifest = {"name": "http", "port": SERVICE_PORT, "targetPort": POD_PORT}
    metadata = _owned(settings, names, owner, names.service)
    return _object("Service", metadata, spec={"selector": selector, "ports": [port]})


def start_manifest(
    settings: KubernetesSettings,
    names: ObjectNames,
    owner: str,
    files: Mapping[str, bytes],
    name: str | None = None,
    *,
    immutable: bool = True,
) -> Manifest:
    """Return a Secret's manifest with the files that start pods."""
    return _secret(_owned(settings, names, owner, name or names.job), files, immutable)


def content_manifest(
    settings: KubernetesSettings, name: str, kind: str, workspace: str, data: bytes, count: int
) -> Manifest:
    """Return a Secret's manifest with one of `count` parts of data that several runs share."""
    metadata = _metadata(settings, workspace, {KIND_LABEL: kind}, {PARTS_ANNOTATION: str(count)})
    return _secret({"name": name, **metadata}, {"part": data})


def _secret(metadata: Manifest, files: Mapping[str, bytes], immutable: bool = True) -> Manifest:
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return _object("Secret", metadata, data=data, immutable=immutable)


def _object(kind: str, metadata: Manifest, **content: Json) -> Manifest:
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **content}


def parts_of(data: bytes) -> Sequence[bytes]:
    """Split bytes into parts, each small enough for a Secret."""
    return [data[at : at + SECRET_BYTES] for at in range(0, len(data), SECRET_BYTES)] or [b""]


def worker_resources(job: Job, settings: KubernetesSettings) -> dict[str, str]:
    """Return each pod's requests for CPUs, memory and GPUs by resource name."""
    workers = job.process_count_per_node
    memory = int(bytes_of(settings.memory_per_worker, "memory_per_worker")) * workers
    found = {
        "cpu": f"{round(settings.cpus_per_worker * workers * 1000)}m",
        "memory": f"{memory >> 20}Mi",
        **_pairs(settings.resources),
    }
    if job.use_gpu:
        found[settings.gpu_resource] = str(settings.gpus_per_worker * workers)
    return found


def _pod(job: Job, settings: KubernetesSettings, names: ObjectNames) -> Any:
    amounts, user = worker_resources(job, settings), settings.user_id
    container: dict[str, Json] = {
        "name": CONTAINER,
        "image": settings.image,
        "args" if settings.keep_entrypoint else "command": [settings.python, "-S", f"{START}/boot.py"],
        "resources": {"requests": amounts, "limits": amounts},
    }
    parts: list[Json] = [
        {"secret": {"name": name, "items": [{"key": "part", "path": path}]}}
        for path, name in sorted(names.secrets.items())
    ]
    volumes: list[Json] = [
        {"name": "start", **_start(names)},
        {"name": "code", "projected": {"sources": parts}},
        {"name": "shm", "emptyDir": {"sizeLimit": amounts["memory"]}},
    ]
    if settings.volume:
        container["volumeMounts"] = [{"name": "volume", "mountPath": VOLUME}]
        volumes.append({"name": "volume", "persistentVolumeClaim": {"claimName": settings.volume}})
    gpus: list[Json] = [{"key": settings.gpu_resource, "operator": "Exists"}] if job.use_gpu else []
    owner: Manifest = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    spec: Manifest = {
        "subdomain": names.job,
        "terminationGracePeriodSeconds": int(job.grace_period_seconds) + END_S,
        "tolerations": [*gpus, *map(_toleration, settings.toleration)],
        "securityContext": {**owner, "fsGroupChangePolicy": "OnRootMismatch"} if user else {},
        "containers": [container],
        "volumes": volumes,
        "nodeSelector": _pairs(settings.node_selector),
        "schedulerName": settings.scheduler,
        "priorityClassName": settings.priority_class,
        "runtimeClassName": settings.runtime_class,
    }
    metadata = _metadata(settings, names.workspace, {}, {RUN_ANNOTATION: names.run_id})
    # Leave out empty values: `_merged` would replace a list of Paceline's own manifest by an empty list.
    filled = {key: value for key, value in spec.items() if value}
    return _merged(_constants()["pod"], {"metadata": metadata, "spec": filled})


def _start(names: ObjectNames) -> Manifest:
    if not names.count:
        return {"secret": {"secretName": names.job}}
    sources: list[Json] = [{"secret": {"name": name}} for name in (names.job, *names.parts)]
    return {"projected": {"sources": [*sources, {"secret": {"name": names.dropped, "optional": True}}]}}


def _metadata(
    settings: KubernetesSettings, workspace: str, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> Manifest:
    """Return an object's labels and annotations, and add the user's from the settings."""
    return {
        "labels": {**_pairs(settings.label), _MANAGED: "paceline", WORKSPACE_LABEL: workspace, **labels},
        "annotations": {**_pairs(settings.annotation), **annotations},
    }


def _owned(settings: KubernetesSettings, names: ObjectNames, owner: str, name: str) -> Manifest:
    of = {"apiVersion": "batch/v1", "kind": "Job", "name": names.job, "uid": owner}
    if names.service:
        of |= {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.service}
    metadata = _metadata(settings, names.workspace, {}, {RUN_ANNOTATION: names.run_id})
    return {"name": name, **metadata, "ownerReferences": [of]}


@functools.lru_cache(maxsize=1)
def _constants() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """Return the names and values of NAME=VALUE texts."""
    return dict(word.split("=", 1) for word in words)


def _toleration(text: str) -> Manifest:
    key, _, effect = text.partition(":")
    key, equals, value = key.partition("=")
    found = {"key": key, "operator": "Equal" if equals else "Exists", "value": value, "effect": effect}
    return {name: text for name, text in found.items() if text}


def _merged(ours: Any, theirs: Any) -> Any:
    """Return the manifest `ours` with the values of the manifest `theirs` merged in."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: _merged(ours.get(key), theirs.get(key, ours.get(key))) for key in {**ours, **theirs}}
    if isinstance(ours, list) and isinstance(theirs, list) and theirs and ours is not theirs:
        key = next((key for key in ("mountPath", "name") if all(_has(one, key) for one in (*ours, *theirs))), None)
        if key is None:
            return [*ours, *theirs]
        found = {one[key]: one for one in ours}
        for one in theirs:
            found[one[key]] = _merged(found.get(one[key]), one)
        return list(found.values())
    return theirs


def _has(value: object, key: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get(key), str)
