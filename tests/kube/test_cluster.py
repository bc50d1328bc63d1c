"""The cluster that `make kube` starts: users have the rights they should, pods have this Python, and nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.kube.cluster import ADMIN, EDITOR, GPU, NARROW, Access, Cluster, leavings, remove_groups

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("user", "verb", "resource", "is_allowed"),
    [
        (EDITOR, "create", "pods/exec", True),
        (EDITOR, "create", "pods/eviction", True),
        (EDITOR, "list", "nodes", False),
        (NARROW, "create", "jobs.batch", True),
        (NARROW, "get", "pods/log", True),
        (NARROW, "create", "secrets", True),
        (NARROW, "create", "pods/exec", False),
        (NARROW, "create", "pods/portforward", False),
        (NARROW, "list", "resourcequotas", False),
    ],
)
def test_kubernetes_allows_each_user_only_the_permissions_of_the_assigned_role(
    cluster: Cluster, user: str, verb: str, resource: str, is_allowed: bool
) -> None:
    resource, _, part = resource.partition("/")
    subresource = [f"--subresource={part}"] if part else []

    answer = cluster.kubectl("auth", "can-i", verb, resource, *subresource, user=user, check=False)

    assert answer.strip() == ("yes" if is_allowed else "no")


def test_two_gpu_pods_on_different_nodes_import_torch_and_resolve_the_name_of_the_first_pod(cluster: Cluster) -> None:
    cluster.apply(*_job(cluster, "pair", "import socket, torch; print(socket.gethostbyname('pair-0.pair'))"))
    try:
        cluster.kubectl("wait", "--for=condition=Complete", "job/pair", "--timeout=300s", timeout=320)
        pods = json.loads(cluster.kubectl("get", "pods", "--selector=app=pair", "--output=json"))["items"]
        addresses = [pod["status"]["podIP"] for pod in sorted(pods, key=lambda pod: pod["metadata"]["name"])]

        logs = [cluster.kubectl("logs", pod["metadata"]["name"]).strip() for pod in pods]

        assert logs == [addresses[0], addresses[0]]
        # Each node has two GPUs, so each pod needs a node of its own.
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    finally:
        cluster.kubectl("delete", "job,service", "pair", "--cascade=foreground")


def _job(cluster: Cluster, name: str, code: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return an Indexed Job of two pods with this machine's Python, two GPUs and a name for each, and its Service."""
    assert cluster.pod_template is not None
    spec = json.loads(cluster.pod_template.read_text())["spec"]
    main = spec["containers"][0]
    retry = f"import time\nfor _ in range(60):\n    try:\n        {code}\n        break\n    except OSError: time.sleep(0.5)"
    main |= {"image": cluster.image, "command": [str(Path(sys.executable).absolute()), "-c", retry]}
    main |= {"resources": {"limits": {GPU: "2"}}}
    spec |= {"restartPolicy": "Never", "subdomain": name, "terminationGracePeriodSeconds": 1}
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    job: dict[str, object] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "template": template},
    }
    service: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"app": name}, "publishNotReadyAddresses": True},
    }
    return service, job


def test_killing_the_test_cluster_program_ends_its_processes_and_removes_its_network(cluster: Cluster) -> None:
    argv = [sys.executable, "-m", "tests.kube.cluster"]
    top = Path(__file__).parents[2]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=top) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "KUBECONFIG=" in first
        folder = Path(first.strip().partition("=")[2]).parent
        other = Access({ADMIN: folder / f"{ADMIN}.conf"}, namespace=cluster.namespace, image=cluster.image)
        other.kubectl("run", "sleeper", f"--image={other.image}", "--command", "--", "sleep", "600")
        other.kubectl("wait", "--for=condition=Ready", "pod/sleeper")
        assert any("sleep 600" in line for line in leavings(folder))
        os.kill(process.pid, signal.SIGKILL)

    wait_until(lambda: not leavings(folder), "the killed cluster has gone", 180)
    # The killed cluster may leave its folder and empty control groups, which the next start would remove.
    shutil.rmtree(folder)
    remove_groups()
