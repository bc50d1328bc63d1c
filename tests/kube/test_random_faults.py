"""Faults at random times in the lives of three runs: each run completes, and leaves no object.

2 faults with `make kube`, 100 with `make proof`. A failure prints the seed, which PACELINE_CHAOS_SEED repeats.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping

import pytest

import paceline as pl
from paceline.runs import states
from tests.kube.cluster import Cluster
from tests.kube.lab import COUNTS, TWO, KubeLab, pods_of, wait_for_end

pytest.importorskip("paceline.targets.kubernetes", reason="needs the compute target kubernetes")

RUNS = 3
FAULTS = int(os.environ.get("PACELINE_KUBE_FAULTS", "2"))
SEED = int(os.environ.get("PACELINE_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600 * FAULTS)]


def _evict(cluster: Cluster, node: str, pods: list[str]) -> None:
    for pod in pods[:1]:
        cluster.evict(pod)


def _delete(cluster: Cluster, node: str, pods: list[str]) -> None:
    for pod in pods[:1]:
        cluster.kubectl("delete", "pod", pod, "--grace-period=0", "--force", check=False)


def _compact(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.compact()


def _stop_api(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.stop_api()
    time.sleep(20)
    cluster.start_api()


def _undone(begin: str, pause_s: float, end: str) -> Callable[[Cluster, str, list[str]], None]:
    """Return a fault of a node that two methods of the cluster begin and end."""

    def fault(cluster: Cluster, node: str, pods: list[str]) -> None:
        getattr(cluster, begin)(node)
        time.sleep(pause_s)
        getattr(cluster, end)(node)

    return fault


_KINDS: Mapping[str, Callable[[Cluster, str, list[str]], None]] = {
    "evict": _evict,
    "delete": _delete,
    "compact": _compact,
    "stop_api": _stop_api,
    "drain": _undone("drain", 0, "uncordon"),
    "stop_kubelet": _undone("stop_kubelet", 20, "start_kubelet"),
    "crash": _undone("kill_node", 0, "boot_node"),
    "cut": _undone("cut", 60, "heal"),
}


def test_all_runs_complete_despite_random_kubernetes_faults(cluster: Cluster, lab: KubeLab) -> None:
    chance = random.Random(SEED)
    living: list[pl.Run] = []
    story = f"seed {SEED}"

    def still_living() -> list[pl.Run]:
        for run in living:
            assert run.status not in (states.FAILED, states.CANCELED), f"{story}: {run.record().failure}"
        return [run for run in living if not run.record().is_terminal]

    for number in range(FAULTS):
        living = still_living()
        while len(living) < RUNS:
            living.append(lab.submit(COUNTS, arguments=["150"], max_restarts=100, **TWO))
        after_s, kind, node = chance.uniform(0, 20), chance.choice(list(_KINDS)), chance.choice(cluster.nodes)
        time.sleep(after_s)
        print(f"{number}: {kind} of {node} after {after_s:.1f} s", flush=True)
        story += f"\n{number}: {kind} of {node} after {after_s:.1f} s"
        pods = [pod for run in living for pod in pods_of(lab, run).values()]
        chance.shuffle(pods)
        _KINDS[kind](cluster, node, pods)
        cluster.wait_for_nodes()

    for run in living:
        assert wait_for_end(run) == "Completed", f"{story}: {run.record().failure}"
