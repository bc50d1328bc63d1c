"""Faults on a real cluster: no run is lost, the report has the cause, and no object is left (`lab` looks at the end)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import paceline as pl
from paceline.runs import remote_status, states
from tests.engines.lab import log_text
from tests.helpers import wait_until
from tests.kube.cluster import QUEUE, Cluster
from tests.kube.lab import COUNTS, TWO, KubeLab, node_of, pods_of, wait_for_attempt, wait_for_end

pytest.importorskip("paceline.targets.kubernetes", reason="needs the compute target kubernetes")

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1200)]

#: Arguments of runs: SHORT takes half a minute, LONG takes two minutes, and the first attempt of UNTIL_A_FAULT lasts
#: until a fault ends it.
SHORT: Mapping[str, Any] = {"arguments": ["300"], "max_restarts": 2, **TWO}
LONG: Mapping[str, Any] = {"arguments": ["1200"], "max_restarts": 2, **TWO}
UNTIL_A_FAULT: Mapping[str, Any] = {"arguments": ["50", "2"], "max_restarts": 0, **TWO}


def causes(run: pl.Run) -> list[str | None]:
    """Return the cause of each attempt's end; None for one that ended well."""
    return [attempt.cause for attempt in run.record().attempts]


def wait_for_reason(run: pl.Run, part: str) -> None:
    """Return once a run that waits says why, in these words."""

    def says() -> bool:
        record = run.record()
        assert not record.is_terminal, record.failure
        return part in (record.waiting_for or "")

    wait_until(says, f"{run.id} waits for {part!r}, not {run.record().waiting_for!r}", 180)


@contextlib.contextmanager
def api_away(cluster: Cluster, *flags: str) -> Iterator[None]:
    """Stop the API server, and start it again with these flags."""
    cluster.stop_api()
    try:
        yield
    finally:
        cluster.start_api(*flags)


# --- tests with pods that Kubernetes ends


@pytest.mark.parametrize("how", ["eviction", "drain", "preemption"])
def test_worker_on_a_disrupted_node_saves_a_checkpoint_and_resumes_on_another_node(
    cluster: Cluster, lab: KubeLab, how: str
) -> None:
    lab.add(cpus_per_worker=1.2)  # each pod needs a node of its own, and one node stays free
    run = lab.submit(COUNTS, **UNTIL_A_FAULT)
    wait_for_attempt(run, 1)
    pod = pods_of(lab, run)[1]
    node = node_of(lab, pod)
    try:
        if how == "eviction":
            cluster.evict(pod)
        elif how == "drain":
            cluster.drain(node)
        else:
            cluster.apply(*_urgent(cluster, node))
        assert wait_for_end(run) == "Completed"
    finally:
        cluster.uncordon(node)
        cluster.kubectl("delete", "pod/urgent", "priorityclass/urgent", "--ignore-not-found", "--grace-period=1")

    assert causes(run) == ["preempted", None]
    assert f"Kubernetes ends pod {pod.rpartition('-')[0]}" in run.folder.driver_log.read_text()
    assert "attempt 1 was told to end" in run.folder.rank_log(1, 1).read_text()
    assert "attempt 2 goes on from 0" not in log_text(run, 1)


def _urgent(cluster: Cluster, node: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return a pod of high priority that needs more than half of a node, and its priority class."""
    priority: dict[str, object] = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    container = {"name": "main", "image": cluster.image, "command": ["sleep", "600"]}
    pod: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "urgent"},
        "spec": {
            "priorityClassName": "urgent",
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [{**container, "resources": {"requests": {"cpu": "1.2"}}}],
        },
    }
    return priority, pod


def test_run_restarts_after_its_supervisor_pod_is_evicted(cluster: Cluster, lab: KubeLab) -> None:
    run = lab.submit(COUNTS, **UNTIL_A_FAULT)
    wait_for_attempt(run, 1)

    cluster.evict(pods_of(lab, run)[0])

    assert wait_for_end(run) == "Completed"
    assert causes(run) == ["preempted", None]


def test_evicted_run_with_one_pod_restarts_and_uses_up_one_of_its_max_restarts(cluster: Cluster, lab: KubeLab) -> None:
    run = lab.submit(COUNTS, arguments=["50", "2"], max_restarts=1)
    wait_for_attempt(run, 1, ranks=1)

    cluster.evict(pods_of(lab, run)[0])

    assert wait_for_end(run) == "Completed"
    assert causes(run) == ["node_lost", None]


# --- tests with lost nodes


def test_elastic_run_continues_without_a_node_that_is_cut_off(cluster: Cluster, lab: KubeLab) -> None:
    lab.add(cpus_per_worker=1.2, silence_s=5)
    run = lab.submit(COUNTS, **{**UNTIL_A_FAULT, "node_count": "1..2"})
    wait_for_attempt(run, 1)
    node = node_of(lab, pods_of(lab, run)[1])

    cluster.cut(node)
    try:
        assert wait_for_end(run) == "Completed"
    finally:
        cluster.heal(node)
        cluster.wait_for_nodes()

    assert causes(run) == ["node_lost", None]
    assert "attempt 2 goes on from" in log_text(run)


def test_run_continues_while_a_kubelet_is_down(cluster: Cluster, lab: KubeLab) -> None:
    lab.add(cpus_per_worker=1.2)
    run = lab.submit(COUNTS, **{**LONG, "arguments": ["700"]})
    wait_for_attempt(run, 1)
    node = node_of(lab, pods_of(lab, run)[1])

    cluster.stop_kubelet(node)
    try:
        assert wait_for_end(run) == "Completed"
    finally:
        cluster.start_kubelet(node)
        cluster.wait_for_nodes()

    assert causes(run)[-1] is None


def test_ended_run_with_an_unreadable_log_is_not_responding_until_its_kubelet_is_back(
    cluster: Cluster, lab: KubeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lab.submit("print('done')")
    job = f"job/{remote_status.engine(run.folder)['job_id']}"
    cluster.kubectl("wait", "--for=condition=Complete", job, "--timeout=300s", timeout=320)
    selector = f"--selector=job-name={job.partition('/')[2]}"
    node = cluster.kubectl("get", "pods", selector, "--output=jsonpath={.items[0].spec.nodeName}")

    cluster.stop_kubelet(node)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(remote_status, "_GRACE_S", 0.0)
            for _ in range(3):
                assert run.status == states.NOT_RESPONDING, run.record().failure
                assert "its result is not here yet" in (run.record().waiting_for or "")
                time.sleep(1)
    finally:
        cluster.start_kubelet(node)
        cluster.wait_for_nodes()

    assert wait_for_end(run) == "Completed"


# --- tests of limits and missing rights


def test_run_fails_with_failure_cause_memory_if_a_worker_exceeds_its_kubernetes_memory_limit(lab: KubeLab) -> None:
    lab.add(memory_per_worker="256Mi")

    run = lab.submit("block = bytearray(1 << 30)\nprint(len(block))")
    wait_for_end(run)

    failure = run.record().failure
    assert failure is not None
    assert (run.status, failure.cause) == ("Failed", "memory")


def test_exhausted_quota_is_reported_and_the_run_starts_when_it_is_raised(cluster: Cluster, lab: KubeLab) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "one-pod"},
        "spec": {"hard": {"pods": "1"}},
    }
    cluster.apply(quota)
    try:
        run = lab.submit(COUNTS, **{**SHORT, "arguments": ["10"]})
        wait_for_reason(run, "quota 'one-pod' is used up")
    finally:
        cluster.kubectl("delete", "resourcequota", "one-pod")

    assert wait_for_end(run) == "Completed"


def test_image_that_can_not_be_pulled_is_named(lab: KubeLab) -> None:
    lab.add(image="example.test/nothing:1")

    run = lab.submit("print('never')")

    wait_for_reason(run, "the image can't be pulled")
    assert "example.test/nothing:1" in (run.record().waiting_for or "")
    run.cancel()
    assert wait_for_end(run) == "Canceled"


def test_run_without_free_nodes_reports_the_reason_and_starts_later(cluster: Cluster, lab: KubeLab) -> None:
    for node in cluster.nodes:
        cluster.kubectl("cordon", node)
    try:
        run = lab.submit(COUNTS, **{**SHORT, "arguments": ["10"]})
        wait_for_reason(run, "0 of 2 pods, 0/3 nodes are available")
    finally:
        for node in cluster.nodes:
            cluster.uncordon(node)

    assert wait_for_end(run) == "Completed"


# --- tests of the Kubernetes API


def test_kubernetes_api_outage_of_a_minute_fails_no_run(cluster: Cluster, lab: KubeLab) -> None:
    goes_on = lab.submit(COUNTS, **LONG)
    ends = lab.submit(COUNTS, **SHORT)
    for run in (goes_on, ends):
        wait_for_attempt(run, 1)
    lab.add(node_selector=["kubernetes.io/hostname=nowhere"])
    waits = lab.submit("print('never')")
    wait_for_reason(waits, "0/3 nodes are available")
    lab.add()

    with api_away(cluster):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert not any(run.record().is_terminal for run in (goes_on, waits))
            time.sleep(5)

    assert [wait_for_end(run) for run in (ends, goes_on)] == ["Completed"] * 2
    wait_for_reason(waits, "0/3 nodes are available")
    waits.cancel()
    assert wait_for_end(waits) == "Canceled"


def test_run_completes_although_etcd_is_compacted_every_second(cluster: Cluster, lab: KubeLab) -> None:
    run = lab.submit(COUNTS, **SHORT)

    while not run.record().is_terminal:
        cluster.compact()
        time.sleep(1)

    assert run.status == "Completed"


def test_runs_complete_when_the_api_serves_only_four_requests_at_once(cluster: Cluster, lab: KubeLab) -> None:
    with api_away(cluster, "--max-requests-inflight=4"):
        pass
    try:
        runs = [lab.submit("print('done')") for _ in range(4)]
        assert [wait_for_end(run) for run in runs] == ["Completed"] * 4
    finally:
        with api_away(cluster):
            pass


# --- tests with Kueue


def test_run_waits_in_kueues_queue_until_another_has_ended(cluster: Cluster, lab: KubeLab) -> None:
    cluster.start_kueue()
    try:
        lab.add(cpus_per_worker=1.2, queue=QUEUE)
        first = lab.submit(COUNTS, **SHORT)
        wait_for_attempt(first, 1)
        lab.add(cpus_per_worker=1.2)  # Paceline finds the namespace's only queue
        second = lab.submit(COUNTS, **{**SHORT, "arguments": ["10"]})
        wait_for_reason(second, "insufficient unused quota for cpu")

        assert [wait_for_end(run) for run in (first, second)] == ["Completed"] * 2
        lab.close()
    finally:
        cluster.stop_kueue()
