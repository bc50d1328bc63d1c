"""The objects of a service in the cluster: they are created, replaced, undone and deleted, and their pods' state is read."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("lightkube")

from paceline.errors import TargetError
from paceline.targets.kubernetes import deployment, manifests
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster
from paceline.targets.kubernetes.deployment import ServiceObjects
from paceline.targets.kubernetes.examine import RULES
from paceline.targets.kubernetes.manifests import ServiceContent
from paceline.targets.kubernetes.settings import KubernetesSettings

SETTINGS = KubernetesSettings(name="k8s", context="c", namespace="lab")


class Namespace:
    """A namespace with the objects that the tested code creates, and pods that a test puts there."""

    title, namespace = SETTINGS.title, "lab"

    def __init__(self, *, rules: Sequence[tuple[str, Sequence[str], Sequence[str]]] = RULES) -> None:
        self.objects: dict[tuple[str, str], Any] = {}
        self.warnings: list[str] = []
        self._rules = [{"apiGroups": [one[0]], "resources": one[1], "verbs": one[2]} for one in rules]
        self._version = 0

    def review(self, *_: object) -> dict[str, Any]:
        return {"resourceRules": self._rules}

    def get(self, kind: str, name: str, *, only_metadata: bool = False) -> Any:
        return self.objects.get((kind, name))

    def create(self, kind: str, body: Any, *, dry_run: bool = False) -> tuple[Any, list[str]]:
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            raise ApiRefusedError("exists", 409)
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{name}", "generation": 1}}
        if not dry_run:
            self.objects[kind, name] = made
        return made, self.warnings

    def ensure(self, kind: str, body: Any) -> None:
        if (kind, body["metadata"]["name"]) not in self.objects:
            self.create(kind, body)

    def replace(self, kind: str, name: str, body: Any) -> Any:
        assert "uid" not in body["metadata"]
        about = self.objects[kind, name]["metadata"]
        changed = {**body["metadata"], "uid": about["uid"], "generation": about["generation"] + 1}
        self.objects[kind, name] = {**body, "metadata": changed}
        return self.objects[kind, name]

    def delete(self, kind: str, name: str) -> None:
        self.objects.pop((kind, name), None)

    def items(self, kind: str, **_: object) -> list[Any]:
        return [one for (of, _), one in self.objects.items() if of == kind]

    def listed(self, kind: str, **_: object) -> tuple[list[Any], str]:
        return self.items(kind), "1"

    def watch(self, *_: object, **__: object) -> Iterator[tuple[str, Any]]:
        yield from ()

    def names(self, kind: str) -> set[str]:
        return {name for of, name in self.objects if of == kind}

    def deployment(self) -> Any:
        return self.objects["deployments", "digits"]

    def seen(self, **counts: int) -> None:
        """Set the Deployment's status as if the controllers had seen its last change."""
        found = self.deployment()
        found["status"] = {"observedGeneration": found["metadata"]["generation"], **counts}

    def add_pod(self, name: str, **status: Any) -> None:
        labels = self.deployment()["spec"]["template"]["metadata"]["labels"]
        self.objects["pods", name] = {"metadata": {"name": name, "labels": labels}, "status": status}


READY = [{"type": "Ready", "status": "True"}]


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "paceline", **state}]


def objects_in(namespace: Namespace, workspace: str = "workspace-1") -> ServiceObjects:
    return ServiceObjects(cast("Cluster", namespace), SETTINGS, "digits", workspace)


def content(version: str = "1-0", package: bytes = b"models") -> ServiceContent:
    ticket = {"program": "paceline.services.pod", "environment": {}}
    return ServiceContent(version=version, ticket=ticket, package=package, drain_s=35.0, start_s=1200.0)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(deployment.submission, "library_digest", lambda _: "digest")
    monkeypatch.setattr(deployment.submission, "packed_library", lambda _: b"library")
    return Namespace()


def test_deployment_service_and_secrets_are_created_and_owned_by_the_deployment(namespace: Namespace) -> None:
    noted: list[str] = []

    assert objects_in(namespace).present() is None

    objects_in(namespace).put(content(), 2, noted.extend)

    assert namespace.names("deployments") == namespace.names("services") == {"digits"}
    assert namespace.names("secrets") == {"paceline-library-digest-0", *noted}
    start = next(name for name in noted if name.startswith("digits-"))
    for kind, name in (("services", "digits"), ("secrets", start)):
        (owner,) = namespace.get(kind, name)["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Deployment", "uid-digits")
    ticket = json.loads(base64.b64decode(namespace.get("secrets", start)["data"]["ticket.json"]))
    assert ticket == {"program": "paceline.services.pod", "environment": {}, "parts": 1, "library": "digest"}
    present = objects_in(namespace).present()
    assert present is not None
    assert present[:2] == ("1-0", 2)


def test_service_port_leads_to_the_pods_of_the_deployment(namespace: Namespace) -> None:
    objects_in(namespace).put(content(), 1, lambda names: None)

    spec = namespace.get("services", "digits")["spec"]

    assert spec["selector"] == namespace.deployment()["spec"]["selector"]["matchLabels"]
    assert spec["selector"].items() <= namespace.deployment()["spec"]["template"]["metadata"]["labels"].items()
    assert [(port["port"], port["targetPort"]) for port in spec["ports"]] == [(80, 8000)]


def test_equal_content_gives_the_same_pod_template_and_other_content_another_one(namespace: Namespace) -> None:
    found = objects_in(namespace)
    found.put(content(), 1, lambda names: None)
    first = namespace.deployment()["spec"]["template"]

    found.put(content(), 3, lambda names: None)
    scaled = namespace.deployment()["spec"]
    found.put(content("2-0", b"other models"), 3, lambda names: None)

    assert scaled["template"] == first
    assert scaled["replicas"] == 3
    assert namespace.deployment()["spec"]["template"] != first


def test_earlier_deployment_is_restored_and_the_secrets_of_the_refused_content_are_deleted(
    namespace: Namespace,
) -> None:
    found, noted = objects_in(namespace), list[str]()
    found.put(content(), 1, noted.extend)
    kept, template = list(noted), namespace.deployment()["spec"]["template"]

    present = found.present()
    found.put(content("2-0", b"other models"), 1, noted.extend)
    used = namespace.deployment()["metadata"]["annotations"]["paceline/secrets"].split(",")
    assert set(used) >= {name for name in noted if name.startswith("paceline-package")}, (
        "prune spares the old pods' Secrets"
    )
    assert present is not None
    found.replace(present[2])

    assert namespace.deployment()["spec"]["template"] == template
    assert sorted(found.remove_secrets(noted)) == sorted(kept)
    assert namespace.names("secrets") == {"paceline-library-digest-0", *kept}


def test_secret_that_prune_deletes_during_a_deployment_is_created_again(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, noted = objects_in(namespace), list[str]()

    def create(kind: str, body: Any, **values: Any) -> Any:
        if kind == "deployments":
            for name in noted:
                namespace.delete("secrets", name)
        return Namespace.create(namespace, kind, body, **values)

    monkeypatch.setattr(namespace, "create", create)
    found.put(content(), 1, noted.extend)

    assert namespace.names("secrets") == {"paceline-library-digest-0", *noted}


def test_models_that_are_too_large_for_secrets_are_refused(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_MOST_PARTS", 1)

    with pytest.raises(TargetError, match=r"take 2 MiB packed.*Let init\(\) read large files from a volume"):
        objects_in(namespace).put(content(package=bytes(2 << 20)), 1, lambda names: None)

    assert namespace.objects == {}


def test_name_that_another_workspace_uses_is_refused(namespace: Namespace) -> None:
    objects_in(namespace, "workspace-2").put(content(), 1, lambda names: None)

    with pytest.raises(TargetError, match="has a service 'digits', which is not of this workspace"):
        objects_in(namespace).check()
    with pytest.raises(TargetError, match="has a deployment 'digits', which is not of this workspace"):
        objects_in(namespace).remove([])


@pytest.mark.parametrize("verb", RULES[-1][2])
def test_missing_right_on_deployments_is_refused_with_its_verb(verb: str) -> None:
    group, resources, verbs = RULES[-1]
    namespace = Namespace(rules=[*RULES[:-1], (group, resources, [one for one in verbs if one != verb])])

    with pytest.raises(TargetError, match=rf"lacks in namespace 'lab': {verb} deployments\. `paceline compute doctor`"):
        objects_in(namespace).check()


def test_pod_security_warning_refuses_the_service_before_anything_is_created() -> None:
    namespace = Namespace()
    objects_in(namespace).check()
    namespace.warnings = ['would violate PodSecurity "restricted:latest": runAsNonRoot != true']

    with pytest.raises(TargetError, match="would refuse the pods"):
        objects_in(namespace).check()

    assert namespace.objects == {}


def test_change_is_done_once_the_controllers_have_seen_it_and_all_pods_answer(namespace: Namespace) -> None:
    found = objects_in(namespace)
    assert not found.look().exists
    found.put(content(), 2, lambda names: None)
    namespace.add_pod("digits-a", conditions=READY, containerStatuses=container(state={"running": {}}))

    assert not objects_in(namespace).look().is_done, "the controllers have not seen it"
    namespace.seen(replicas=2, updatedReplicas=2, availableReplicas=1)
    half = objects_in(namespace).look()
    namespace.seen(replicas=2, updatedReplicas=2, availableReplicas=2)

    assert (half.is_done, half.ready, half.started) == (False, ["digits-a"], ["digits-a"])
    assert half.waiting == "1 of 2 pods answer"
    assert objects_in(namespace).look().is_done


def test_change_is_not_done_while_an_earlier_pod_is_left(namespace: Namespace) -> None:
    objects_in(namespace).put(content(), 1, lambda names: None)
    namespace.seen(replicas=2, updatedReplicas=1, availableReplicas=2)

    assert not objects_in(namespace).look().is_done


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        ({"state": {"waiting": {"reason": "ImagePullBackOff", "message": "x: not found"}}}, "image can't be pulled"),
        ({"state": {"terminated": {"exitCode": 1, "message": "paceline: init() failed"}}}, "init() failed"),
        (
            {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 3}}},
            "exit code 3",
        ),
    ],
    ids=["image", "ended", "ends again and again"],
)
def test_pod_that_can_not_start_fails_the_change(namespace: Namespace, status: Any, failure: str) -> None:
    objects_in(namespace).put(content(), 1, lambda names: None)
    namespace.add_pod("digits-a", containerStatuses=container(**status))
    assert objects_in(namespace).look().failure is None, "the controllers have not seen the change"
    namespace.seen()

    assert failure in str(objects_in(namespace).look().failure)


def test_pod_that_kubernetes_evicts_does_not_fail_the_change(namespace: Namespace) -> None:
    objects_in(namespace).put(content(), 1, lambda names: None)
    namespace.seen()
    ended = container(state={"terminated": {"exitCode": 143}})
    namespace.add_pod("digits-a", conditions=[{"type": "DisruptionTarget", "status": "True"}], containerStatuses=ended)

    assert objects_in(namespace).look().failure is None


def test_refused_pods_are_the_reason_why_a_service_waits(namespace: Namespace) -> None:
    objects_in(namespace).put(content(), 1, lambda names: None)
    namespace.seen()
    said = 'pods "digits-a" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
    condition = {"type": "ReplicaFailure", "status": "True", "message": said}
    namespace.deployment()["status"]["conditions"] = [condition]

    waiting = objects_in(namespace).look().waiting

    assert waiting == "0 of 1 pods answer, quota 'q' is used up: the pod needs pods=1; used pods=1 of pods=1"


def test_deletion_takes_secrets_along_and_is_over_once_the_pods_have_gone(namespace: Namespace) -> None:
    found, noted = objects_in(namespace), list[str]()
    found.put(content(), 1, noted.extend)
    namespace.add_pod("digits-a")

    assert not found.remove(noted)
    namespace.delete("pods", "digits-a")

    assert found.remove(noted)
    assert namespace.names("deployments") == set()
    assert namespace.names("secrets") == {"paceline-library-digest-0"}, "runs share the library"


def test_pods_of_services_satisfy_the_restricted_security_standard() -> None:
    names = manifests.ObjectNames(
        job="digits-ab", run_id="service/digits", workspace="w", secrets={"library.0": "l"}, service="digits"
    )
    made: Any = manifests.deployment_manifest(SETTINGS, names, content(), 1)
    pod = made["spec"]["template"]["spec"]

    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Always", False)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["terminationGracePeriodSeconds"] > 35 + 3


def test_service_is_ready_after_its_deleted_deployment_was_created_again(namespace: Namespace) -> None:
    found = objects_in(namespace)
    for version in ("1-0", "2-0", "3-0"):
        found.put(content(version), 1, lambda names: None)
    namespace.delete("deployments", "digits")

    found.put(content("3-0"), 1, lambda names: None)

    namespace.seen(replicas=1, updatedReplicas=1, availableReplicas=1)
    assert found.look().is_done


# --- logs of the pods


def test_only_pods_whose_container_has_run_have_a_log(namespace: Namespace) -> None:
    objects_in(namespace).put(content(), 3, lambda names: None)
    namespace.add_pod("digits-a")
    namespace.add_pod("digits-b", containerStatuses=container(state={"waiting": {"reason": "ContainerCreating"}}))
    namespace.add_pod("digits-c", containerStatuses=container(state={"running": {}}))
    waits = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 3}}}
    namespace.add_pod("digits-d", containerStatuses=container(**waits))

    assert objects_in(namespace).look().started == ["digits-c", "digits-d"]


def test_pauses_between_requests_for_a_silent_log_grow_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], list[float]()
    monkeypatch.setattr(deployment.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(deployment.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    class Silent:
        def follow_log(self, *_: str) -> Iterator[tuple[str, str]]:
            asked.append(clock[0])
            if len(asked) == 8:
                logs._pods = set()
            if len(asked) == 7:
                yield "1", "a line"

    logs = deployment.PodLogs(cast("Cluster", Silent()), lambda text: None)
    logs._pods = {"digits-a"}
    logs._print("digits-a")

    assert [after - before for before, after in itertools.pairwise(asked)] == [2, 4, 8, 16, 32, 60, 2]
