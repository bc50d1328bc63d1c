"""A run's share of several machines: all of them or none, in order of submission, and no two runs wait for each other.

A run first takes at once what is free, on any hosts. If that is not enough it gives all back and queues up: on one host
after the other, in an order that is the same for everybody who submits, and only once it holds those before. So of two
runs that want the same hosts the first of them in that order decides, and nobody holds what the other waits for while
waiting for what the other holds. On each host the older submission is served first. While it waits, a run looks now and
then whether enough has come free elsewhere.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import EngineError, TargetError
from paceline.runs.visible import visible
from paceline.system.names import counted
from paceline.targets.base import Waiting
from paceline.targets.ssh.hosts import SshHost
from paceline.targets.ssh.members import HostMember, Opening

#: How long hosts have to answer after the first of them before others are tried, or those count that have; at most.
_TOGETHER_S = 1.5
_LONGEST_S = 4.0
_POLL_S = 0.1
_SLOWEST_POLL_S = 1.0
#: How often a waiting run looks for other hosts, and tries those again that were down.
_LOOK_AROUND_S = 5.0
_TRY_AGAIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class HostDemand:
    """A run's demand of each of `count` hosts. more: beyond those, an elastic run takes so many if they are free at once; it
    waits for none of them. key: its place in the order, the same in each attempt.
    """

    count: int
    more: int = 0
    cores: int
    gpus: int
    key: str
    run_id: str

    @property
    def most(self) -> int:
        return self.count + self.more


@dataclass(frozen=True, kw_only=True)
class HeldHosts:
    """A host that the run holds a share of. gpus: those it may use."""

    member: HostMember
    gpus: tuple[str, ...]


class Gathering:
    """Gets the hosts for one run. patience_s: how long hosts that are down are waited for, where too few are up."""

    def __init__(self, opening: Opening, hosts: Sequence[SshHost], demand: HostDemand, patience_s: float = 0.0) -> None:
        self._opening, self._hosts, self._demand = opening, tuple(hosts), demand
        self._unfit: dict[SshHost, str] = {}
        self._broken: dict[SshHost, str] = {}
        self._give_up_at = time.monotonic() + patience_s
        self._tried_at = time.monotonic()

    def gather(self, waiting: Waiting) -> list[HeldHosts] | None:
        """The hosts, in the order of the list; None once `waiting` has said to give up.

        Raises:
            TargetError: not enough hosts are up, or fit; each that does not is named with the reason.
        """
        if waiting("reaches for the hosts"):
            return None
        # One more than needed is not worth a connection as long as those suffice.
        # See the top of the file: first what is free at once, then queues, in one order for everybody.
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

    # --- who is there

    def _fit(self) -> list[HostMember]:
        """The hosts that are up and can hold the job, in the order of the list."""
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
        """The hosts that fit, once there are enough; None if told to give up."""
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

    # --- shares

    def _take_at_once(self, members: Sequence[HostMember], held: list[HeldHosts]) -> list[HeldHosts]:
        """`held` and what is free now on others, no more than is needed. Never waits."""
        mine = {item.member.host for item in held}
        left = [member for member in members if member.host not in mine]
        while left and len(held) < self._demand.most:
            missing = self._demand.most - len(held)
            tried, left = left[:missing], left[missing:]
            # A pool is waited for, and may be: each call has the link's own time limit.
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
            # A lost host means another plan, so all is given back and the queueing begins anew.
            if any(member.link.lost for member in plan) or not plan:
                self._give_back([*held, *([queued] if queued else [])])
                held, queued = [], None
                enough = self._enough(waiting)
                if enough is None:
                    return None
                plan = sorted(self._least_wanted(enough), key=lambda member: member.identity)
            # Only one place in a queue at a time, on the host after those that are held: so nobody waits in a circle.
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
            # Soon at first, for a share often comes free in a moment; later a question a second is enough.
            pause = min(pause * 1.2, _SLOWEST_POLL_S)
            if time.monotonic() - looked_at > _LOOK_AROUND_S:
                looked_at = time.monotonic()
                self._try_again(after_s=_TRY_AGAIN_S)
                others = [member for member in self._fit() if member not in plan]
                # Tried without giving up the place in the queue. If it is not enough, the new shares go back at once.
                found = self._take_at_once(others, held)
                if len(found) >= self._demand.count:
                    self._give_back([queued])
                    return found
                self._give_back([item for item in found if item not in held])

    def _least_wanted(self, members: Sequence[HostMember]) -> list[HostMember]:
        """As many hosts as are needed: those on which the fewest runs hold or await something."""
        if len(members) == self._demand.count:
            return list(members)

        def tickets(member: HostMember) -> int:
            try:
                return len(member.ask("look", {})["tickets"])
            except (TargetError, OSError):
                # A host that does not answer comes last.
                return 1 << 30

        return sorted(members, key=tickets)[: self._demand.count]

    def _take(self, member: HostMember, *, at_once: bool) -> HeldHosts | dict[str, Any] | None:
        """The share; or who is in the way; or None where the host is no good."""
        hello = member.link.hello
        ticket = {
            "key": self._demand.key,
            "run_id": self._demand.run_id,
            "user": hello.user,
            "pid": hello.pid,
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
                pass  # it goes with the agent


def too_few(count: int, hosts: Sequence[SshHost], reasons: dict[SshHost, str]) -> str:
    """The message of a run that can't have its hosts."""
    fit = len(hosts) - len(reasons)
    lines = [f"\n  {host.name}: {reasons[host]}" for host in hosts if host in reasons]
    are = "is" if fit == 1 else "are"
    return (
        f"the job needs {counted(count, 'host')}, and {fit or 'none'} of {len(hosts)} {are} to be had:{''.join(lines)}"
    )


def _waits_for(name: str, answer: dict[str, Any]) -> str:
    """Return the status text of a run that waits for others on a host, with since when one of them hangs."""
    ahead, holders = answer.get("ahead", []), answer.get("holders", [])
    others = ahead or holders
    if not others:
        return f"waits for room on {name}"
    # Of another user's runs with the name of their owner.
    named = (
        f"{other['run_id']}" + (f" of {other['user']}" if other.get("uid") != answer.get("uid") else "")
        for other in others[:3]
    )
    shown = visible(", ".join(named)) + (", ..." if len(others) > 3 else "")
    hanging = next(
        (f". {other['run_id']} hangs since {other['hangs_since']}" for other in others if other.get("hangs_since")), ""
    )
    return f"waits on {name} for {counted(len(others), 'run')} ({shown}){visible(hanging)}"
