"""The checked settings of a Kubernetes target, and functions that read its kubeconfig."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from paceline.errors import TargetError
from paceline.remote.wire import SILENCE_S
from paceline.targets.options import PRICES, SILENCE, Option, SettingValues, check_settings

#: A JSON value of the Kubernetes API, such as a part of a manifest.
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Manifest: TypeAlias = "dict[str, Json]"

OPTIONS = (
    Option("kubeconfig", "file with clusters and credentials (default: $KUBECONFIG, else ~/.kube/config)", type=Path),
    Option("context", "context of the kubeconfig (default: the current one, when the target is added)"),
    Option("namespace", "namespace of all objects (default: the context's)"),
    Option("image", "container image with Python 3.10 or later and the script's packages", default="python:3.12-slim"),
    Option("python", "interpreter in the image for Paceline and for scripts that name none", default="python3"),
    Option("cpus_per_worker", "CPUs for each worker, requested and limited", type=float, default=1.0, least=0.001),
    Option("memory_per_worker", "memory for each worker, as Kubernetes writes it, such as 4Gi", default="2Gi"),
    Option("gpus_per_worker", "GPUs for each worker with use_gpu", type=int, default=1, least=1),
    Option("gpu_resource", "name of the cluster's GPU resource", default="nvidia.com/gpu"),
    Option("resources", "further resource for each pod, as NAME=AMOUNT, such as rdma/ib=1", type=list),
    Option("queue", "Kueue's LocalQueue (default: the namespace's only one; an empty name for no queue)"),
    Option("scheduler", "scheduler of the pods, such as volcano"),
    Option("priority_class", "priority class of the pods"),
    Option("runtime_class", "runtime class of the pods, such as nvidia"),
    Option("node_selector", "label of nodes that may hold pods, as KEY=VALUE", type=list),
    Option("toleration", "taint that the pods tolerate, as KEY[=VALUE][:EFFECT]", type=list),
    Option("label", "label for every object, as KEY=VALUE", type=list),
    Option("annotation", "annotation for every object, as KEY=VALUE", type=list),
    Option("pod_template", "YAML or JSON file of a pod, which is merged over Paceline's", type=Path),
    Option("volume", "PersistentVolumeClaim for built environments, caches, outputs, and checkpoints of a lost pod"),
    Option("user_id", "user number of the containers; 0 for the image's own user", type=int, default=1000, least=0),
    Option("keep_entrypoint", "run the image's ENTRYPOINT with Paceline as its arguments", type=bool, default=False),
    Option(
        "gang_wait_s",
        "seconds to hold some pods while others are missing, before the run gives all of them back and queues again",
        type=float,
        default=300.0,
        least=1,
    ),
    Option(
        "keep_s",
        "seconds for which an ended run keeps its pod or log in the cluster until its files have been fetched",
        type=int,
        default=86400,
        least=60,
    ),
    SILENCE,
    *PRICES,
)

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
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
    """The settings of a Kubernetes target; `OPTIONS` describes each."""

    name: str
    context: str
    namespace: str
    kubeconfig: str | None = None
    image: str = "python:3.12-slim"
    python: str = "python3"
    cpus_per_worker: float = 1.0
    memory_per_worker: str = "2Gi"
    gpus_per_worker: int = 1
    gpu_resource: str = "nvidia.com/gpu"
    resources: Mapping[str, str] = field(default_factory=dict)
    queue: str | None = None
    scheduler: str | None = None
    priority_class: str | None = None
    runtime_class: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    toleration: tuple[str, ...] = ()
    label: Mapping[str, str] = field(default_factory=dict)
    annotation: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, Json] = field(default_factory=dict)
    volume: str | None = None
    user_id: int = 1000
    keep_entrypoint: bool = False
    gang_wait_s: float = 300.0
    keep_s: int = 86400
    silence_s: float = SILENCE_S

    @property
    def title(self) -> str:
        return f"compute target {self.name!r}"


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
    bytes_of(values["memory_per_worker"], f"{title}: memory_per_worker")
    for one in values["toleration"] or ():
        effect = one.partition(":")[2]
        if not one.partition(":")[0] or (effect and effect not in _EFFECTS):
            raise TargetError(
                f"{title}: toleration={one!r} is not KEY[=VALUE][:EFFECT] with an effect of {', '.join(_EFFECTS)}."
            )
    if template is None and values["pod_template"] is not None:
        template = _template(title, values["pod_template"])
    kept = {key: value for key, value in values.items() if value is not None}
    if template:
        kept["template"] = template
    values.pop("pod_template")
    pairs = {key: _pairs(title, key, values.pop(key)) for key in ("node_selector", "label", "annotation", "resources")}
    known = {key: value for key, value in values.items() if key in KubernetesSettings.__dataclass_fields__}
    known["toleration"] = tuple(values["toleration"] or ())
    return kept, KubernetesSettings(name=name, template=template or {}, **{**known, **pairs})


def bytes_of(text: str, what: str) -> float:
    """Return the value of a Kubernetes quantity, such as 4Gi (bytes) or 500m (0.5).

    Raises:
        TargetError: The text is not a quantity; the message begins with `what`.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise TargetError(f"{what}={text!r} is not a quantity of Kubernetes, such as 4Gi or 512Mi.")
    return float(match[1]) * _UNITS[match[2] or ""]


def _pairs(title: str, key: str, words: list[str] | None) -> dict[str, str]:
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise TargetError(f"{title}: {key}={word!r} is not NAME=VALUE.")
        found[name] = value
    return found


def _template(title: str, path: str) -> Manifest:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TargetError(
            f"{title}: pod_template={path!r} can't be read: {error}. Give a YAML file of a pod."
        ) from error
    if isinstance(found, dict) and isinstance(found.get("template"), dict):
        found = found["template"]
    if not isinstance(found, dict) or not isinstance(spec := found.get("spec"), dict):
        raise TargetError(
            f"{title}: pod_template={path!r} has no `spec` of a pod. `kubectl explain pod.spec` lists its keys."
        )
    containers = spec.get("containers")
    if isinstance(containers, list) and containers and isinstance(containers[0], dict):
        containers[0]["name"] = "paceline"  # settings of the template's first container apply to the run's container
    return {key: cast("Json", json.loads(json.dumps(found[key]))) for key in ("metadata", "spec") if key in found}


@dataclass(frozen=True, kw_only=True)
class KubeContext:
    """A context of a kubeconfig, with the entries of its cluster and its user."""

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
    contexts = [str(entry.get("name")) for part in parts for entry in _entries(part, "contexts")]
    found = _named(parts, "contexts", "context", current)
    if found is None:
        listed = ", ".join(contexts) or "none"
        what = f"no context {current!r}" if current else "no current context"
        raise TargetError(f"{title}: {str(present[0])!r} has {what}; it has {listed}. Name one by --context.")
    cluster = _named(parts, "clusters", "cluster", str(found.get("cluster")))
    if cluster is None or not isinstance(cluster.get("server"), str):
        raise TargetError(f"{title}: context {current!r} names cluster {found.get('cluster')!r}, which has no server.")
    user = _named(parts, "users", "user", str(found.get("user"))) or {}
    return KubeContext(name=current, namespace=str(found.get("namespace") or "default"), cluster=cluster, user=user)


def _service_account() -> KubeContext:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return KubeContext(
        name=IN_CLUSTER,
        namespace=(_SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip(),
        cluster={"server": server, "certificate-authority": str(_SERVICE_ACCOUNT / "ca.crt")},
        user={"tokenFile": str(_SERVICE_ACCOUNT / "token")},
    )


def _read(title: str, path: Path) -> Mapping[str, Json]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TargetError(f"{title}: the kubeconfig {str(path)!r} can't be read: {error}.") from error
    if not isinstance(found, dict):
        raise TargetError(f"{title}: {str(path)!r} is not a kubeconfig. `kubectl config view` prints one.")
    for group, key in (("clusters", "cluster"), ("users", "user")):
        for entry in _entries(found, group):
            inner = entry.get(key)
            for name in _PATHS:
                if isinstance(inner, dict) and isinstance(value := inner.get(name), str) and value:
                    inner[name] = str(path.parent.absolute() / value)
    return found


def _entries(part: Mapping[str, Json], group: str) -> list[dict[str, Json]]:
    found = part.get(group)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _named(parts: list[Mapping[str, Json]], group: str, key: str, name: str) -> Mapping[str, Json] | None:
    """Return `key` of the kubeconfig's first `group` entry named `name`, or None."""
    for part in parts:
        for entry in _entries(part, group):
            inner = entry.get(key)
            if entry.get("name") == name and isinstance(inner, dict):
                return inner
    return None
