"""A service on a real cluster: a Deployment and a Service, an update that is undone, and an end that leaves no object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError, ServiceFailedError, TargetError
from paceline.services import store
from paceline.services.record import HEALTHY
from paceline.services.service import Service
from paceline.workspace import Workspace
from tests.helpers import wait_until, write_tree
from tests.kube.cluster import EDITOR, NARROW, Cluster
from tests.kube.lab import KubeLab, wait_for_end
from tests.kube.test_leftovers import prune
from tests.services.conftest import SCRIPT, looking_after, supervisors

pytest.importorskip("paceline.targets.kubernetes", reason="needs the compute target kubernetes")

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1200)]

#: This program sends a request to the address in the first argument, with the key in the second, and prints the answer.
CALLS = """
import sys, urllib.request
headers = {"Authorization": f"Bearer {sys.argv[2]}"}
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], b'{"x": [1, 2]}', headers), timeout=60).read().decode())
"""
BROKEN = """
def init():
    raise OSError("no such weights")

def run(data):
    return data
"""
#: The kinds of objects that the tests check after a service was deleted. Secrets with Paceline's own code stay, because
#: runs and other services use them.
KINDS = "deployments,replicasets,pods,services,secrets,jobs"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """score.py and two models, which multiply by 2 and by 3, and a script that can't start."""
    files = {"score.py": SCRIPT, "two.txt": "2", "three.txt": "3"}
    return write_tree(tmp_path / "src", {**files, "broken.py": BROKEN})


@pytest.fixture
def workspace(lab: KubeLab) -> Iterator[Workspace]:
    """The lab's workspace. In the end no object of its services may be left."""
    found = Workspace(lab.workspace_dir)
    yield found
    for folder in store.all_folders(found.path):
        Service(found, folder.name).delete()
    wait_until(lambda: left(lab) == [], "no object of the services is left in the namespace", 240)


def left(lab: KubeLab) -> list[str]:
    """Return the objects of services in the namespace, without the Secrets of the library."""
    found = lab.access.names(KINDS, label="app.kubernetes.io/managed-by=paceline")
    return [name for name in found if "paceline-library-" not in name]


def deployed(workspace: Workspace, source: Path, name: str = "digits", **more: Any) -> Service:
    """A service on the cluster that answers."""
    model = source / more.pop("model", "two.txt")
    script = source / more.pop("script", "score.py")
    service = Service.deploy(workspace, name, model, entry_script=script, target="k8s", **more)
    try:
        service.wait_for_deployment(timeout_sec=600)
    except ServiceFailedError as error:
        raise ServiceFailedError(f"{error}\n{service.get_logs()}") from error
    return service


def answer_of(service: Service) -> object:
    """Return the service's answer, or None while its port is closed."""
    try:
        return service.run({"x": [1]})["y"]
    except EngineError:
        return None


def kill_supervisors(service: Service) -> None:
    """Kill the guardian and the supervisor of a service, and wait until they are gone."""
    for pid in supervisors(service):
        os.kill(pid, signal.SIGKILL)
    folder = store.folder_of(service.workspace.path, service.name)
    wait_until(lambda: not looking_after(folder), "the supervisors are dead", 60)


def deployment(lab: KubeLab, name: str = "digits") -> Any:
    return json.loads(lab.access.kubectl("get", "deployment", name, "--output=json"))


def pods(lab: KubeLab, name: str = "digits") -> list[Any]:
    """Return the service's pods that Kubernetes is not ending."""
    found = lab.access.kubectl("get", "pods", f"--selector=paceline/service={name}", "--output=json")
    return [pod for pod in json.loads(found)["items"] if "deletionTimestamp" not in pod["metadata"]]


def test_service_is_called_scaled_updated_and_deleted(lab: KubeLab, workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source, workers=2)
    assert service.run({"x": [1, 2]})["y"] == [2, 4]
    assert deployment(lab)["status"]["readyReplicas"] == 2
    first = {pod["metadata"]["name"] for pod in pods(lab)}
    wait_until(lambda: all(f"{pod}: " in service.get_logs() for pod in first), "the log has lines of both pods", 120)

    service.scale(3)
    assert first < {pod["metadata"]["name"] for pod in pods(lab)}, "the other pods go on"

    service.update(source / "three.txt")
    assert service.run({"x": [1, 2]})["y"] == [3, 6]
    assert service.record().revision == 2
    assert not first & {pod["metadata"]["name"] for pod in pods(lab)}
    assert sum("paceline-package-" in name for name in left(lab)) == 1, "the first revision's Secrets are gone"

    service.rollback()
    assert service.run({"x": [1, 2]})["y"] == [2, 4]
    service.regen_key("primary")
    wait_until(lambda: service.record().revision == 1 and service.run({"x": [1]})["y"] == [2], "it answers", 300)

    service.delete()
    wait_until(lambda: left(lab) == [], "no object is left", 240)


def test_revision_that_can_not_start_is_undone_and_no_request_is_lost(
    lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    service = deployed(workspace, source)
    before = deployment(lab)["spec"]["template"]
    answers: list[object] = []
    is_over = threading.Event()

    def calls() -> None:
        while not is_over.is_set():
            try:
                answers.append(service.run({"x": [1]})["y"])
            except Exception as error:  # append the error, so that the comparison of the list shows it
                answers.append(error)

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        with pytest.raises(ServiceFailedError, match="no such weights"):
            service.update(entry_script=source / "broken.py")
        count = len(answers)
        wait_until(lambda: len(answers) > count, "a further request is answered", 60)
        service.update(source / "three.txt")
        wait_until(lambda: answers[-1] == [3], "the new revision answers", 60)
    finally:
        is_over.set()
        thread.join()

    assert [answer for answer in answers if answer not in ([2], [3])] == []
    assert service.record().state == HEALTHY
    assert deployment(lab)["spec"]["template"] != before


def test_service_that_can_not_start_fails_with_the_reason_and_leaves_no_object(
    lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    with pytest.raises(ServiceFailedError, match="no such weights"):
        deployed(workspace, source, script="broken.py")
    wait_until(lambda: left(lab) == [], "no object is left", 240)

    lab.add(image="example.test/nothing:1")
    other = Service.deploy(workspace, "other", source / "two.txt", entry_script=source / "score.py", target="k8s")
    wait_until(lambda: "the image can't be pulled" in other.get_logs(), "the log says why the service waits", 240)
    other.delete()


def test_pods_go_on_while_the_supervisor_is_dead_and_the_next_one_adopts_them(
    lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    service = deployed(workspace, source)
    (pod,) = pods(lab)
    kill_supervisors(service)

    wait_until(lambda: answer_of(service) == [2], "a reader has restarted the supervisor", 240)
    wait_until(lambda: service.state == HEALTHY, "the next supervisor has adopted the pods", 120)

    assert [one["metadata"]["uid"] for one in pods(lab)] == [pod["metadata"]["uid"]]
    kill_supervisors(service)
    service.delete()
    wait_until(lambda: left(lab) == [], "a service without a supervisor leaves no object", 240)


def test_lost_pod_is_replaced_and_a_deleted_deployment_is_created_again(
    lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    service = deployed(workspace, source)
    (pod,) = pods(lab)
    lab.access.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    assert service.run({"x": [1]}, timeout_s=240)["y"] == [2]

    lab.access.kubectl("delete", "deployment", "digits")
    wait_until(lambda: service.record().restarts == 1, "the supervisor has seen the deletion", 120)
    wait_until(lambda: service.state == HEALTHY, "it is served again", 240)
    assert service.run({"x": [1]}, timeout_s=240)["y"] == [2]


def test_programs_in_the_cluster_reach_the_pods_of_the_service(
    lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    service = deployed(workspace, source)
    slices = lab.access.kubectl(
        "get", "endpointslices", "--selector=kubernetes.io/service-name=digits", "--output=json"
    )
    (found,) = json.loads(slices)["items"]
    (endpoint,), (port,) = found["endpoints"], found["ports"]
    assert endpoint["conditions"]["ready"] is True
    assert [endpoint["targetRef"]["name"]] == [pod["metadata"]["name"] for pod in pods(lab)]

    # Call the endpoint directly: the test cluster has no kube-proxy, which would lead the Service's address to it.
    uri = f"http://{endpoint['addresses'][0]}:{port['port']}/score"
    run = lab.submit(CALLS, arguments=[uri, service.get_keys()[0]])

    assert wait_for_end(run) == "Completed"
    assert '"y": [2.0, 4.0]' in run.folder.rank_log(1, 0).read_text().replace('"y":[', '"y": [').replace(",4", ", 4")
    # The lookup of a DNS name needs only CoreDNS, and no kube-proxy.
    named = lab.submit("import socket; print(socket.gethostbyname('digits.lab'))")
    assert wait_for_end(named) == "Completed"
    service_ip = lab.access.kubectl("get", "service", "digits", "--output=jsonpath={.spec.clusterIP}")
    assert service_ip in named.folder.rank_log(1, 0).read_text()


def test_prune_keeps_the_objects_of_services_and_removes_those_of_lost_ones(
    lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    service = deployed(workspace, source)
    prune(lab, "--yes")
    assert service.run({"x": [1]})["y"] == [2]
    pod = pods(lab)[0]["metadata"]["name"]
    lab.access.kubectl("delete", "pod", pod, "--wait=false")  # the new pod must read all Secrets again
    wait_until(lambda: [one["metadata"]["name"] for one in pods(lab)] != [pod], "a successor is there", 120)
    assert service.run({"x": [1]}, timeout_s=240)["y"] == [2]

    kill_supervisors(service)
    folder = store.folder_of(workspace.path, "digits")
    folder.path.rename(folder.path.with_name(".lost"))

    assert "removed deployment/digits" in prune(lab, "--yes")
    wait_until(lambda: left(lab) == [], "no object is left", 240)


def test_user_without_rights_on_deployments_is_refused_and_the_smallest_role_suffices_with_them(
    cluster: Cluster, lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    lab.add(NARROW)
    with pytest.raises(TargetError, match=r"this user lacks in namespace 'lab': create deployments, .*compute doctor"):
        deployed(workspace, source)
    assert store.all_folders(workspace.path) == []
    verbs = "create,get,list,watch,update,delete"
    for name, allowed, resource in (
        ("services", verbs, "deployments.apps"),
        ("forward", "create,get", "pods/portforward"),
    ):
        cluster.kubectl("create", "role", name, f"--verb={allowed}", f"--resource={resource}")
        cluster.kubectl("create", "rolebinding", name, f"--role={name}", f"--user={NARROW}")
    try:
        service = deployed(workspace, source)
        assert service.run({"x": [1]})["y"] == [2]
        service.update(source / "three.txt")
        assert service.run({"x": [1]})["y"] == [3]
        service.delete()
        wait_until(lambda: left(lab) == [], "no object is left", 240)
    finally:
        cluster.kubectl("delete", "role,rolebinding", "services", "forward")


def test_pods_of_a_service_run_where_pod_security_is_restricted(
    cluster: Cluster, lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    label = "pod-security.kubernetes.io/enforce"
    cluster.kubectl("label", "namespace", "lab", f"{label}=restricted")
    try:
        with pytest.raises(TargetError, match=r"would refuse the pods.*restricted volume types"):
            deployed(workspace, source)  # these pods mount folders of the host, for packages of this machine
        lab.add(pod_template=None, python="python3")
        service = Service.deploy(
            workspace, "digits", source / "two.txt", entry_script=source / "score.py", target="k8s"
        )
        wait_until(lambda: pods(lab), "Kubernetes has created the pod", 120)
        service.delete()
    finally:
        cluster.kubectl("label", "namespace", "lab", f"{label}-")


def test_command_line_deploys_and_calls_a_service_on_the_cluster(
    lab: KubeLab, workspace: Workspace, source: Path
) -> None:
    def command(*words: str) -> str:
        argv = [sys.executable, "-m", "paceline", "service", *words]
        environment = {**os.environ, "PACELINE_WORKSPACE": str(lab.workspace_dir)}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    told = command(
        *("deploy", "digits", "--model", str(source / "two.txt"), "--entry", str(source / "score.py")),
        *("--compute", "k8s", "--env", "A=B"),
    )
    assert "http://digits.lab/score" in told

    assert '"y"' in command("call", "digits", '{"x": [1]}')
    assert "digits" in command("list")
    assert "is deleted" in command("delete", "digits")
    assert lab.access.kubeconfig(EDITOR).exists()
