"""Allocate hosts to a run: all or none, without deadlocks between runs.

A run first takes free cores and GPUs on any hosts. If too few hosts have them, the run releases them. The run then
queues on one host after another, in an order that is the same for all submitters. It joins the next host's queue only
once it holds cores or GPUs of the previous host. So no two runs wait for each other. On each host the older submission
goes first. A waiting run also polls whether enough other hosts have become free.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import EngineError, TargetError
from paceline.runs.visible import visible
from paceline.system.names import counted
from paceline.targets.base import Waiting
from paceline.targets.local_leases import LeaseRequest
from paceline.targets.ssh.hosts import SshHost
from paceline.targets.ssh.members import HostMember, Opening

if TYPE_CHECKING:
    from paceline.targets.leases import LeaseAnswer

#: Maximum seconds to wait for further hosts after the first host has answered. `_LONGEST_S`: maximum seconds in all.
_TOGETHER_S = 1.5
_LONGEST_S = 4.0
_POLL_S = 0.1
_SLOWEST_POLL_S = 1.0
#: Seconds after which a waiting run tries other hosts. `_TRY_AGAIN_S`: after which it reconnects to failed hosts.
_LOOK_AROUND_S = 5.0
_TRY_AGAIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class HostDemand:
    """The cores and GPUs that a run needs on each of `count` hosts.

    Attributes:
        more: Number of additional hosts that an elastic run takes if they are free immediately.
        key: Sort key of the run in the hosts' queues, equal in all attempts.
        request: The priority of the run, its time limit, and its share of each GPU.
    """

    count: int
    more: int = 0
    cores: int
    gpus: int
    key: str
    run_id: str
    request: LeaseRequest = field(default_factory=LeaseRequest)

    @property
    def most(self) -> int:
        return self.count + self.more


@dataclass(frozen=True, kw_only=True)
class HeldHosts:
    """A host on which the run holds a lease, with the leased GPUs."""

    member: HostMember
    gpus: tuple[str, ...]


class Gathering:
    """An allocation of hosts to one run.

    patience_s: Seconds to wait for hosts that are down if too few hosts are up.
    """

    def __init__(self, opening: Opening, hosts: Sequence[SshHost], demand: HostDemand, patience_s: float = 0.0) -> None:
        self._opening, self._hosts, self._demand = opening, tuple(hosts), demand
        self._unfit: dict[SshHost, str] = {}
        self._broken: dict[SshHost, str] = {}
        self._give_up_at = time.monotonic() + patience_s
        self._tried_at = time.monotonic()

    def gather(self, waiting: Waiting) -> list[HeldHosts] | None:
        """Return the allocated hosts, or None if `waiting` cancels the wait.

        Raises:
            TargetError: Too few hosts are up and large enough. The message has the reason for each unusable host.
        """
        if waiting("reaches for the hosts"):
            return None
        # Connect to as many hosts as the run needs. If they lack free resources, connect to all hosts, and queue last of all.
        self._opening.open(self._hosts[: self._demand.most])
        self._opening.wait_for_those_alike(_LONGEST_S, _TOGETHER_S)
        held = self._take_at_once(self._fit(), [])
        if len(held) < self._demand.most:
            self._opening.open(host for host in self._hosts if host not in self._opening.failures)
            self._opening.wait_for_those_alike(_LONGEST_S, _TOGETHER_S)
            held = self._take_at_once(self._fit(), held)
        if len(held) < self._demand.count:
            self._give_back(held)
            queued = self._queue_up(waiting)
            if queued is None:
                return None
            held = queued
            if len(held) < self._demand.most:
                held = self._take_at_once(self._fit(), held)
        return sorted(held, key=lambda item: self._hosts.index(item.member.host))

    # --- methods that choose among the reachable hosts

    def _fit(self) -> list[HostMember]:
        found: list[HostMember] = []
        for member in self._opening.members(self._hosts):
            why = self._misfit(member, found)
            if why is None:
                self._unfit.pop(member.host, None)
                found.append(member)
            else:
                self._unfit[member.host] = why
        return found

    def _misfit(self, member: HostMember, others: Sequence[HostMember]) -> str | None:
        if member.host in self._broken:
            return self._broken[member.host]
        for other in others:
            if other.identity == member.identity:
                return f"it is the same machine as {other.host.name} ({member.link.hello.host}), which a job gets once"
        has = len(member.link.hello.gpus)
        if has < self._demand.gpus:
            return f"it has {counted(has, 'GPU', 'no')}, and the job asks for {self._demand.gpus} on each"
        return None

    def _enough(self, waiting: Waiting) -> list[HostMember] | None:
        count = self._demand.count
        while True:
            fit = self._fit()
            if len(fit) >= count:
                return fit
            if not self._opening.pending:
                down = {host: why for host, why in self._opening.failures.items() if host in self._hosts}
                if time.monotonic() > self._give_up_at or len(self._hosts) - len(self._unfit) < count:
                    failed = EngineError if down else TargetError
                    raise failed(too_few(count, self._hosts, {**down, **self._unfit}))
                names = ", ".join(host.name for host in down)
                if waiting(f"{len(fit)} of {count} hosts that it needs are up; tries {names} again"):
                    return None
                self._try_again(after_s=2.0)
            elif waiting(f"reaches for {', '.join(host.name for host in self._opening.pending)}"):
                return None
            self._opening.wait(_POLL_S)
            time.sleep(_POLL_S)

    def _try_again(self, after_s: float) -> None:
        if time.monotonic() - self._tried_at > after_s:
            self._tried_at = time.monotonic()
            self._opening.open(self._hosts)

    # --- methods that lease cores and GPUs of hosts, and return them

    def _take_at_once(self, members: Sequence[HostMember], held: list[HeldHosts]) -> list[HeldHosts]:
        """Lease free cores and GPUs on more hosts, without queueing. Return all hosts."""
        mine = {item.member.host for item in held}
        left = [member for member in members if member.host not in mine]
        while left and len(held) < self._demand.most:
            missing = self._demand.most - len(held)
            tried, left = left[:missing], left[missing:]
            # The end of this `with` block waits for all calls, at most until the time limit of the link to the host.
            with concurrent.futures.ThreadPoolExecutor(len(tried)) as pool:
                answers = list(pool.map(lambda member: self._take(member, at_once=True), tried))
            held = held + [answer for answer in answers if isinstance(answer, HeldHosts)]
        return held

    def _queue_up(self, waiting: Waiting) -> list[HeldHosts] | None:
        held: list[HeldHosts] = []
        queued: HostMember | None = None
        plan: list[HostMember] = []
        pause, looked_at = _POLL_S, time.monotonic()
        while True:
            # If a host of the plan was lost, return all resources, make a new plan, and join the queues of the new plan.
            if any(member.link.lost for member in plan) or not plan:
                self._give_back([*held, *([queued] if queued else [])])
                held, queued = [], None
                enough = self._enough(waiting)
                if enough is None:
                    return None
                plan = sorted(self._least_wanted(enough), key=lambda member: member.identity)
            # Join one host's queue at a time, in the order of the plan, so that no two runs wait for each other.
            queued = plan[len(held)]
            answer = self._take(queued, at_once=False)
            if isinstance(answer, HeldHosts):
                held.append(answer)
                queued, pause = None, _POLL_S
                if len(held) == len(plan):
                    return held
                continue
            if answer is None:
                plan = []
                continue
            if waiting(_waits_for(queued.host.name, answer)):
                self._give_back([*held, queued])
                return None
            time.sleep(pause)
            # Poll often at first, because resources often become free soon. Later poll once a second.
            pause = min(pause * 1.2, _SLOWEST_POLL_S)
            if time.monotonic() - looked_at > _LOOK_AROUND_S:
                looked_at = time.monotonic()
                self._try_again(after_s=_TRY_AGAIN_S)
                others = [member for member in self._fit() if member not in plan]
                # Try other hosts, but stay in this host's queue. If the other hosts are too few, return their resources.
                found = self._take_at_once(others, held)
                if len(found) >= self._demand.count:
                    self._give_back([queued])
                    return found
                self._give_back([item for item in found if item not in held])

    def _least_wanted(self, members: Sequence[HostMember]) -> list[HostMember]:
        """Return as many hosts as the run needs, shortest queue first."""
        if len(members) == self._demand.count:
            return list(members)

        def tickets(member: HostMember) -> int:
            try:
                return len(member.ask("look", {})["tickets"])
            except (TargetError, OSError):
                # The large number sorts a host that does not answer behind all hosts that answer.
                return 1 << 30

        return sorted(members, key=tickets)[: self._demand.count]

    def _take(self, member: HostMember, *, at_once: bool) -> HeldHosts | LeaseAnswer | None:
        """Request cores and GPUs of a host; queue for them unless `at_once`.

        Return the lease, the host's answer if the run has to wait, or None if the host does not answer.
        """
        hello = member.link.hello
        ticket = {
            "key": self._demand.key,
            "run_id": self._demand.run_id,
            "pid": hello.pid,
            **self._demand.request.to_ticket(),
            "cores": min(self._demand.cores, member.offered),
            "gpu_count": self._demand.gpus,
            "all_cores": member.offered,
            "all_gpus": list(hello.gpus),
            "at_once": at_once,
        }
        try:
            answer = member.ask("take", ticket)
        except (TargetError, OSError) as error:
            if not member.link.lost:
                self._broken[member.host] = str(error)
            return None
        if "granted" in answer:
            return HeldHosts(member=member, gpus=tuple(answer["granted"]["gpus"]))
        return answer

    def _give_back(self, items: Sequence[HeldHosts | HostMember]) -> None:
        for item in items:
            member = item.member if isinstance(item, HeldHosts) else item
            try:
                member.ask("give_back", {"key": self._demand.key})
            except (TargetError, OSError):
                pass  # ignore this error: the lease ends when the host's agent process ends


def too_few(count: int, hosts: Sequence[SshHost], reasons: dict[SshHost, str]) -> str:
    """Return an error text on too few hosts, with each host's reason."""
    fit = len(hosts) - len(reasons)
    lines = [f"\n  {host.name}: {reasons[host]}" for host in hosts if host in reasons]
    are = "is" if fit == 1 else "are"
    return (
        f"the job needs {counted(count, 'host')}, and {fit or 'none'} of {len(hosts)} {are} to be had:{''.join(lines)}"
    )


def _waits_for(name: str, answer: LeaseAnswer) -> str:
    ahead, holders = answer.get("ahead", []), answer.get("holders", [])
    others = ahead or holders
    if answer.get("why"):
        return f"waits on {name}: {visible(answer['why'])}"
    if not others:
        return f"waits for room on {name}"
    # If a run belongs to another user, add the user's name.
    named = (
        f"{other['run_id']}" + (f" of {other['user']}" if other.get("uid") != answer.get("uid") else "")
        for other in others[:3]
    )
    shown = visible(", ".join(named)) + (", ..." if len(others) > 3 else "")
    hanging = next(
        (f". {other['run_id']} hangs since {other['hangs_since']}" for other in others if other.get("hangs_since")), ""
    )
    return f"waits on {name} for {counted(len(others), 'run')} ({shown}){visible(hanging)}"
