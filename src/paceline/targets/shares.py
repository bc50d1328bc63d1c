"""The shares file of a machine, and functions that read the values of tickets.

    {"shares": {"alice": 2, "*": 1},
     "groups": {"vision": {"share": 3, "members": ["bob", "carol"]}},
     "limits": {"*": {"gpus": 4, "gpu_hours_a_week": 200, "priority": "high"}},
     "reservations": [{"for": "alice", "gpus": ["2"], "when": "Tuesday 09:00-18:00"}]}

A user makes the file with `paceline share init`. Its owner edits it with any editor.

Hosts run this text with their own Python, 3.6 or later, so it needs only the standard library and quotes annotations.
"""

# ruff: noqa: UP031

import datetime as dt
import math
import re

TYPE_CHECKING = False  # `typing` is slow to load, so don't import it
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any, TypedDict

    #: A ticket (queue entry) as read from a file, which another user may have written; or a request for a ticket.
    Ticket = dict[str, Any]
    #: The user id of a ticket's owner, and the ticket's key: together they identify a queue entry on a machine.
    TicketId = tuple[int, str]

    class PastUse(TypedDict):
        """One user's past use of a machine.

        `hours` has a row per hour: the hour's Unix time, weighted seconds, GPU seconds, and GPU seconds of urgent runs.
        `typical_s` is the usual duration of the user's runs in seconds.
        """

        user: str
        hours: list[tuple[float, float, float, float]]
        typical_s: float
        changed: float


#: Prefix of the reason why a run waits if the run's user has reached the quota.
OVER_QUOTA = "over quota: "
PRIORITIES = ("low", "normal", "high", "urgent")
LOW, NORMAL, HIGH, URGENT = range(4)
#: Content of the shares file that `paceline share init` writes.
NEW_SHARES = {
    "half_life_days": 7,
    "shares": {"*": 1},
    "groups": {},
    "limits": {"*": {"priority": "urgent", "urgent_gpu_hours_a_week": 8}},
    "gpu_weights": {"*": 1},
    "core_weight": 0.05,
    "priority_weights": {"low": 0.5, "normal": 1, "high": 2, "urgent": 4},
    "raise_after_hours": 48,
    "patience_hours": 48,
    "reservations": [],
}
_NUMBERS = ("half_life_days", "core_weight", "raise_after_hours", "patience_hours")
_LIMITS = ("gpus", "gpu_hours_a_week", "urgent_gpu_hours_a_week")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
#: A run without a time limit does not start on a GPU whose reservation begins within this many seconds.
_AHEAD_S = 24 * 3600.0
_WHEN = re.compile(r"(?P<day>[A-Za-z]+|\d{4}-\d\d-\d\d)(?: (?P<start>\d\d:\d\d)-(?P<end>\d\d:\d\d))?$")


def ident(ticket: "Ticket") -> "TicketId":
    return (ticket["uid"] or 0, ticket["key"])


def stated_level(ticket: "Ticket") -> int:
    """Return a queue entry's priority level as a number; "normal" if invalid."""
    name = ticket.get("priority")
    return PRIORITIES.index(name) if isinstance(name, str) and name in PRIORITIES else NORMAL


def limit_s(ticket: "Ticket") -> "float | None":
    """Return the time limit in seconds in a queue entry, or None."""
    limit = ticket.get("limit_s")
    return float(limit) if isinstance(limit, (int, float)) and 0 < limit < 1e9 else None


def share_of(ticket: "Ticket") -> float:
    """Return the share of each GPU that a run takes, such as 0.5."""
    share = ticket.get("gpu_share", 1.0)
    return float(share) if isinstance(share, (int, float)) and 0 < share <= 1 else 1.0


def held_gpus(ticket: "Ticket") -> "Sequence[str]":
    """Return the GPUs that a run holds. A waiting run holds no GPUs."""
    return (ticket["granted"] or {}).get("gpus") or ()


def gpu_count_held(ticket: "Ticket") -> float:
    """Return how many GPUs a run holds; two half GPUs count as 1.0."""
    return len(held_gpus(ticket)) * share_of(ticket)


def granted_at(ticket: "Ticket") -> float:
    """Return the Unix time at which a run got its GPUs and cores."""
    at, changed = ticket.get("granted_at"), float(ticket.get("changed", 0.0))
    return float(at) if isinstance(at, (int, float)) and 0 < at <= changed else changed


def gpu_hours_held(ticket: "Ticket", now: float) -> float:
    """Return the GPU-hours that a running run has used until now."""
    return gpu_count_held(ticket) * max(0.0, now - granted_at(ticket)) / 3600


class Reservation:
    """A reservation of GPUs for a user or group at some times.

    Args:
        who: Name of the user or group.
        gpus: Names of the GPUs; none reserve the machine with its cores.
        when: "daily", a day of the week or a date, and a time span, all in the machine's local time.
    """

    def __init__(self, who: str, gpus: "Sequence[str]", when: str) -> None:
        found = _WHEN.match(when)
        day = found.group("day").lower() if found else ""
        if found is None or (day not in (*_DAYS, "daily") and not day[0].isdecimal()):
            raise ValueError("it is not a time such as 'Tuesday', 'daily 09:00-18:00' or '2026-12-01'")
        self.who, self.gpus, self.when, self._day = who, tuple(gpus), when, day
        if day[0].isdecimal():
            dt.datetime.strptime(day, "%Y-%m-%d")
        self._start, self._end = _clock(found.group("start") or "00:00"), _clock(found.group("end") or "24:00")
        if self._end <= self._start:
            raise ValueError("it ends before it starts. Write two reservations, until 24:00 and from 00:00")

    def begins_in(self, now: float) -> float:
        """Return seconds until the reservation begins: 0.0 during it, infinity beyond a week."""
        here = dt.datetime.fromtimestamp(now, _zone())
        for days in range(8):
            day = here.date() + dt.timedelta(days)
            if self._day not in ("daily", _DAYS[day.weekday()], day.isoformat()):
                continue
            midnight = dt.datetime.combine(day, dt.time(), here.tzinfo)
            start, end = (midnight + dt.timedelta(minutes=minutes) for minutes in (self._start, self._end))
            if end.timestamp() > now:  # a difference of local times would ignore a change to summer time
                return max(0.0, start.timestamp() - now)
        return math.inf


class SharePolicy:
    """The rules of a machine's shares file: shares, limits and reservations.

    Args:
        data: The JSON value of the file; missing keys have the defaults in `NEW_SHARES`.
        changed: Unix time of the file's last change.

    Raises:
        ValueError: A value is wrong; the message has the value and the rule.
    """

    def __init__(self, data: object, changed: float = 0.0) -> None:
        merged = dict(NEW_SHARES, **_known(data, "the file", NEW_SHARES))
        numbers = {name: _number(merged[name], name, above=name != "core_weight") for name in _NUMBERS}
        self.changed, self.core_weight = changed, numbers["core_weight"]
        self.half_life_s = numbers["half_life_days"] * 86400
        self.age_s, self.patience_s = numbers["raise_after_hours"] * 3600, numbers["patience_hours"] * 3600
        self.shares = _numbers(merged["shares"], "shares", above=True)
        self.gpu_weights = _numbers(merged["gpu_weights"], "gpu_weights")
        costs = _known(merged["priority_weights"], "priority_weights", PRIORITIES)
        self._costs = dict(_numbers(NEW_SHARES["priority_weights"], ""), **_numbers(costs, "priority_weights"))
        self._group_of = {}  # type: dict[str, tuple[str, float]]
        for name, found in _mapping(merged["groups"], "groups").items():
            group = _known(found, "groups.%s" % name, ("share", "members"))
            members = _texts(group.get("members"), "groups.%s.members" % name)
            for member in set(members) & set(self._group_of):
                raise ValueError("groups.%s.members: %s is in another group, too. Choose one" % (name, member))
            share = _number(group.get("share", 1), "groups.%s.share" % name, above=True)
            self._group_of.update(dict.fromkeys(members, ("group " + name, share)))
        self._limits = {
            user: _limits(found, "limits.%s" % user) for user, found in _mapping(merged["limits"], "limits").items()
        }
        self.reservations = []  # type: list[Reservation]
        listed = merged["reservations"]
        if not isinstance(listed, list):
            raise ValueError("reservations=%r is not a list" % (listed,))
        for item in (_known(one, "reservations", ("for", "gpus", "when")) for one in listed):
            who, when = (_texts([item.get(key)], "reservations.%s" % key)[0] for key in ("for", "when"))
            gpus = _texts(item.get("gpus", []), "reservations.gpus")
            try:
                self.reservations.append(Reservation(who, gpus, when))
            except ValueError as error:
                raise ValueError("reservations.when=%r: %s" % (when, error)) from None

    def place_of(self, user: str) -> "tuple[str, float, float]":
        """Return (a user's group, the group's share, the user's share in the group)."""
        share = self.shares.get(user, self.shares.get("*", 1.0))
        # Treat a user without a group as a group with one member.
        group, group_share = self._group_of.get(user, ("user " + user, share))
        return group, group_share, share

    def limit(self, user: str, name: str) -> "float | None":
        """Return a user's limit of this name, such as "gpus", or None."""
        found = dict(self._limits.get("*", {}), **self._limits.get(user, {})).get(name)
        return None if found is None else float(found)

    def most_priority(self, user: str) -> int:
        """Return the highest priority level that a user may request."""
        found = self.limit(user, "priority")
        return URGENT if found is None else int(found)

    def weight(self, ticket: "Ticket", level: int) -> float:
        """Return a run's charge per second, by its GPUs, cores and priority level."""
        default = self.gpu_weights.get("*", 1.0)
        gpus = held_gpus(ticket) or [""] * min(ticket["gpu_count"], 1 << 16)
        gpu_weight = math.fsum(self.gpu_weights.get(gpu, default) for gpu in gpus) * share_of(ticket)
        return (gpu_weight + self.core_weight * int(ticket["cores"])) * self._costs[PRIORITIES[level]]

    def decayed(self, use: "PastUse", at: float) -> float:
        """Return a user's past use in weighted seconds, halved after each half-life."""
        return math.fsum(
            row[1] * math.pow(0.5, (at - row[0]) / self.half_life_s) for row in use["hours"] if row[0] <= at
        )

    def refusal(self, ticket: "Ticket", running: "Sequence[Ticket]", hours: float, now: float) -> str:
        """Return which limit of the user a run would exceed now, or for whom the machine is reserved, or "".

        running: All runs that hold cores or GPUs. hours: GPU-hours that the user's ended runs used in the last 7 days.
        """
        for one in self._of_others(ticket, now):
            if not one.gpus:
                return "the machine is reserved for %s (%s)" % (one.who, one.when)
        count = ticket["gpu_count"] * share_of(ticket)
        most, week = self.limit(ticket["user"], "gpus"), self.limit(ticket["user"], "gpu_hours_a_week")
        if not count or (most is None and week is None):
            return ""
        mine = [one for one in running if one["uid"] == ticket["uid"]]
        held = math.fsum(map(gpu_count_held, mine))
        if most is not None and held + count > most + 1e-6:
            holds = (ticket["user"], held, count, most)
            return OVER_QUOTA + "%s holds %g GPUs, asks for %g more, and may hold %g at once" % holds
        hours += math.fsum(gpu_hours_held(one, now) for one in mine)
        if week is not None and hours >= week:
            return OVER_QUOTA + "%s has used %.1f of %g GPU-hours in 7 days" % (ticket["user"], hours, week)
        return ""

    def reserved_for_others(self, ticket: "Ticket", now: float) -> "dict[str, str]":
        """Return {GPU: reason} of the GPUs that others have reserved."""
        return {
            gpu: "GPU %s is reserved for %s (%s)" % (gpu, one.who, one.when)
            for one in self._of_others(ticket, now)
            for gpu in one.gpus
        }

    def _of_others(self, ticket: "Ticket", now: float) -> "list[Reservation]":
        names, lasts = self._names(ticket), limit_s(ticket) or _AHEAD_S
        return [one for one in self.reservations if one.who not in names and one.begins_in(now) < lasts]

    def reserved_for(self, ticket: "Ticket") -> "set[str]":
        """Return the GPUs with reservations for a run's user or their group, at any time."""
        return {gpu for one in self.reservations if one.who in self._names(ticket) for gpu in one.gpus}

    def _names(self, ticket: "Ticket") -> "tuple[str, str]":
        return ticket["user"], self.place_of(ticket["user"])[0].partition(" ")[2]


def _zone() -> "dt.tzinfo":
    """Return the machine's time zone, even if a user has set TZ."""
    try:
        from zoneinfo import ZoneInfo

        with open("/etc/localtime", "rb") as file:
            return ZoneInfo.from_file(file)
    except (ImportError, OSError, ValueError):
        return dt.timezone.utc


def _clock(text: str) -> int:
    minutes = int(text[:2]) * 60 + int(text[3:])
    if minutes > 24 * 60 or int(text[3:]) > 59:
        raise ValueError("%r is not a time of day" % text)
    return minutes


def _limits(data: object, name: str) -> "dict[str, float]":
    given = dict(_known(data, name, ("priority", *_LIMITS)))
    priority = given.pop("priority", PRIORITIES[URGENT])
    if priority not in PRIORITIES:
        raise ValueError("%s.priority=%r is not one of %s" % (name, priority, ", ".join(PRIORITIES)))
    return dict(_numbers(given, name), priority=float(PRIORITIES.index(priority)))


def _mapping(value: object, name: str) -> "Mapping[str, object]":
    if not isinstance(value, dict):
        raise ValueError("%s=%r is not an object of JSON" % (name, value))
    return value


def _known(value: object, name: str, keys: "Collection[str]") -> "Mapping[str, object]":
    """Return an object of JSON that has only these keys."""
    given = _mapping(value, name)
    for key in sorted(set(given) - set(keys)):
        raise ValueError("%s: unknown key %r: the keys are %s" % (name, key, ", ".join(keys)))
    return given


def _numbers(value: object, name: str, above: bool = False) -> "dict[str, float]":
    return {key: _number(one, "%s.%s" % (name, key), above) for key, one in _mapping(value, name).items()}


def _number(value: object, name: str, above: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
    if not is_number or (above and not value):
        raise ValueError("%s=%r is not a number %s" % (name, value, "above 0" if above else "of 0 or more"))
    return float(value)  # type: ignore[arg-type]


def _texts(value: object, name: str) -> "list[str]":
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("%s=%r is not a list of texts" % (name, value))
    return value
