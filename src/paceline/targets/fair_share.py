"""The order of a machine's queue, computed from tickets (queue entries), shares and past use.

`in_order` ranks the waiting runs. It counts use up to the newest change of a file, so all processes that read the same files
compute the same order. `plan` decides which of these runs start now, and which running runs have to leave for an urgent run.

Without a shares file (policy None), the older submission is first, and a priority orders only the runs of one user.

Hosts run this file with their own Python, 3.6 or later. So it uses only the standard library and quotes annotations.
"""

import math

TYPE_CHECKING = False  # `typing` is slow to load, so don't import it
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import TypedDict

    from paceline.targets.shares import PastUse, SharePolicy, Ticket, TicketId

    class Plan(TypedDict):
        """A decision on which runs of a machine start, keep waiting or leave.

        order: Tickets of running, then of waiting runs, next run first. starts: The GPUs of each run that starts now.
        why: Why a run waits although it would fit. leave: Runs that leave for an urgent run.
        """

        order: list[Ticket]
        starts: dict[TicketId, list[str]]
        why: dict[TicketId, str]
        leave: list[TicketId]


if "SharePolicy" not in globals():  # false on an SSH host, where `shares` and this module are parts of one script
    from paceline.targets.shares import (
        HIGH,
        URGENT,
        gpu_hours_held,
        granted_at,
        held_gpus,
        ident,
        limit_s,
        share_of,
        stated_level,
    )

#: Seconds that a run is expected to take if it has no time limit and its user has no earlier runs.
TYPICAL_S = 3600.0
#: Assumed seconds that a run needs to end and to free its resources, after its time limit or after a request to end.
_OVERTIME_S = 60.0
_WEEK_S = 7 * 24 * 3600.0
#: Maximum number of waiting runs for which a start time is estimated.
_EXPECTED = 50


class Room:
    """The free cores and GPUs of a machine.

    Args:
        cores: Number of all cores of the machine, free or used; `gpus` are all its GPUs.
        holders: Tickets (queue entries) of the runs that hold cores and GPUs.
        blocked: GPUs that no run may get.
    """

    def __init__(
        self, cores: int, gpus: "Sequence[str]", holders: "Iterable[Ticket]", blocked: "Collection[str]" = ()
    ) -> None:
        self.cores, self.gpus, self.used_cores = cores, gpus, 0
        self.used = dict.fromkeys(gpus, 0.0)
        for gpu in blocked:
            self.used[gpu] = 1.0
        for item in holders:
            self.take(item, held_gpus(item))

    def take(self, ticket: "Ticket", gpus: "Sequence[str]") -> None:
        """Mark GPUs, and the cores that a run needs, as used."""
        self.used_cores += int(ticket["cores"])
        for gpu in gpus:
            self.used[gpu] = self.used.get(gpu, 0.0) + share_of(ticket)

    def fit(
        self, ticket: "Ticket", avoided: "Collection[str]" = (), reserved: "Collection[str]" = ()
    ) -> "list[str] | None":
        """Return free GPUs for a run, or None if the run does not fit.

        GPUs that other runs share come first, so that unused GPUs stay free, then GPUs `reserved` for the run's user.
        `avoided`: GPUs that the run must not get.
        """
        # If a run asks for more cores than the machine has, it gets all cores of the machine.
        if self.used_cores + min(ticket["cores"], self.cores) > self.cores:
            return None
        count = ticket["gpu_count"]
        if not count:
            return []
        # Allow for rounding errors: ten runs that each use 0.1 of a GPU may together use slightly more than 1.
        share = share_of(ticket) - 1e-6
        free = [gpu for gpu in self.gpus if self.used[gpu] + share < 1 and gpu not in avoided]
        free.sort(key=lambda gpu: (-round(self.used[gpu], 6), gpu not in reserved))
        return free[:count] if count <= len(free) else None


def in_order(
    tickets: "Sequence[Ticket]", policy: "SharePolicy | None" = None, uses: "Mapping[int, PastUse] | None" = None
) -> "list[Ticket]":
    """Sort the tickets of a machine's runs in the order of service.

    tickets: Queue entries of running and waiting runs. Running runs come first. With a policy, they count as use.
    """
    if policy is not None:
        return _Standing(tickets, policy, uses or {}).order()
    # The submission times of a user's waiting runs fix the user's queue positions. The run of highest priority gets the first.
    every = sorted(tickets, key=lambda ticket: (ticket["since"], ticket["uid"] or 0, ticket["key"]))
    places = [ticket for ticket in every if ticket["granted"] is None]
    ranked = sorted(places, key=lambda ticket: (-stated_level(ticket), ticket["key"]))
    mine = {uid: iter([each for each in ranked if each["uid"] == uid]) for uid in {each["uid"] for each in places}}
    return [ticket for ticket in every if ticket["granted"] is not None] + [
        next(mine[place["uid"]]) for place in places
    ]


class _Standing:
    """The figures that order runs: past and expected use by users and groups, and priority levels."""

    def __init__(self, tickets: "Sequence[Ticket]", policy: "SharePolicy", uses: "Mapping[int, PastUse]") -> None:
        self.policy, at = policy, newest(tickets, policy, uses)
        self._tickets = sorted(tickets, key=ident)  # keep a fixed order, because a sum of floats depends on the order
        self.levels = {ident(ticket): level(ticket, self._tickets, policy, uses, at) for ticket in self._tickets}
        self._users, self._groups = {}, {}  # type: dict[int, float], dict[str, float]
        # Include users who have no ticket (queue entry) now, because their past use counts as use of their group.
        for uid in sorted(uses):
            self._add(uid, uses[uid]["user"], policy.decayed(uses[uid], at))
        # Count one hour of use in advance for each running run. Otherwise its user would stay first in the queue.
        for ticket in self._tickets:
            if ticket["granted"] is not None:
                self.charge(ticket, max(0.0, at - granted_at(ticket)) + TYPICAL_S)

    def _add(self, uid: int, user: str, amount: float) -> None:
        group = self.policy.place_of(user)[0]
        self._users[uid] = self._users.get(uid, 0.0) + amount
        self._groups[group] = self._groups.get(group, 0.0) + amount

    def _cost(self, ticket: "Ticket", seconds: float) -> float:
        return seconds * self.policy.weight(ticket, self.levels[ident(ticket)])

    def charge(self, ticket: "Ticket", seconds: float = TYPICAL_S) -> None:
        """Add `seconds` of a run to the use of its user and group."""
        self._add(ticket["uid"] or 0, ticket["user"], self._cost(ticket, seconds))

    def _used(self, ticket: "Ticket") -> "tuple[float, float]":
        """Return the use of a run's group and user, divided by their shares."""
        group, group_share, share = self.policy.place_of(ticket["user"])
        return self._groups.get(group, 0.0) / group_share, self._users.get(ticket["uid"] or 0, 0.0) / share

    def is_close(self, ticket: "Ticket", other: "Ticket", run: "Ticket") -> bool:
        """Return whether the user of `ticket` has used little more than the user of `other`.

        "Little" is one hour of `run`. Use is divided by the users' shares. If the groups differ, compare the groups' use.
        """
        group, *shares = self.policy.place_of(ticket["user"])
        group2, *shares2 = self.policy.place_of(other["user"])
        kind = int(group == group2)
        lead = self._used(ticket)[kind] - self._used(other)[kind]
        return lead * max(shares[kind], shares2[kind]) <= self._cost(run, TYPICAL_S)

    def lets_pass(self, ticket: "Ticket", first: "Ticket", end: float) -> bool:
        """Return whether the run `ticket`, which ends by `end`, may delay the waiting run `first`."""
        return end <= first["since"] + self.policy.patience_s and self.is_close(ticket, first, first)

    def order(self) -> "list[Ticket]":
        """Return running runs, then waiting runs by priority level and by their users' use."""
        before = dict(self._users), dict(self._groups)
        waiting = {}  # type: dict[int, list[Ticket]]
        found = [ticket for ticket in self._tickets if ticket["granted"] is not None]
        order = [ticket for ticket in self._tickets if ticket["granted"] is None]
        for ticket in sorted(order, key=lambda one: (-self.levels[ident(one)], one["key"]), reverse=True):
            waiting.setdefault(ticket["uid"] or 0, []).append(ticket)

        def claim(uid: int) -> "tuple[float, tuple[float, float], float, int]":
            first = waiting[uid][-1]
            return -self.levels[ident(first)], self._used(first), first["since"], uid

        while waiting:
            uid = min(waiting, key=claim)
            ticket = waiting[uid].pop()
            found.append(ticket)
            self.charge(ticket)
            if not waiting[uid]:
                del waiting[uid]
        self._users, self._groups = before
        return found


def newest(tickets: "Sequence[Ticket]", policy: "SharePolicy", uses: "Mapping[int, PastUse]") -> float:
    """Return the Unix time at which queue entries, shares or past use changed last."""
    times = [float(ticket["changed"]) for ticket in tickets] + [use["changed"] for use in uses.values()]
    return max([policy.changed, *times])


def level(
    ticket: "Ticket", tickets: "Iterable[Ticket]", policy: "SharePolicy", uses: "Mapping[int, PastUse]", at: float
) -> int:
    """Return a run's priority level, raised by waiting and capped by its user's limit.

    tickets: The tickets of all runs. The user's running urgent runs count against the limit of urgent GPU-hours.
    """
    stated = min(stated_level(ticket), policy.most_priority(ticket["user"]))
    if stated == URGENT:
        limit = policy.limit(ticket["user"], "urgent_gpu_hours_a_week")
        others = (
            one for one in tickets if one["granted"] is not None and one["uid"] == ticket["uid"] and one is not ticket
        )
        running = [gpu_hours_held(one, at) for one in others if stated_level(one) == URGENT]
        used = hours_in_week(uses.get(ticket["uid"] or 0), at)[1] + math.fsum(running)
        return HIGH if limit is not None and used >= limit else URGENT
    if ticket["granted"] is None:
        return min(HIGH, stated + int(max(0.0, at - ticket["since"]) // policy.age_s))
    return stated


def hours_in_week(use: "PastUse | None", at: float) -> "tuple[float, float]":
    """Return a user's GPU-hours (all, urgent) in the 7 days before `at`."""
    rows = [row for row in use["hours"] if row[0] > at - _WEEK_S] if use is not None else []
    return math.fsum(row[2] for row in rows) / 3600, math.fsum(row[3] for row in rows) / 3600


def plan(
    tickets: "Sequence[Ticket]",
    cores: int,
    gpus: "Sequence[str]",
    now: float,
    policy: "SharePolicy | None" = None,
    uses: "Mapping[int, PastUse] | None" = None,
    blocked: "Collection[str]" = (),
    passed: "Collection[TicketId]" = (),
) -> "Plan":
    """Decide which waiting runs start now, and which running runs have to leave.

    Runs start in the order of service while they fit. If a run does not fit, it waits. A later run may then start only if
    it does not delay the waiting run, because it leaves enough free or its time limit ends it in time. With a policy, it may
    delay the waiting run by up to `patience_hours`, if its user has used little more than the waiting run's user (`is_close`).

    With a policy, runs with many GPUs start before runs with few GPUs, if their user has used little more than the first
    run's user. Otherwise small runs would often take some of the GPUs that a large run has left. The other GPUs would
    then stay idle until enough are free for the next large run.

    Args:
        tickets: Tickets of all running and waiting runs.
        cores: Cores of the machine, for all runs together.
        gpus: GPUs of the machine.
        now: Unix time, for time limits, quotas and reservations.
        policy: Content of the shares file, or None.
        uses: Past use of each user.
        blocked: GPUs that processes outside Paceline use.
        passed: Waiting runs to skip, since they could have started but did not, such as runs of stopped processes.
    """
    uses = uses or {}
    standing = None if policy is None else _Standing(tickets, policy, uses)
    every = in_order(tickets) if standing is None else standing.order()
    holders = [ticket for ticket in every if ticket["granted"] is not None]
    order = [ticket for ticket in every if ticket["granted"] is None]
    levels = {ident(one): stated_level(one) for one in every} if standing is None else standing.levels

    def room_of(kept: "Sequence[Ticket]") -> Room:
        return Room(cores, gpus, kept, blocked)

    room = room_of(holders)
    hours = {uid: hours_in_week(use, now)[0] for uid, use in uses.items()}
    leave = _leaving(order, holders, levels, policy, hours, now, room_of)
    starts, why, started = {}, {}, []  # type: dict[TicketId, list[str]], dict[TicketId, str], list[Ticket]
    ends = {ident(ticket): _end(ticket, now, ident(ticket) in leave) for ticket in holders}

    def fit(ticket: "Ticket") -> "tuple[bool, list[str] | None]":
        """Return (whether later runs wait for this run, its GPUs or None if it does not fit)."""
        key, avoided, reserved = ident(ticket), {}, set()  # type: TicketId, dict[str, str], set[str]
        if key in passed or key in starts:
            return False, None
        if policy is not None:
            refusal = policy.refusal(ticket, [*holders, *started], hours.get(key[0], 0.0), now)
            if refusal:
                why[key] = refusal
                return False, None
            avoided, reserved = policy.reserved_for_others(ticket, now), policy.reserved_for(ticket)
        found = room.fit(ticket, avoided, reserved)
        if found is None and avoided and room.fit(ticket) is not None:
            why[key] = "; ".join(sorted(set(avoided.values())))
            return False, None  # only a reservation delays this run, so later runs need not wait for this run
        return True, found

    # `head`: the first queued run that later runs must not overtake. `fits`: whether enough is free for it now.
    head, fits = None, False  # type: Ticket | None, bool
    for ticket in order:
        counts, found = fit(ticket)
        if counts:
            head, fits = ticket, found is not None
            break
    first = None if fits else head
    width, wide = "gpu_count" if gpus else "cores", []  # type: str, list[Ticket]
    if standing is not None and head is not None:
        level_now = levels[ident(head)]
        wide = [
            one for one in order if one[width] > 1 and levels[ident(one)] == level_now and room.fit(one) is not None
        ]
        wide.sort(key=lambda one: -one[width])
    for is_early, ticket in [*((True, one) for one in wide), *((False, one) for one in order)]:
        if is_early and not (standing and head and standing.is_close(ticket, head, ticket)):
            continue
        counts, found = fit(ticket)
        if not counts:
            continue
        takes_nothing = not ticket["cores"] and not ticket["gpu_count"]
        running = [*holders, *started]
        if found is None or not (
            takes_nothing or first is None or _may_pass(ticket, first, running, ends, now, room_of, standing)
        ):
            if not is_early:
                first = first or ticket
            continue
        room.take(ticket, found)
        starts[ident(ticket)] = found
        started.append(dict(ticket, granted={"gpus": found}, granted_at=now, changed=now))
        ends[ident(ticket)] = _end(started[-1], now, False)
        if standing is not None:
            standing.charge(ticket)
    return {"order": [*holders, *order], "starts": starts, "why": why, "leave": sorted(leave)}


def _end(ticket: "Ticket", now: float, is_leaving: bool) -> float:
    if is_leaving:
        return now + _OVERTIME_S
    limit = limit_s(ticket)
    return math.inf if limit is None else max(granted_at(ticket) + limit, now + _OVERTIME_S)


def _may_pass(
    ticket: "Ticket",
    first: "Ticket",
    running: "Sequence[Ticket]",
    ends: "Mapping[TicketId, float]",
    now: float,
    room_of: "Callable[[Sequence[Ticket]], Room]",
    standing: "_Standing | None",
) -> bool:
    """Return whether a run can start now without delaying the earlier run `first`.

    ends: {run: Unix time of its end}. room_of: Returns the free cores and GPUs if only the given runs stay.
    """

    def fits_beside(stay: "list[Ticket]") -> bool:
        return room_of(stay).fit(first) is not None

    limit = limit_s(ticket)
    if limit is not None and standing is not None and standing.lets_pass(ticket, first, now + limit):
        return True
    starts_at = math.inf
    for end in sorted(set(ends.values())):
        if end < math.inf and fits_beside([one for one in running if ends[ident(one)] > end]):
            starts_at = end
            break
    if starts_at < math.inf:
        if limit is not None and now + limit <= starts_at:
            return True
        stay = [one for one in running if ends[ident(one)] > starts_at]
    else:
        # No known end time lets `first`, the first waiting run, start. Assume that runs which started before it queued are over.
        stay = [one for one in running if granted_at(one) > first["since"]]
    # Test whether this run may start now without delaying `first`, which is the first waiting run.
    found = room_of(stay).fit(ticket)
    return found is not None and fits_beside([*stay, dict(ticket, granted={"gpus": found})])


def _leaving(
    order: "Sequence[Ticket]",
    holders: "Sequence[Ticket]",
    levels: "Mapping[TicketId, int]",
    policy: "SharePolicy | None",
    hours: "Mapping[int, float]",
    now: float,
    room_of: "Callable[[Sequence[Ticket]], Room]",
) -> "set[TicketId]":
    """Return the running runs that must make room for urgent runs.

    Runs of the lowest level leave first, beginning with the latest. Without a shares file, only runs of the urgent
    run's own user leave. `room_of` returns the free cores and GPUs if only the given runs stay. `hours`: as in `refusal`.
    """
    leave = set()  # type: set[TicketId]
    kept = list(holders)
    for ticket in order:
        if levels[ident(ticket)] < URGENT:
            continue
        avoided = policy.reserved_for_others(ticket, now) if policy is not None else {}
        if policy is not None and policy.refusal(ticket, kept, hours.get(ident(ticket)[0], 0.0), now):
            continue
        may_go = [
            one for one in kept if levels[ident(one)] < URGENT and (policy is not None or one["uid"] == ticket["uid"])
        ]
        may_go.sort(key=lambda one: (not one.get("leaving"), levels[ident(one)], -granted_at(one), ident(one)))
        gone = []  # type: list[Ticket]
        while room_of([one for one in kept if one not in gone]).fit(ticket, avoided) is None and may_go:
            gone.append(may_go.pop(0))
        if room_of([one for one in kept if one not in gone]).fit(ticket, avoided) is None:
            continue
        # Don't end a chosen run if the urgent run has enough room beside it. Test the chosen runs in reverse order.
        for one in list(reversed(gone)):
            rest = [other for other in gone if other is not one]
            if room_of([other for other in kept if other not in rest]).fit(ticket, avoided) is not None:
                gone = rest
        kept = [one for one in kept if one not in gone]
        found = room_of(kept).fit(ticket, avoided) or []
        kept.append(dict(ticket, granted={"gpus": found}, granted_at=now, changed=now))
        leave |= {ident(one) for one in gone}
    return leave


def expected_starts(
    order: "Sequence[Ticket]",
    cores: int,
    gpus: "Sequence[str]",
    now: float,
    uses: "Mapping[int, PastUse]",
    blocked: "Collection[str]" = (),
    leave: "Collection[TicketId]" = (),
) -> "dict[TicketId, float]":
    """Return {run: seconds until its likely start} for the first waiting runs.

    The estimate assumes that a run ends at its time limit, or else after the typical time of its user's earlier runs.

    order: The tickets (queue entries) of all runs in the order of service.
    blocked: GPUs that processes outside Paceline use. leave: Running runs that leave for an urgent run.
    """

    def lasts(ticket: "Ticket") -> float:
        use = uses.get(ticket["uid"] or 0)
        typical = use["typical_s"] if use is not None and use["typical_s"] > 0 else TYPICAL_S
        return min(limit_s(ticket) or typical, typical)

    soon = now + _OVERTIME_S
    running = [
        (soon if ident(one) in leave else max(granted_at(one) + (limit_s(one) or lasts(one)), soon), one)
        for one in order
        if one["granted"] is not None
    ]
    at, found = now, {}  # type: float, dict[TicketId, float]
    for ticket in [one for one in order if one["granted"] is None][:_EXPECTED]:
        for time_s in sorted({at, *(end for end, _ in running if end > at)}):
            fit = Room(cores, gpus, [one for end, one in running if end > time_s], blocked).fit(ticket)
            if fit is not None:
                at = time_s
                found[ident(ticket)] = at - now
                running.append((at + lasts(ticket), dict(ticket, granted={"gpus": fit})))
                break
    return found
