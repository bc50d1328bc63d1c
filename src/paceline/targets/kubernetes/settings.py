"""The checked settings of a Kubernetes target, and functions that read its kubeconfig."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import TargetError
from paceline.remote.wire import SILENCE_S
from paceline.targets.options import PRICES, SILENCE, SettingValues, check_settings, options_of, setting

#: A JSON value of the Kubernetes API, such as a part of a manifest.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Manifest: TypeAlias = "Mapping[str, Json]"

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+(?![a-zA-Z]))?)(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_UNITS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
    f"{letter}i": 1024.0 ** (power + 1) for power, letter in enumerate("KMGTPE")
}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: Name of a context that stands for the service account of the pod in which this process runs.
IN_CLUSTER = "in-cluster"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Keys of a kubeconfig whose values are paths relative to the kubeconfig's folder.
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """The checked settings of a Kubernetes target.

    Attributes:
        template: The content of the file that the setting `pod_template` names, which is stored with the target.
    """

    name: str
    kubeconfig: str | None = setting(
        "file with clusters and credentials (default: $KUBECONFIG, else ~/.kube/config)", Path
    )
    context: str = setting("context of the kubeconfig (default: the current one, when the target is added)")
    namespace: str = setting("namespace of all objects (default: the context's)")
    image: str = setting("container image with Python 3.10 or later and the script's packages", str, "python:3.12-slim")
    python: str = setting("interpreter in the image for Paceline and for scripts that name none", str, "python3")
    cpus_per_worker: float = setting("CPUs for each worker, requested and limited", float, 1.0, least=0.001)
    memory_per_worker: str = setting("memory for each worker, as Kubernetes writes it, such as 4Gi", str, "2Gi")
    gpus_per_worker: int = setting("GPUs for each worker with use_gpu", int, 1, least=1)
    gpu_resource: str = setting("name of the cluster's GPU resource", str, "nvidia.com/gpu")
    resources: Sequence[str] = setting("further resource for each pod, as NAME=AMOUNT, such as rdma/ib=1", list)
    queue: str | None = setting("Kueue's LocalQueue (default: the namespace's only one; an empty name for no queue)")
    scheduler: str | None = setting("scheduler of the pods, such as volcano")
    priority_class: str | None = setting("priority class of the pods")
    runtime_class: str | None = setting("runtime class of the pods, such as nvidia")
    node_selector: Sequence[str] = setting("label of nodes that may hold pods, as KEY=VALUE", list)
    toleration: Sequence[str] = setting("taint that the pods tolerate, as KEY[=VALUE][:EFFECT]", list)
    label: Sequence[str] = setting("label for every object, as KEY=VALUE", list)
    annotation: Sequence[str] = setting("annotation for every object, as KEY=VALUE", list)
    pod_template: str | None = setting("YAML or JSON file of a pod, which is merged over Paceline's", Path)
    template: Manifest = field(default_factory=dict)
    volume: str | None = setting(
        "PersistentVolumeClaim for built environments, caches, outputs, and checkpoints of a lost pod"
    )
    user_id: int = setting("user number of the containers; 0 for the image's own user", int, 1000, least=0)
    keep_entrypoint: bool = setting("run the image's ENTRYPOINT with Paceline as its arguments", bool, False)
    gang_wait_s: float = setting(
        "seconds to hold some pods while others are missing, before the run gives all of them back and queues again",
        *(float, 300.0),
        least=1,
    )
    keep_s: int = setting(
        "seconds for which an ended run keeps its pod or log in the cluster until its files have been fetched",
        *(int, 86400),
        least=60,
    )
    silence_s: float = SILENCE_S

    @property
    def title(self) -> str:
        return f"compute target {self.name!r}"

    @property
    def place(self) -> tuple[str, str, str, str | None]:
        """Title, context, namespace and kubeconfig that select the cluster."""
        return self.title, self.context, self.namespace, self.kubeconfig


OPTIONS = (*options_of(KubernetesSettings), SILENCE, *PRICES)


def read_settings(name: str, given: SettingValues) -> tuple[dict[str, object], KubernetesSettings]:
    """Check settings. Return them as a dict to store, and as `KubernetesSettings`.

    Raises:
        TargetError: A setting is unknown or wrong, or the kubeconfig has no such context.
    """
    given = dict(given)
    template = given.pop("template", None)
    values = check_settings("kubernetes", OPTIONS, given, name)
    title = f"compute target {name!r}"
    if values["context"] is None or values["namespace"] is None:
        found = find_context(title, values["kubeconfig"], values["context"])
        values["context"], values["namespace"] = found.name, values["namespace"] or found.namespace
        values["kubeconfig"] = values["kubeconfig"] or os.environ.get("KUBECONFIG") or None
    if not _NAMESPACE.fullmatch(values["namespace"]):
        raise TargetError(f"{title}: namespace={values['namespace']!r} is not a name of a namespace, such as my-lab.")
    memory = values["memory_per_worker"]
    if not 1 << 20 <= bytes_of(memory, f"{title}: memory_per_worker") < 1 << 60:
        raise TargetError(f"{title}: memory_per_worker={memory!r} must be at least 1Mi, and less than 1Ei.")
    for one in values["toleration"]:
        key, _, effect = one.partition(":")
        if not key or (effect and effect not in _EFFECTS):
            raise TargetError(
                f"{title}: toleration={one!r} is not KEY[=VALUE][:EFFECT] with an effect of {', '.join(_EFFECTS)}."
            )
    for option in ("node_selector", "label", "annotation", "resources"):
        for one in values[option]:
            if not re.match("[^=]+=", one):
                raise TargetError(f"{title}: {option}={one!r} is not NAME=VALUE.")
    if template is None and values["pod_template"] is not None:
        template = _template(title, values["pod_template"])
    values["template"] = template or {}
    kept = {key: value for key, value in values.items() if value not in (None, [], {})}
    fields = {key: values[key] for key in KubernetesSettings.__dataclass_fields__ if key != "name"}
    return kept, KubernetesSettings(name=name, **fields)


def bytes_of(text: str, what: str) -> float:
    """Return the value of a Kubernetes quantity, such as 4Gi (bytes) or 500m (0.5).

    Raises:
        TargetError: The text is not a quantity; the message begins with `what`.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise TargetError(f"{what}={text!r} is not a quantity of Kubernetes, such as 4Gi or 512Mi.")
    return float(match[1]) * _UNITS[match[2] or ""]


def _template(title: str, path: str) -> Manifest:
    found = _yaml(path, f"{title}: pod_template={path!r}", " Give a YAML file of a pod.")
    if isinstance(found, dict) and isinstance(found.get("template"), dict):
        found = found["template"]
    if not isinstance(found, dict) or not isinstance(spec := found.get("spec"), dict):
        raise TargetError(
            f"{title}: pod_template={path!r} has no `spec` of a pod. `kubectl explain pod.spec` lists its keys."
        )
    containers = spec.get("containers")
    if isinstance(containers, list) and containers and isinstance(containers[0], dict):
        containers[0]["name"] = "paceline"  # settings of the template's first container apply to the run's container
    return {key: found[key] for key in ("metadata", "spec") if key in found}


@dataclass(frozen=True, kw_only=True)
class KubeContext:
    """A context of a kubeconfig, with its cluster and user."""

    name: str
    namespace: str
    cluster: Mapping[str, Json]
    user: Mapping[str, Json]


def find_context(title: str, kubeconfig: str | None, name: str | None) -> KubeContext:
    """Return the context `name` of a kubeconfig, by default the current context.

    Without a kubeconfig, use the service account of the pod in which this process runs, if there is such a pod.

    Raises:
        TargetError: The kubeconfig is missing or broken, or lacks the context. The message begins with `title`.
    """
    listed = kubeconfig or os.environ.get("KUBECONFIG", "")
    paths = [Path(os.path.expanduser(one)) for one in (listed or "~/.kube/config").split(os.pathsep) if one]
    present = [path for path in paths if path.is_file()]
    if not present:
        if name in (None, IN_CLUSTER) and (_SERVICE_ACCOUNT / "token").is_file():
            return _service_account()
        raise TargetError(
            f"{title}: there is no kubeconfig {str(paths[0])!r}. Your cluster's administrator has one, and `kubectl config "
            "view` shows it; name it by --kubeconfig."
        )
    parts = [_read(title, path) for path in present]
    current = name or next((str(part["current-context"]) for part in parts if part.get("current-context")), "")
    contexts = _entries(parts, "context")
    found = contexts.get(current)
    if found is None:
        listed = ", ".join(contexts) or "none"
        what = f"no context {current!r}" if current else "no current context"
        raise TargetError(f"{title}: {str(present[0])!r} has {what}; it has {listed}. Name one by --context.")
    cluster = _entries(parts, "cluster").get(str(found.get("cluster")))
    if cluster is None or not isinstance(cluster.get("server"), str):
        raise TargetError(f"{title}: context {current!r} names cluster {found.get('cluster')!r}, which has no server.")
    user = _entries(parts, "user").get(str(found.get("user"))) or {}
    return KubeContext(name=current, namespace=str(found.get("namespace") or "default"), cluster=cluster, user=user)


def _service_account() -> KubeContext:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return KubeContext(
        name=IN_CLUSTER,
        namespace=(_SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip(),
        cluster={
            "server": f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            "certificate-authority": str(_SERVICE_ACCOUNT / "ca.crt"),
        },
        user={"tokenFile": str(_SERVICE_ACCOUNT / "token")},
    )


def _read(title: str, path: Path) -> Manifest:
    found = _yaml(str(path), f"{title}: the kubeconfig {str(path)!r}")
    if not isinstance(found, dict):
        raise TargetError(f"{title}: {str(path)!r} is not a kubeconfig. `kubectl config view` prints one.")
    for entry in (*_entries([found], "cluster").values(), *_entries([found], "user").values()):
        for name in _PATHS:
            if isinstance(value := entry.get(name), str) and value:
                entry[name] = str(path.parent.absolute() / value)
    return found


def _entries(parts: Sequence[Manifest], kind: str) -> dict[str, dict[str, Json]]:
    """Return kubeconfigs' contexts, clusters or users by name. The first of each name counts."""
    found: dict[str, dict[str, Json]] = {}
    for part in parts:
        listed = part.get(f"{kind}s")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get(kind), dict):
                found.setdefault(str(entry.get("name")), entry[kind])
    return found


def _yaml(path: str, what: str, hint: str = "") -> Any:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TargetError(f"{what} can't be read: {error}.{hint}") from error
