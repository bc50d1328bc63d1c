"""The status of a compute target: its nodes, their use and the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import TargetError
from paceline.system.names import counted
from paceline.targets.shares import PRIORITIES, held_gpus, stated_level

if TYPE_CHECKING:
    from paceline.targets.leases import LeaseAnswer


class SettingError(TargetError):
    """The error that a target's setting names something unknown, such as a partition."""


@dataclass(frozen=True, kw_only=True)
class UserUse:
    """A user's share of a machine, and their past use in weighted GPU-hours."""

    user: str
    group: str
    share: float
    used_hours: float


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """The status of one node: its cores, its GPUs and their use.

    Attributes:
        used_cores, used_gpus: Numbers that all users' jobs use; None if unknown. GPUs in use outside Paceline count too.
        is_up: Whether runs may get the node. It may be busy now.
        state: The scheduler's name for the state, such as "mixed" or "drained" in Slurm.
        message: Why the node is down, or a remark of the scheduler.
        outside: Texts about processes outside Paceline that use the node.
        shared_by: The owner of the machine's shares file, or "". The users' shares are in `shares`.
    """

    name: str
    cores: int | None = None
    used_cores: int | None = None
    gpus: int | None = None
    used_gpus: int | None = None
    is_up: bool = True
    state: str = "up"
    message: str = ""
    outside: tuple[str, ...] = ()
    shared_by: str = ""
    shares: tuple[UserUse, ...] = ()


def host_status(name: str, answer: LeaseAnswer) -> Status:
    """Return a machine's status from the answer of its queue of leases."""
    tickets, gpus, cores = answer["tickets"], answer["gpus"], answer["cores"]
    shares = answer.get("shares", {})
    granted = [ticket for ticket in tickets if ticket["granted"] is not None]
    held = {gpu for ticket in granted for gpu in held_gpus(ticket)}
    node = NodeStatus(
        name=name,
        cores=cores,
        # Limit the sum to the machine's cores: a ticket (queue entry) may ask for more cores than the machine has.
        used_cores=min(cores, sum(int(ticket["cores"]) for ticket in granted)),
        gpus=len(gpus),
        used_gpus=len((held | {*answer.get("blocked", ())}) & set(gpus)),
        message=shares.get("error", ""),
        outside=tuple(answer.get("outside", ())),
        shared_by=shares.get("owner", ""),
        shares=tuple(UserUse(**one) for one in shares.get("users", ())),
    )
    jobs = tuple(uses(name, tickets))
    return Status(nodes=(node,), running=len(granted), queued=len(tickets) - len(granted), jobs=jobs)


@dataclass(frozen=True, kw_only=True)
class JobUse:
    """The cores and GPUs that a job holds or waits for.

    Attributes:
        run_id: The run, or the name of another program's job.
        node: The node or nodes; "" if the run waits, or if the scheduler does not report its nodes.
        cores: Number of cores; None if the scheduler does not report the number.
        gpus: Names of the held GPUs, or the number of GPUs that the run waits for, as text.
        reason: Why the run waits, or a remark on a running run; a text for people.
        priority: Priority as its user's limit allows it and waiting raises it; "" if unknown.
        starts_in_s: Seconds until the waiting run is likely to start; None if unknown.
    """

    run_id: str
    user: str
    node: str = ""
    cores: int | None = None
    gpus: str = ""
    is_waiting: bool = False
    reason: str = ""
    priority: str = ""
    starts_in_s: float | None = None


def uses(node: str, tickets: Sequence[Mapping[str, Any]]) -> list[JobUse]:
    """Return what each run holds or waits for on a node.

    tickets: Tickets of the runs in the order of service (`paceline.targets.leases`).
    """
    found: list[JobUse] = []
    waiting = 0
    for ticket in tickets:
        granted = ticket["granted"]
        count = ticket.get("gpu_count")
        asked = str(count) if isinstance(count, int) and count else ""
        starts_in_s = ticket.get("starts_in_s")
        found.append(
            JobUse(
                run_id=str(ticket.get("run_id") or ""),
                user=str(ticket.get("user") or ""),
                node=node,
                cores=int(ticket["cores"]),
                gpus=asked if granted is None else ", ".join(held_gpus(dict(ticket))),
                is_waiting=granted is None,
                reason=_wait_reason(ticket, waiting) if granted is None else _remark(ticket),
                priority=PRIORITIES[stated_level(dict(ticket))],
                starts_in_s=starts_in_s if isinstance(starts_in_s, (int, float)) else None,
            )
        )
        waiting += granted is None
    return found


def _wait_reason(ticket: Mapping[str, Any], before: int) -> str:
    ahead = f"{counted(before, 'run')} before it in the queue" if before else "free cores or GPUs, first in the queue"
    reason, starts_in_s = str(ticket.get("why") or ahead), ticket.get("starts_in_s")
    return reason if not starts_in_s else f"{reason}; likely to start in {about(starts_in_s)}"


def _remark(ticket: Mapping[str, Any]) -> str:
    """Return a remark on a running run, such as "hangs since ...", or ""."""
    since, leaves = ticket.get("hangs_since"), ticket.get("is_asked_to_leave") or ticket.get("leaving")
    remarks = {f"hangs since {since}": since, "leaves for an urgent run": leaves}
    return ", ".join(text for text, applies in remarks.items() if applies)


def about(seconds: float) -> str:
    """Return a rough duration as text, such as "40 min"."""
    units = (("days", 86400), ("h", 3600), ("min", 60))
    found = (f"{seconds / size:.0f} {unit}" for unit, size in units if seconds >= 2 * size)
    return next(found, "a minute" if seconds > 30 else "seconds")


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a compute target, as its scheduler (such as Slurm) reports it.

    queued, running: Numbers of all users' jobs; None if unknown.
    jobs: Each run's use of the nodes, in queue order; empty if the scheduler does not report jobs.
    """

    nodes: tuple[NodeStatus, ...]
    queued: int | None = None
    running: int | None = None
    message: str = ""
    jobs: tuple[JobUse, ...] = ()

    @property
    def up(self) -> tuple[NodeStatus, ...]:
        return tuple(node for node in self.nodes if node.is_up)

    @property
    def state(self) -> str:
        """The state: "up", "degraded" if some nodes are down, "down" if all are."""
        if not self.up:
            return "down"
        return "up" if len(self.up) == len(self.nodes) else "degraded"

    @property
    def cores(self) -> int | None:
        """Number of cores of the nodes that are up; None if unknown."""
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
            "nodes": [asdict(node) for node in self.nodes],
            "jobs": [asdict(job) for job in self.jobs],
        }


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """A node that can't be reached: an item of lists that otherwise have connections."""

    name: str
    lost: str


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
