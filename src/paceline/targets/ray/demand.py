"""The resources that a run needs on each node, and whether a Ray cluster has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.job.job import Job
from paceline.job.plan import node_sizes
from paceline.system.names import some
from paceline.targets.ray.settings import RaySettings

#: Smallest difference between two amounts of a resource in Ray.
_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """A living node's total and free resources. `free` is None if unknown."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NodeResources:
        return cls(name=data["name"], total=data["total"], free=data.get("free"))


@dataclass(frozen=True, kw_only=True)
class ClusterDemand:
    """The resources (bundle) of each node of a run, large bundles first."""

    bundles: tuple[Mapping[str, float], ...] = field(default_factory=tuple)

    @property
    def text(self) -> str:
        """Describe the demand: "2 nodes with 4 CPU and 1 GPU each"."""
        first, last = self.bundles[0], self.bundles[-1]
        count = len(self.bundles)
        if count == 1:
            return f"1 node with {amounts(first)}"
        if first == last:
            return f"{count} nodes with {amounts(first)} each"
        large = sum(bundle == first for bundle in self.bundles)
        return f"{large} nodes with {amounts(first)} and {count - large} with {amounts(last)}"

    def fits(self, nodes: Sequence[Mapping[str, float]]) -> bool:
        """Return whether the nodes can hold all bundles, each on a different node.

        Counting suffices: bundles have at most two sizes, and a node that holds the large one also holds the small one.
        """
        first, last = self.bundles[0], self.bundles[-1]
        large = sum(bundle == first for bundle in self.bundles)
        return sum(_holds(node, first) for node in nodes) >= large and sum(_holds(node, last) for node in nodes) >= len(
            self.bundles
        )


def demand_of(job: Job, settings: RaySettings) -> ClusterDemand:
    """Return a job's resources on each node: CPUs, GPUs and the settings' resources."""
    bundles = []
    for size in node_sizes(job):
        bundle = {"CPU": round(size * settings.cpus_per_worker, 4)}
        if job.use_gpu:
            bundle["GPU"] = float(size * settings.gpus_per_worker)
        bundles.append({**bundle, **settings.resources})
    return ClusterDemand(bundles=tuple(bundles))


def too_large(demand: ClusterDemand, nodes: Sequence[NodeResources]) -> str | None:
    """Return why even idle nodes can't hold the demand, or None."""
    if demand.fits([node.total for node in nodes]):
        return None
    names = list(demand.bundles[0])
    shown = [f"{node.name} ({amounts({name: node.total.get(name, 0.0) for name in names})})" for node in nodes]
    there = some(shown, 8) or "no node"
    apart = ", on different nodes" if len(demand.bundles) > 1 else ""
    return f"the run needs {demand.text}{apart}; the cluster has {there}"


def waits_for(demand: ClusterDemand, nodes: Sequence[NodeResources]) -> str:
    """Return the status text of a run that waits for its placement group."""
    names = list(demand.bundles[0])
    shown = []
    for node in nodes[:4]:
        if node.free is not None:
            parts = [
                f"{_number(node.free.get(name, 0.0))} of {_number(node.total.get(name, 0.0))} {name}" for name in names
            ]
            shown.append(f"{node.name} {', '.join(parts)}")
    more = ", ..." if len(nodes) > 4 else ""
    return f"waits for {demand.text}" + (f"; free: {'; '.join(shown)}{more}" if shown else "")


def amounts(resources: Mapping[str, float]) -> str:
    """Return amounts of resources as text, such as "4 CPU and 1 GPU"."""
    parts = [f"{_number(amount)} {name}" for name, amount in resources.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _holds(node: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount - _EPSILON for name, amount in bundle.items())


def _number(amount: float) -> str:
    return f"{amount:g}"
