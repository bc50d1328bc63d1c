"""A machine with a queue on a simulated clock: random runs of several users, served by `paceline.targets.fair_share.plan`."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.targets.fair_share import plan
from paceline.targets.shares import SharePolicy, ident

if TYPE_CHECKING:
    from paceline.targets.shares import PastUse, Ticket

DAY_S = 86400.0
_HOUR_S = 3600.0


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
    users: int
    gpus: int
    seed: int
    backlog: int = 8
    sizes: tuple[int, ...] = (1, 1, 1, 1, 2, 2, 4)
    used: dict[int, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    idle_s: float = 0.0
    busy_s: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)

    def run(self, days: float) -> None:
        chance, now, number = random.Random(self.seed), 0.0, 0
        ends: list[tuple[float, int]] = []
        lasts: dict[int, float] = {}
        uses: dict[int, PastUse] = {
            uid: {"user": f"user{uid}", "hours": [], "typical_s": 0.0, "changed": 0.0} for uid in range(self.users)
        }
        while now < days * DAY_S:
            for uid in range(self.users):
                while sum(one["uid"] == uid and one["granted"] is None for one in self.tickets) < self.backlog:
                    number += 1
                    lasts[number] = chance.uniform(0.1, 2) * _HOUR_S
                    # Most users state a time limit, and most limits are too long.
                    limit = lasts[number] * chance.uniform(1, 3) if chance.random() < 0.95 else None
                    gpus = chance.choice(self.sizes)
                    self.tickets.append(make_ticket(uid, f"{number:08d}", now, gpu_count=gpus, limit_s=limit))
            names = [str(gpu) for gpu in range(self.gpus)]
            decided = plan(self.tickets, 1000, names, now, self.policy, uses)
            for ticket in self.tickets:
                if ident(ticket) in decided["starts"]:
                    ticket["granted"] = {"gpus": decided["starts"][ident(ticket)]}
                    ticket.update(granted_at=now, changed=now)
                    self.waits.append(now - ticket["since"])
                    heapq.heappush(ends, (now + lasts[int(ticket["key"])], int(ticket["key"])))
            held = [gpu for one in self.tickets if one["granted"] for gpu in one["granted"]["gpus"]]
            assert len(held) == len(set(held)), "a GPU was given twice"
            end, ended = heapq.heappop(ends)
            # A GPU is wasted if it is idle although a waiting run would fit.
            least = min((one["gpu_count"] for one in self.tickets if one["granted"] is None), default=1 << 16)
            self.idle_s += (end - now) * (self.gpus - len(held) if least <= self.gpus - len(held) else 0)
            self.busy_s += (end - now) * len(held)
            now = end
            done = next(one for one in self.tickets if int(one["key"]) == ended)
            self.tickets.remove(done)
            self._charge(done, now, uses[done["uid"]])

    def _charge(self, ticket: Ticket, now: float, use: PastUse) -> None:
        seconds = (now - ticket["granted_at"]) * ticket["gpu_count"]
        weighted = self.policy.weight(ticket, 1) * (now - ticket["granted_at"])
        use["hours"].append((ticket["granted_at"], weighted, seconds, 0.0))
        use["changed"] = now
        self.used[ticket["uid"]] = self.used.get(ticket["uid"], 0.0) + seconds
