"""Choose, by a seed, how each simulated node and its network behave."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import TargetError
from paceline.remote.wire import LEAST_SILENCE_S
from paceline.targets.options import SILENCE, Option, SettingValues, check_settings

#: Seconds after which Linux first resends a lost TCP packet.
RESEND_S = 0.2
#: Maximum number of sockets to send to a process of simulated nodes in one message. Linux allows at most 253 descriptors.
BATCH = 200
#: A slow node takes longer by this factor to answer and to start workers.
SLOWNESS = 20.0

OPTIONS: tuple[Option, ...] = (
    Option("nodes", "how many nodes there are", int, 4, least=1),
    Option("cores", "of each node", int, 8, least=1),
    Option("processes", "how many processes simulate them (default: one for 500 nodes)", int, least=1),
    Option("seed", "that decides all faults and delays", int, 0),
    Option("shared", "the nodes see the supervisor's folders", bool, False),
    Option("latency_ms", "of each message, in one direction", float, 0.2, least=0),
    Option("loss", "share of messages that come late, because TCP has to resend them", float, 0.0, least=0),
    Option("start_s", "seconds that a worker takes to start, at most", float, 0.05, least=0),
    Option("slow", "how many nodes are 20 times slower than the others", int, 0, least=0),
    Option("dead", "how many nodes fall silent during the first attempt", int, 0, least=0),
    Option("killed", "how many nodes' agents end during the first attempt", int, 0, least=0),
    Option("full_disks", "how many nodes' disks fill up during the first attempt", int, 0, least=0),
    Option("fault_after_s", "seconds after the start in which no fault happens", float, 1.0, least=0),
    Option("fault_within_s", "seconds from then on in which all faults happen", float, 5.0, least=0),
    SILENCE,
)


@dataclass(frozen=True, kw_only=True)
class NodeBehavior:
    """The speed and the faults of a simulated node.

    Attributes:
        resent: Fraction of messages that arrive `RESEND_S` seconds later, as if they had been lost and sent again.
        factor: How many times slower than normal the node is.
        silent_s: Seconds after which the node stops sending, although the connection stays open; None for never.
        killed_s: Seconds after which the node's agent ends; None for never.
        full_s: Seconds after which the node's disk is full; None for never.
    """

    latency_s: float
    resent: float
    start_s: float
    factor: float = 1.0
    silent_s: float | None = None
    killed_s: float | None = None
    full_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SimSettings:
    """The settings of a simulated cluster; `OPTIONS` describes each."""

    nodes: int
    cores: int
    processes: int
    seed: int
    shared: bool
    latency_ms: float
    loss: float
    start_s: float
    slow: int
    dead: int
    killed: int
    full_disks: int
    fault_after_s: float
    fault_within_s: float
    silence_s: float = LEAST_SILENCE_S

    @classmethod
    def read(cls, kind: str, name: str, settings: SettingValues) -> SimSettings:
        """Check the settings of a compute target, and return them.

        Raises:
            TargetError: A setting is unknown or wrong, or there are more faults than nodes.
        """
        values = check_settings(kind, OPTIONS, settings, name)
        values["processes"] = values["processes"] or -(-values["nodes"] // 500)
        found = cls(**values)
        faulty = found.slow + found.dead + found.killed + found.full_disks
        if faulty > found.nodes:
            raise TargetError(
                f"compute target {name!r}: slow, dead, killed and full_disks are {faulty} nodes together, of {found.nodes}. "
                "Ask for fewer faults, or more nodes."
            )
        if found.loss >= 1:
            raise TargetError(f"compute target {name!r}: loss={found.loss:g} must be less than 1, such as 0.01.")
        return found

    def behaviors(self, names: Sequence[int], *, has_faults: bool = True) -> dict[int, NodeBehavior]:
        """Return {number of a node: its behavior}. Without `has_faults`, no node fails."""
        order = list(range(self.nodes))
        chance = random.Random(f"paceline sim {self.seed}")
        chance.shuffle(order)
        kinds = ("factor", "silent_s", "killed_s", "full_s")
        counts = (self.slow, self.dead, self.killed, self.full_disks)
        fault: dict[int, Mapping[str, float]] = {}
        for kind, count in zip(kinds, counts, strict=True):
            for _ in range(count):
                at_s = self.fault_after_s + chance.random() * self.fault_within_s
                fault[order.pop()] = {kind: SLOWNESS if kind == "factor" else at_s}
        return {number: self._behavior(fault.get(number, {}), has_faults) for number in names}

    def _behavior(self, fault: Mapping[str, float], has_faults: bool) -> NodeBehavior:
        kept = fault if has_faults or "factor" in fault else {}
        factor = kept.get("factor", 1.0)
        return NodeBehavior(
            latency_s=self.latency_ms / 1000 * factor,
            resent=self.loss,
            start_s=self.start_s * factor,
            factor=factor,
            silent_s=kept.get("silent_s"),
            killed_s=kept.get("killed_s"),
            full_s=kept.get("full_s"),
        )
