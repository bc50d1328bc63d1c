"""A machine with a queue on a simulated clock: random runs of several users, served by `paceline.targets.fair_share.plan`."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.targets.fair_share import plan
from paceline.targets.shares import SharePolicy, ident

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.targets.shares import PastUse, Ticket, TicketId

DAY_S = 86400.0
HOUR_S = 3600.0


def make_ticket(uid: int, key: str, at: float = 0.0, **values: Any) -> Ticket:
    """Return a ticket as `paceline.targets.leases.read` returns it."""
    ticket = {"uid": uid, "user": f"user{uid}", "key": key, "run_id": f"run {key}", "cores": 1, "gpu_count": 1}
    times = {"since": at, "changed": at, "seen": at, "granted": None}
    return ticket | times | values


@dataclass
class Simulation:
    """A machine on which each user keeps `backlog` runs waiting.

    Attributes:
        used: GPU seconds of each user. idle_s: GPU seconds in which a GPU was free although a waiting run fitted.
        waits: Time from submission to start of each run that has started.
    """

    policy: SharePolicy
    users: Sequence[int]
    gpus: int
    seed: int
    backlog: int = 8
    sizes: tuple[int, ...] = (1, 1, 1, 1, 2, 2, 4)
    used: Counter[int] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    idle_s: float = 0.0
    busy_s: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)
    uses: dict[int, PastUse] = field(default_factory=dict)

    def user(self, uid: int) -> str:
        return f"user{uid}"

    @property
    def names(self) -> list[str]:
        return [str(gpu) for gpu in range(self.gpus)]

    def starts(self, now: float) -> dict[TicketId, list[str]]:
        """Return the GPUs of each run that starts now."""
        return plan(self.tickets, 1000, self.names, now, self.policy, self.uses)["starts"]

    def end(self, ticket: Ticket, now: float) -> None:
        """Record the use of a run that ends now."""
        uid = ticket["uid"]
        use = self.uses.setdefault(uid, {"user": self.user(uid), "hours": [], "typical_s": 0.0, "changed": 0.0})
        weighted = self.policy.weight(ticket, 1) * (now - ticket["granted_at"])
        use["hours"].append((ticket["granted_at"], weighted, (now - ticket["granted_at"]) * ticket["gpu_count"], 0.0))
        use["changed"] = now

    def run(self, days: float) -> None:
        chance, now, number = random.Random(self.seed), 0.0, 0
        ends: list[tuple[float, str]] = []
        lasts: dict[str, float] = {}
        while now < days * DAY_S:
            for uid in self.users:
                while sum(one["uid"] == uid and one["granted"] is None for one in self.tickets) < self.backlog:
                    number += 1
                    # The keys of real tickets begin with the time of submission.
                    key = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".000Z_{number:08d}"
                    lasts[key] = chance.uniform(0.1, 2) * HOUR_S
                    # Most users state a time limit, and most limits are too long.
                    limit = lasts[key] * chance.uniform(1, 3) if chance.random() < 0.95 else None
                    gpus = chance.choice(self.sizes)
                    self.tickets.append(make_ticket(uid, key, now, user=self.user(uid), gpu_count=gpus, limit_s=limit))
            starts = self.starts(now)
            for ticket in self.tickets:
                if ident(ticket) in starts:
                    ticket["granted"] = {"gpus": starts[ident(ticket)]}
                    ticket.update(granted_at=now, changed=now)
                    self.waits.append(now - ticket["since"])
                    heapq.heappush(ends, (now + lasts[ticket["key"]], ticket["key"]))
            held = [gpu for one in self.tickets if one["granted"] for gpu in one["granted"]["gpus"]]
            assert len(held) == len(set(held)), "a GPU was given twice"
            end, ended = heapq.heappop(ends)
            # A GPU is wasted if it is idle although a waiting run would fit.
            least = min((one["gpu_count"] for one in self.tickets if one["granted"] is None), default=1 << 16)
            self.idle_s += (end - now) * (self.gpus - len(held) if least <= self.gpus - len(held) else 0)
            self.busy_s += (end - now) * len(held)
            now = end
            done = next(one for one in self.tickets if one["key"] == ended)
            self.tickets.remove(done)
            self.used[done["uid"]] += (now - done["granted_at"]) * done["gpu_count"]
            self.end(done, now)

    @property
    def drift(self) -> float:
        """The largest difference between a user's part of the use and of the shares."""
        total, shares = sum(self.used.values()), {uid: self.policy.place_of(self.user(uid))[2] for uid in self.users}
        return max(abs(self.used[uid] / total - shares[uid] / sum(shares.values())) for uid in self.users)

    @property
    def idle(self) -> float:
        """The part of the GPU time in which a GPU was free although a waiting run fitted."""
        return self.idle_s / (self.idle_s + self.busy_s)

    def assert_shares_are_kept(self, days: float) -> None:
        """Check the use of each user, the idle GPUs and the longest wait after `run`."""
        assert self.drift <= 0.02
        assert self.idle < 0.01
        # After two days a run gets a higher priority, and then waits only for runs that got it before.
        still = [days * DAY_S - ticket["since"] for ticket in self.tickets if ticket["granted"] is None]
        assert max(self.waits + still) < 60 * HOUR_S
