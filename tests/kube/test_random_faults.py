"""Faults at random times in a run's life: each run completes, and leaves no object.

2 faults with `make kube`, 100 with `make proof`. A failure prints the seed, which PACELINE_CHAOS_SEED repeats.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline as pl
from tests.engines.lab import wait_for_end
from tests.kube.cluster import Cluster
from tests.kube.lab import COUNTS, TWO, KubeLab, pods_of

pytest.importorskip("paceline.targets.kubernetes", reason="needs the compute target kubernetes")

FAULTS = int(os.environ.get("PACELINE_KUBE_FAULTS", "2"))
SEED = int(os.environ.get("PACELINE_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600 * FAULTS)]


def _evict(cluster: Cluster, node: str, pods: list[str]) -> None:
    for pod in pods[:1]:
        cluster.evict(pod)


def _delete(cluster: Cluster, node: str, pods: list[str]) -> None:
    for pod in pods[:1]:
        cluster.kubectl("delete", "pod", pod, "--grace-period=0", "--force", check=False)


def _drain(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.drain(node)
    cluster.uncordon(node)


def _stop_kubelet(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.stop_kubelet(node)
    time.sleep(20)
    cluster.start_kubelet(node)


def _crash(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.kill_node(node)
    cluster.boot_node(node)


def _cut(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.cut(node)
    time.sleep(60)
    cluster.heal(node)


def _stop_api(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.stop_api()
    time.sleep(20)
    cluster.start_api()


def _compact(cluster: Cluster, node: str, pods: list[str]) -> None:
    cluster.compact()


_KINDS: tuple[Callable[[Cluster, str, list[str]], None], ...] = (
    *(_evict, _delete, _drain, _stop_kubelet),
    *(_crash, _cut, _stop_api, _compact),
)


def test_random_faults_lose_no_run(cluster: Cluster, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    for number in range(FAULTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        lab = KubeLab(folder, cluster)
        run: pl.Run = lab.submit(COUNTS, arguments=["150"], max_restarts=5, **TWO)
        after_s, kind = chance.uniform(0, 20), chance.choice(_KINDS)
        time.sleep(after_s)
        story = f"seed {SEED}, fault {number}: {kind.__name__} after {after_s:.1f} s"
        pods = list(pods_of(lab, run).values())
        chance.shuffle(pods)

        kind(cluster, chance.choice(cluster.nodes), pods)

        assert wait_for_end(run) == "Completed", f"{story}: {run.record().failure}"
        lab.close()
        cluster.wait_for_nodes()
