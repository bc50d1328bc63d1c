"""The manifests of a run are those of the design, compared as data."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from paceline.job.job import Job
from paceline.targets.kubernetes import manifests
from paceline.targets.kubernetes.manifests import ObjectNames, ServiceContent, job_manifest, job_name, worker_resources
from paceline.targets.kubernetes.objects import CONTAINER
from paceline.targets.kubernetes.settings import KubernetesSettings

NAMES = ObjectNames(
    job="pl-digits-0a1b2c3d",
    run_id="digits_1700000000_0a1b2c3d",
    workspace="w",
    secrets={"library.0": "paceline-library-d-0", "source.0": "paceline-source-w-s-0"},
)


def settings(**values: Any) -> KubernetesSettings:
    return KubernetesSettings(**{"name": "k8s", "context": "c", "namespace": "lab", **values})


def job(**values: Any) -> Job:
    return Job(entry_script="train.py", **values)


def pod_of(manifest: Any) -> Any:
    return manifest["spec"]["template"]["spec"]


def test_job_has_a_pod_for_each_node_and_succeeds_when_the_pod_with_index_0_succeeds():
    spec: Any = job_manifest(job(node_count=3, distributed_backend="gloo"), settings(), NAMES)["spec"]

    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert "podFailurePolicy" not in spec
    assert spec["podReplacementPolicy"] == "TerminatingOrFailed"
    assert spec["suspend"] is False


def test_pods_satisfy_the_restricted_security_standard_and_get_no_service_account_token():
    pod = pod_of(job_manifest(job(), settings(), NAMES))
    (container,) = pod["containers"]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_constant_parts_of_the_manifests_agree_with_the_programs_in_the_pods():
    service = ObjectNames(job="digits-ab", run_id="service/digits", workspace="w", secrets={}, service="digits")
    content = ServiceContent(version="1", ticket={}, package=b"", drain_s=1, start_s=7)
    (container,) = pod_of(manifests.deployment_manifest(settings(), service, content, 1))["containers"]
    (of_run,) = pod_of(job_manifest(job(), settings(), NAMES))["containers"]

    assert container["name"] == of_run["name"] == CONTAINER
    mounted = {mount["mountPath"] for mount in of_run["volumeMounts"]}
    assert mounted == {manifests.TOP, manifests.START, manifests.CODE, "/dev/shm"}
    variables = {entry["name"] for entry in of_run["env"]}
    assert variables == {"HOME", manifests.ADDRESS_VARIABLE, manifests.FAILURES_VARIABLE}
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    ports = {probe["httpGet"]["port"] for probe in probes} | {port["containerPort"] for port in container["ports"]}
    assert ports == {manifests.POD_PORT}
    assert probes[0]["failureThreshold"] == 7


def test_pod_resource_requests_equal_its_limits_and_grow_with_the_workers_per_node():
    amounts = worker_resources(job(process_count_per_node=4, use_gpu=True, distributed_backend="nccl"), settings())
    (container,) = pod_of(job_manifest(job(), settings(), NAMES))["containers"]

    assert amounts == {"cpu": "4000m", "memory": "8192Mi", "nvidia.com/gpu": "4"}
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_shared_memory_is_as_large_as_the_memory_limit():
    pod = pod_of(job_manifest(job(), settings(memory_per_worker="3Gi"), NAMES))

    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3072Mi"}} in pod["volumes"]


def test_pods_mount_the_persistent_volume_claim_of_the_target_settings():
    pod = pod_of(job_manifest(job(), settings(volume="shared"), NAMES))

    assert {"name": "volume", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]
    assert {"name": "volume", "mountPath": "/paceline/volume"} in pod["containers"][0]["volumeMounts"]


def test_gpu_pods_tolerate_the_taint_of_the_gpu_resource():
    pod = pod_of(job_manifest(job(use_gpu=True), settings(gpu_resource="amd.com/gpu"), NAMES))

    assert {"key": "amd.com/gpu", "operator": "Exists"} in pod["tolerations"]


def test_pods_tolerate_unreachable_or_not_ready_nodes_for_5_seconds():
    tolerated = {
        one["key"]: one.get("tolerationSeconds")
        for one in pod_of(job_manifest(job(), settings(), NAMES))["tolerations"]
    }

    assert tolerated == {"node.kubernetes.io/not-ready": 5, "node.kubernetes.io/unreachable": 5}


def test_pod_annotations_prevent_autoscaler_eviction_and_mesh_sidecars():
    template: Any = job_manifest(job(), settings(), NAMES)["spec"]

    annotations = template["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    assert template["template"]["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def test_labels_and_annotations_of_the_target_are_on_every_object():
    given = settings(label=["team=vision"], annotation=["cost=7"])
    made = [
        job_manifest(job(), given, NAMES),
        manifests.service_manifest(given, NAMES, "u"),
        manifests.start_manifest(given, NAMES, "u", {}),
        manifests.content_manifest(given, "n", "library", "w", b"", 1),
    ]

    metadata: list[Any] = [one["metadata"] for one in made]
    metadata.append(made[0]["spec"]["template"]["metadata"])  # type: ignore[index,call-overload]
    assert all(one["labels"]["team"] == "vision" and one["annotations"]["cost"] == "7" for one in metadata)


def test_pod_template_of_the_user_is_merged_into_the_pod_and_generated_fields_are_kept():
    template = {
        "spec": {
            "containers": [
                {
                    "name": "paceline",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            ],
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            "hostNetwork": True,
        }
    }
    pod = pod_of(job_manifest(job(), settings(template=template), NAMES))
    (container,) = pod["containers"]

    assert pod["hostNetwork"] is True
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    assert {"name": "HOME", "value": "/paceline/home"} in container["env"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]][-1] == "/data"
    assert [volume["name"] for volume in pod["volumes"]] == ["work", "start", "code", "shm", "data"]


def test_job_for_a_kueue_queue_is_created_suspended_with_the_queue_label():
    made: Any = job_manifest(job(), settings(queue="lab-queue"), NAMES)

    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lab-queue"
    assert made["spec"]["suspend"] is True


def test_keep_entrypoint_setting_keeps_the_entrypoint_of_the_image():
    (container,) = pod_of(job_manifest(job(), settings(keep_entrypoint=True), NAMES))["containers"]

    assert "command" not in container
    assert container["args"][-1] == "/etc/paceline/start/boot.py"


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("digits_1700000000_0a1b2c3d", "pl-digits-0a1b2c3d"),
        (
            "My.Long_Experiment-Name_with_thirty_and_more_1700000000_0a1b2c3d",
            "pl-my-long-experiment-name-with-t-0a1b2c3d",
        ),
        ("___1700000000_0a1b2c3d", "pl-run-0a1b2c3d"),
    ],
)
def test_job_name_is_a_valid_dns_label_with_room_for_a_pod_index(run_id: str, name: str):
    assert job_name(run_id) == name
    assert len(f"{name}-99999") <= 63


def test_content_is_split_into_parts_that_fit_into_a_secret():
    parts = manifests.parts_of(b"x" * (2 * manifests.SECRET_BYTES + 1))

    assert [len(part) for part in parts] == [manifests.SECRET_BYTES, manifests.SECRET_BYTES, 1]
    made: Any = manifests.content_manifest(settings(), "n", "library", "w", parts[2], 3)
    assert base64.b64decode(made["data"]["part"]) == b"x"
    assert made["immutable"] is True
