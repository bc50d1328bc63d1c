"""The manifests of a run's objects, as pure functions of job and settings.

Job NAME            one pod for each node; index 0 has the supervisor. The Job owns the next three: its deletion
                    removes them. A Job of many runs has a pod for each run, by index
Service NAME        headless, so that pods find index 0 as NAME-0.NAME
Secret NAME         the run's folder, the ticket, the first program. Many runs also have Secrets NAME-part-1, ...
Secret NAME-dropped with many runs: the canceled runs whose pods can't be reached (`many`)
Secrets by content  parts of Paceline's library and of the source, named by a hash, which runs share

A service has a Deployment NAME, with a pod for each model process. It owns a Service NAME, by which programs in the cluster
find the pods, and a Secret NAME-HASH with the keys, the ticket and the first program.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from paceline.job.job import Job
from paceline.targets.kubernetes.settings import Json, KubernetesSettings, Manifest, bytes_of

#: In each pod, the name of the container that runs the workers.
CONTAINER = "paceline"
#: Folders in a pod: for the run and its workspace, for the volume, for the run's Secret, and for the Secrets with code.
TOP, VOLUME, START, CODE = "/paceline", "/paceline/volume", "/etc/paceline/start", "/etc/paceline/code"
#: Seconds that the supervisor has after the workers' grace period to record the run's end.
END_S = 30
#: The most bytes of data in a Secret. The API's limit of 1 MiB includes the names of the entries.
SECRET_BYTES = 900 << 10
#: Names of labels (a run's workspace, a Secret's kind) and annotations (run id, Secrets' names, number of an archive's Secrets).
WORKSPACE_LABEL, KIND_LABEL = "paceline/workspace", "paceline/kind"
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

_NO_EVICTION = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
#: Annotations against sidecar containers, which would keep an ended pod running.
_NO_SIDECARS = {
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
    "kuma.io/sidecar-injection": "disabled",
}
#: Seconds after the loss of a node until Kubernetes replaces its pods; the default is 300.
_LOST_S = 5
_PORTS = range(20000, 30000)
#: Seconds between the announcement of a service pod's end and SIGTERM, in which clients learn not to choose the pod.
_UNLISTED_S = 3
#: Annotations that let an autoscaler remove a node under a pod of a service: the Deployment replaces the pod.
_EVICTION = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true", "karpenter.sh/do-not-disrupt": "false"}


@dataclass(frozen=True, kw_only=True)
class ObjectNames:
    """The names of a run's objects in the cluster.

    Attributes:
        secrets: File name in the pod -> name of the Secret that holds it. The files are packed parts of the library or source.
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
        """The name of the Secret with the canceled runs of a Job with many runs."""
        return f"{self.job}-dropped"


def job_name(run_id: str) -> str:
    """Return the name of a run's Job, a DNS label."""
    experiment = run_id.rpartition("_")[0].rpartition("_")[0]
    plain = re.sub(r"[^a-z0-9]+", "-", experiment.lower()).strip("-")[:30].strip("-") or "run"
    tail = run_id.rpartition("_")[2].lower()
    if not re.fullmatch(r"[0-9a-f]{8}", tail):
        tail = hashlib.sha256(run_id.encode()).hexdigest()[:10]
    return f"pl-{plain}-{tail}"


def many_name(run_ids: Sequence[str]) -> str:
    """Return the name of a Job for many runs with consecutively numbered ids."""
    return job_name(f"{run_ids[0]}-{run_ids[-1].rpartition('_')[2]}")


def workspace_label(path: str) -> str:
    """Return the label that marks a workspace's objects in the cluster."""
    return hashlib.sha256(path.encode()).hexdigest()[:20]


def port_of(run_id: str) -> int:
    """Return the port of a run's pod 0, picked by `run_id`'s hash."""
    return _PORTS[zlib.crc32(run_id.encode()) % len(_PORTS)]


def job_manifest(job: Job, settings: KubernetesSettings, names: ObjectNames) -> Manifest:
    """Return the manifest of a run's Job."""
    labels = _labels(settings, names.workspace)
    annotations = {**settings.annotation, RUN_ANNOTATION: names.run_id}
    annotations[SECRETS_ANNOTATION] = ",".join(sorted(names.secrets.values()))
    pods = at_once = job.node_count
    if names.count:
        pods, at_once = names.count, min(names.count, names.at_once)
        annotations[COUNT_ANNOTATION] = str(names.count)
    if settings.queue:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
        if names.count and at_once > 1:
            # Let Kueue start the Job as soon as there is room for one of its runs. By default Kueue waits for room for all.
            annotations["kueue.x-k8s.io/job-min-parallelism"] = "1"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": names.job,
            "labels": _json(labels),
            "annotations": _json(annotations),
        },
        "spec": {
            "completions": pods,
            "parallelism": at_once,
            "completionMode": "Indexed",
            # Set a limit that no pod reaches: Kubernetes replaces lost pods, and the supervisor limits the number of attempts.
            "backoffLimitPerIndex": 1000,
            # Don't add podFailurePolicy: with it Kubernetes would not replace a pod on an unreachable node.
            "podReplacementPolicy": "TerminatingOrFailed",
            **({} if names.count else {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}),
            "ttlSecondsAfterFinished": settings.keep_s,
            # Create a queued Job as suspended. Kueue resumes it once there is room for all pods.
            "suspend": bool(settings.queue),
            "template": _merged(_pod(job, settings, names), dict(settings.template)),
        },
    }


def service_manifest(settings: KubernetesSettings, names: ObjectNames, owner: str) -> Manifest:
    """Return the manifest of the headless Service that gives the pods names."""
    selector: Json = {"batch.kubernetes.io/job-name": names.job}
    spec: Json = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _owned(settings, names, owner), "spec": spec}


def deployment_manifest(
    settings: KubernetesSettings,
    names: ObjectNames,
    version: str,
    count: int,
    *,
    drain_s: float,
    start_s: float,
    earlier: Collection[str] = (),
) -> Manifest:
    """Return the manifest of a service's Deployment.

    version: Text that identifies the content of the pods.
    count: Number of pods.
    drain_s: Seconds that a pod has for its open requests at its end.
    start_s: Seconds that a pod has from its start to its first answer.
    earlier: Secrets with the content of earlier pods, which `prune` has to spare until these pods have ended.
    """
    job = Job(entry_script="start.py", grace_period_seconds=drain_s + _UNLISTED_S)
    chosen: dict[str, Json] = {SERVICE_LABEL: names.service, WORKSPACE_LABEL: names.workspace}
    pause: list[Json] = [settings.python, "-S", "-c", f"import time; time.sleep({_UNLISTED_S})"]
    container: Manifest = {
        "name": CONTAINER,
        "ports": [{"name": "http", "containerPort": POD_PORT}],
        "startupProbe": {**_probe("/readyz"), "periodSeconds": 1, "failureThreshold": int(start_s)},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 2, "failureThreshold": 3},
        "livenessProbe": {**_probe("/livez"), "periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": pause}}},
    }
    about: Manifest = {
        "labels": {**chosen, CONTENT_LABEL: names.job.rpartition("-")[2]},
        "annotations": {**_json(_EVICTION), SECRETS_ANNOTATION: ",".join(sorted(names.secrets.values()))},
    }
    pod = _merged(_pod(job, settings, names), {"metadata": about, "spec": {"restartPolicy": "Always"}})
    pod = _merged(pod, {"spec": {"containers": [container]}})
    annotations = {**settings.annotation, VERSION_ANNOTATION: version}
    annotations[SECRETS_ANNOTATION] = ",".join(sorted({*names.secrets.values(), *earlier}))
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": names.service,
            "labels": {**_json(_labels(settings, names.workspace)), **chosen},
            "annotations": _json(annotations),
        },
        "spec": {
            "replicas": count,
            "selector": {"matchLabels": chosen},
            # Add one pod at a time, and end a pod only once another one answers in its place.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "revisionHistoryLimit": 0,
            "template": _merged(pod, dict(settings.template)),
        },
    }


def in_cluster_manifest(settings: KubernetesSettings, names: ObjectNames, owner: str) -> Manifest:
    """Return the manifest of a service's Service, for programs in the cluster."""
    selector: Json = {SERVICE_LABEL: names.service, WORKSPACE_LABEL: names.workspace}
    metadata = {**_owned(settings, names, owner), "name": names.service}
    port: Json = {"name": "http", "port": SERVICE_PORT, "targetPort": POD_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": selector, "ports": [port]},
    }


def start_manifest(
    settings: KubernetesSettings,
    names: ObjectNames,
    owner: str,
    files: Mapping[str, bytes],
    name: str | None = None,
    *,
    immutable: bool = True,
) -> Manifest:
    """Return the manifest of a Job's or service's Secret `name` (default: `names.job`)."""
    return {**_secret({**_owned(settings, names, owner), "name": name or names.job}, files), "immutable": immutable}


def content_manifest(
    settings: KubernetesSettings, name: str, kind: str, workspace: str, data: bytes, count: int
) -> Manifest:
    """Return the manifest of a shared Secret with one of `count` parts of data."""
    annotations = {**settings.annotation, PARTS_ANNOTATION: str(count)}
    labels = {**_labels(settings, workspace), KIND_LABEL: kind}
    return _secret({"name": name, "labels": _json(labels), "annotations": _json(annotations)}, {"part": data})


def _secret(metadata: Manifest, files: Mapping[str, bytes]) -> Manifest:
    data: Json = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "immutable": True, "metadata": metadata, "data": data}


def parts_of(data: bytes) -> Sequence[bytes]:
    """Split bytes into parts, each small enough for a Secret."""
    return [data[at : at + SECRET_BYTES] for at in range(0, len(data), SECRET_BYTES)] or [b""]


def worker_resources(job: Job, settings: KubernetesSettings) -> dict[str, str]:
    """Return each pod's requests for CPUs, memory and GPUs by resource name."""
    workers = job.process_count_per_node
    memory = int(bytes_of(settings.memory_per_worker, "memory_per_worker")) * workers
    found = {
        "cpu": f"{round(settings.cpus_per_worker * workers * 1000)}m",
        "memory": f"{memory >> 20}Mi" if memory >> 20 else str(memory),
        **settings.resources,
    }
    if job.use_gpu:
        found[settings.gpu_resource] = str(settings.gpus_per_worker * workers)
    return found


def _pod(job: Job, settings: KubernetesSettings, names: ObjectNames) -> Manifest:
    amounts = _json(worker_resources(job, settings))
    command: list[Json] = [settings.python, "-S", f"{START}/boot.py"]
    user: Manifest = {"runAsNonRoot": True, "runAsUser": settings.user_id, "runAsGroup": settings.user_id}
    mounts: list[Json] = [
        {"name": "work", "mountPath": TOP},
        {"name": "start", "mountPath": START, "readOnly": True},
        {"name": "code", "mountPath": CODE, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[Json] = [
        {"name": "work", "emptyDir": {}},
        {"name": "start", **_start(names)},
        {
            "name": "code",
            "projected": {
                "sources": [
                    {"secret": {"name": name, "items": [{"key": "part", "path": path}]}}
                    for path, name in sorted(names.secrets.items())
                ]
            },
        },
        # Mount /dev/shm with more space than the default of 64 MB, which is too small for the workers of a DataLoader.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": amounts["memory"]}},
    ]
    if settings.volume:
        mounts.append({"name": "volume", "mountPath": VOLUME})
        volumes.append({"name": "volume", "persistentVolumeClaim": {"claimName": settings.volume}})
    tolerations: list[Json] = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_S}
        for why in ("not-ready", "unreachable")
    ]
    if job.use_gpu:
        tolerations.append({"key": settings.gpu_resource, "operator": "Exists"})
    spec: Manifest = {
        "restartPolicy": "Never",
        "subdomain": names.job,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(job.grace_period_seconds) + END_S,
        "tolerations": [*tolerations, *map(_toleration, settings.toleration)],
        "securityContext": {
            **(user if settings.user_id else {}),
            **({"fsGroup": settings.user_id, "fsGroupChangePolicy": "OnRootMismatch"} if settings.user_id else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": settings.image,
                "args" if settings.keep_entrypoint else "command": command,
                "env": [
                    # Set HOME: for a user without an entry in /etc/passwd it is `/`, where the user can't write.
                    {"name": "HOME", "value": f"{TOP}/home"},
                    _from_pod(ADDRESS_VARIABLE, "status.podIP"),
                    _from_pod(FAILURES_VARIABLE, "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"),
                ],
                "resources": {"requests": amounts, "limits": amounts},
                "volumeMounts": mounts,
                # Copy the log's last lines to the pod's status, for users without the right to read logs.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
        "volumes": volumes,
        **({"nodeSelector": _json(settings.node_selector)} if settings.node_selector else {}),
        **({"schedulerName": settings.scheduler} if settings.scheduler else {}),
        **({"priorityClassName": settings.priority_class} if settings.priority_class else {}),
        **({"runtimeClassName": settings.runtime_class} if settings.runtime_class else {}),
    }
    annotations = {**_NO_EVICTION, **_NO_SIDECARS, **settings.annotation, RUN_ANNOTATION: names.run_id}
    # Current versions of Istio read this setting as a label, earlier versions as an annotation.
    labels = {**_labels(settings, names.workspace), "sidecar.istio.io/inject": "false"}
    return {"metadata": {"labels": _json(labels), "annotations": _json(annotations)}, "spec": spec}


def _start(names: ObjectNames) -> Manifest:
    if not names.count:
        return {"secret": {"secretName": names.job}}
    sources: list[Json] = [{"secret": {"name": name}} for name in (names.job, *names.parts)]
    return {"projected": {"sources": [*sources, {"secret": {"name": names.dropped, "optional": True}}]}}


def _labels(settings: KubernetesSettings, workspace: str) -> dict[str, str]:
    return {**settings.label, _MANAGED: "paceline", WORKSPACE_LABEL: workspace}


def _owned(settings: KubernetesSettings, names: ObjectNames, owner: str) -> Manifest:
    of: Manifest = {"apiVersion": "batch/v1", "kind": "Job", "name": names.job}
    if names.service:
        of = {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.service}
    return {
        "name": names.job,
        "labels": _json(_labels(settings, names.workspace)),
        "annotations": _json({**settings.annotation, RUN_ANNOTATION: names.run_id}),
        "ownerReferences": [{**of, "uid": owner}],
    }


def _probe(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": POD_PORT}, "timeoutSeconds": 5}


def _from_pod(variable: str, field: str) -> Json:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _toleration(text: str) -> Json:
    key, _, effect = text.partition(":")
    key, equals, value = key.partition("=")
    found: dict[str, Json] = {"key": key, "operator": "Equal" if equals else "Exists"}
    return found | ({"value": value} if equals else {}) | ({"effect": effect} if effect else {})


def _json(values: Mapping[str, str]) -> dict[str, Json]:
    return dict(values)


def _merged(ours: Json, theirs: Json) -> Json:
    """Return the manifest `ours`, changed by the user's template `theirs`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {
            key: _merged(ours.get(key), theirs.get(key, ours.get(key))) for key in (*ours, *(set(theirs) - set(ours)))
        }
    if isinstance(ours, list) and isinstance(theirs, list) and theirs and ours is not theirs:
        key = next((key for key in ("mountPath", "name") if all(_has(one, key) for one in (*ours, *theirs))), None)
        if key is None:
            return [*ours, *theirs]
        found: dict[Json, Json] = {cast("Manifest", one)[key]: one for one in ours}
        for one in theirs:
            name = cast("Manifest", one)[key]
            found[name] = _merged(found.get(name), one)
        return list(found.values())
    return theirs


def _has(value: Json, key: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get(key), str)
