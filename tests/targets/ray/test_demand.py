"""What a run asks of its nodes, and whether a cluster can hold it."""

from __future__ import annotations

from typing import Any

from paceline.targets.ray.demand import ClusterDemand, NodeResources, demand_of, too_large, waits_for
from paceline.targets.ray.settings import read_settings
from tests.helpers import make_job


def demand(settings: dict[str, Any] | None = None, **job: Any) -> ClusterDemand:
    return demand_of(make_job(**job), read_settings("lab", settings or {}))


def node(name: str, free: dict[str, float] | None = None, **total: float) -> NodeResources:
    return NodeResources(name=name, total=total, free=free)


def test_ray_demand_has_one_cpu_per_worker() -> None:
    asked = demand(node_count=2, process_count_per_node=3, distributed_backend="gloo")
    assert asked.bundles == ({"CPU": 3.0}, {"CPU": 3.0})


def test_ray_demand_includes_gpus_and_custom_resources() -> None:
    settings = {"cpus_per_worker": 0.5, "gpus_per_worker": 2, "resources": ["fast disk=1"]}
    asked = demand(settings, process_count_per_node=3, distributed_backend="nccl", use_gpu=True)
    assert asked.bundles == ({"CPU": 1.5, "GPU": 6.0, "fast disk": 1.0},)
    assert asked.text == "1 node with 1.5 CPU, 6 GPU and 1 fast disk"


def test_demand_for_two_node_sizes_fits_only_a_cluster_with_enough_large_nodes() -> None:
    asked = ClusterDemand(bundles=({"CPU": 3.0}, {"CPU": 3.0}, {"CPU": 2.0}))
    assert asked.text == "2 nodes with 3 CPU and 1 with 2 CPU"
    large, small = {"CPU": 3.0}, {"CPU": 2.0}
    assert asked.fits([large, small, large])
    assert not asked.fits([large, small, small])
    assert not asked.fits([large, large])


def test_error_for_a_demand_larger_than_the_cluster_lists_the_nodes_of_the_cluster() -> None:
    asked = ClusterDemand(bundles=({"CPU": 2.0, "GPU": 1.0},) * 2)
    nodes = [node("a", CPU=8.0), node("b", CPU=8.0, GPU=1.0)]
    assert too_large(asked, nodes) == (
        "the run needs 2 nodes with 2 CPU and 1 GPU each, on different nodes; "
        "the cluster has a (8 CPU and 0 GPU), b (8 CPU and 1 GPU)"
    )
    assert too_large(asked, [*nodes, node("c", CPU=2.0, GPU=4.0)]) is None
    assert "the cluster has no node" in str(too_large(asked, []))


def test_waiting_run_reports_demand_and_free_resources() -> None:
    asked = ClusterDemand(bundles=({"CPU": 2.0},))
    nodes = [node("a", {"CPU": 1.0}, CPU=2.0), node("b", {}, CPU=4.0)]
    assert waits_for(asked, nodes) == "waits for 1 node with 2 CPU; free: a 1 of 2 CPU; b 0 of 4 CPU"
    assert waits_for(asked, [node("a", CPU=2.0)]) == "waits for 1 node with 2 CPU"
