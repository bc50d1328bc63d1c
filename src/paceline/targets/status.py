"""The status of a compute target: its nodes, their use and the queue, for `paceline compute list` and `show`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import TargetError


class SettingError(TargetError):
    """The error that a setting names something unknown to the engine, such as a partition."""


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """The status of one node.

    Attributes:
        used_cores: Cores that all users' jobs use; None if unknown. `used_gpus` counts GPUs likewise.
        is_up: Whether runs may get the node, now or once it is free.
        state: The engine's name for the state, such as "mixed" or "drained".
        message: Why the node is down, or a remark of the engine.
    """

    name: str
    cores: int | None = None
    used_cores: int | None = None
    gpus: int | None = None
    used_gpus: int | None = None
    is_up: bool = True
    state: str = "up"
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NodeStatus:
        return cls(**data)


def leased(name: str, cores: int, gpus: Sequence[str], granted: Sequence[Mapping[str, Any]]) -> NodeStatus:
    """Return the status of a machine, given its granted tickets (`paceline.targets.leases`)."""
    held = {gpu for ticket in granted for gpu in ticket["granted"]["gpus"]}
    return NodeStatus(
        name=name,
        cores=cores,
        # A ticket has the cores that the run demands, which may be more than the machine has.
        used_cores=min(cores, sum(int(ticket["cores"]) for ticket in granted)),
        gpus=len(gpus),
        used_gpus=len(held & set(gpus)),
    )


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a compute target, as reported by its engine.

    queued, running: Numbers of all users' jobs; None if unknown.
    """

    nodes: tuple[NodeStatus, ...]
    queued: int | None = None
    running: int | None = None
    message: str = ""

    @property
    def up(self) -> tuple[NodeStatus, ...]:
        return tuple(node for node in self.nodes if node.is_up)

    @property
    def state(self) -> str:
        """The state: "up", "degraded" if some nodes are down, "down" if all nodes are down."""
        if not self.up:
            return "down"
        return "up" if len(self.up) == len(self.nodes) else "degraded"

    @property
    def cores(self) -> int | None:
        """The number of cores of the nodes that are up, or None if unknown."""
        return _total(node.cores for node in self.up)

    @property
    def used_cores(self) -> int | None:
        return _total(node.used_cores for node in self.up)

    @property
    def gpus(self) -> int | None:
        return _total(node.gpus for node in self.up)

    @property
    def used_gpus(self) -> int | None:
        return _total(node.used_gpus for node in self.up)

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "cores": self.cores,
            "used_cores": self.used_cores,
            "gpus": self.gpus,
            "used_gpus": self.used_gpus,
            "queued": self.queued,
            "running": self.running,
            "message": self.message,
            "nodes": [node.to_json() for node in self.nodes],
        }


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """A placeholder among the links of `examine` for a node that can't be reached. `lost` is the reason."""

    name: str
    lost: str


def _total(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values, or None if all are unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
