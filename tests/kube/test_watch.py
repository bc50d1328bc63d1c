"""A run that waits costs the API a watch, and no requests."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("lightkube", reason="needs the compute target kubernetes")

from paceline.targets.kubernetes.api import Cluster
from tests.helpers import wait_until
from tests.kube.lab import COUNTS, TWO, KubeLab, pods_of, wait_for_attempt, wait_for_end

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


def test_status_of_a_waiting_run_is_read_without_requests_to_kubernetes(
    lab: KubeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    whole = Cluster.request

    def counted(self: Cluster, method: str, path: str, *args: Any, **values: Any) -> Any:
        requests.append(f"{method} {path}")
        return whole(self, method, path, *args, **values)

    monkeypatch.setattr(Cluster, "request", counted)
    lab.add(node_selector=["kubernetes.io/hostname=nowhere"])
    run = lab.submit("print('never')")
    wait_until(lambda: "nodes are available" in (run.record().waiting_for or ""), "the run says why it waits", 60)
    for _ in range(3):
        time.sleep(0.5)  # the first reads of the run list all objects, so don't count their requests
        run.record()
    requests.clear()

    for _ in range(40):
        assert run.status == "Queued"
        time.sleep(0.1)

    assert requests == []
    run.cancel()
    assert wait_for_end(run) == "Canceled"


def test_run_completes_after_one_of_its_pods_is_deleted(lab: KubeLab) -> None:
    run = lab.submit(COUNTS, arguments=["50", "2"], max_restarts=2, **TWO)
    wait_for_attempt(run, 1)

    lab.access.kubectl("delete", "pod", pods_of(lab, run)[0], "--grace-period=1")

    assert wait_for_end(run) == "Completed"
