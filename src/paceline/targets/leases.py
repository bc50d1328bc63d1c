"""The queue of one machine, made of its runs' ticket files.

A ticket is valid while its run lives. In a user's queue, a run lives while a process holds the lock of its folder
(`paceline.targets.local_leases`). In the queue of all users of a host, a run lives while its agent does
(`paceline.targets.host_leases`). No server is needed: readers ignore invalid tickets, and delete their own user's
invalid tickets.

Each waiting run computes the order itself (`paceline.targets.fair_share`) and takes its share when its turn comes. A
ticket's age counts from its file's ctime, or from an earlier submission time that the ticket names: at most `_CLAIM_S`
seconds earlier. Each user's folder also has `use.json`, a record of the cores and GPUs that ended runs have used.

Hosts run this text with their own Python, 3.6 or later, so it needs only the standard library and quotes annotations.
"""

# ruff: noqa: UP031

import calendar
import contextlib
import json
import math
import os
import stat
import time

TYPE_CHECKING = False  # `typing` is slow to load, so don't import it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any, TypedDict

    from paceline.targets import shares
    from paceline.targets.shares import PastUse, TicketId

    Ticket = shares.Ticket

    class GrantedShare(TypedDict, total=False):
        """The GPUs and ports of a machine that a run holds."""

        gpus: list[str]
        ports: list[int]

    class UserShare(TypedDict):
        """A user's share of a machine, and their past use in weighted GPU-hours."""

        user: str
        group: str
        share: float
        used_hours: float

    class SharesAnswer(TypedDict, total=False):
        """The shares of a machine's users, with the shares file's path, owner and error."""

        path: str
        owner: str
        error: str
        users: list[UserShare]

    class LeaseAnswer(TypedDict, total=False):
        """A host's answer to a request about leases; its keys depend on the request.

        `granted` is the run's share; `ahead` and `holders` are tickets of runs to wait for. `why` is the reason why a
        run waits although cores and GPUs are free, or "", and `leave` the reason why it must release its share. `outside` has
        texts about processes outside Paceline that use the machine, and `blocked` the GPUs that these processes use.
        """

        granted: GrantedShare
        ahead: list[Ticket]
        holders: list[Ticket]
        why: str
        leave: str
        shares: SharesAnswer
        outside: list[str]
        blocked: dict[str, str]
        uid: int
        host: str
        boot_id: str
        cores: int
        gpus: list[str]
        tickets: list[Ticket]
        error: str
        python: list[Any]


if "plan" not in globals():  # false on an SSH host, where the modules below and this one are parts of one script
    from paceline.observe.node.outside import used_cores
    from paceline.system.lock_holder import user_name
    from paceline.targets.fair_share import Room, plan
    from paceline.targets.shares import URGENT, SharePolicy, gpu_count_held, granted_at, held_gpus, ident, stated_level

#: The most seconds by which a ticket's (queue entry's) submission time may precede the change time of its file.
_CLAIM_S = 60.0
#: Maximum bytes of a ticket's (queue entry's) file, maximum number of tickets per other user, and of GPUs in a ticket.
_TICKET_BYTES, _TICKETS, _COUNT = 1 << 16, 1000, 1 << 16
#: If a run does not start within this many seconds although resources are free for it, later runs no longer wait for that run.
_OFFER_S = 10.0
#: File with a user's past use: its name, maximum rows, age in seconds of rows to merge by day, age in seconds of rows to drop.
USE, _ROWS, _HOURLY_S, _KEPT_S = "use.json", 400, 8 * 86400.0, 80 * 86400.0
#: Seconds between a waiting run's checks for changed files: for the first run in the queue, added per position, and maximum.
_LOOK_S, _PLACE_S, _SLOWEST_S = 0.2, 0.1, 3.0
#: Seconds between the first waiting run's checks for dead runs, and between its reads of all tickets; maximum for the reads.
_ALIVE_S, _READ_S, _LONGEST_READ_S = 0.5, 30.0, 300.0
#: Seconds between records that a run writes to show that it is alive, while it holds cores or GPUs.
BEAT_S = 60.0
#: Maximum length of a run id in a message, and length of a UTC time in a message.
_LONGEST, _UTC_LENGTH = 300, len("2026-11-23 06:12:03 UTC")


class LeasesError(OSError):
    """The error that a machine's leases can't be used."""


class Queue:
    """The queue of one machine: a ticket for each running or waiting run.

        {"key": "2026-...", "run_id": ..., "cores": 2, "gpu_count": 1, "port_count": 0, "granted": {"gpus": ["0"]} or None}

    A ticket may also have gpu_share, the share of each GPU that the run takes; priority; limit_s, the run's time limit;
    all_gpus, the machine's GPUs as the run sees them; and leaving, whether the run will return its share soon.

    Args:
        own: The folder of this user's tickets.
        folders: Returns (uid, folder) of each user whose tickets count; uid None accepts files of any owner.
        locked: Returns a context manager that excludes other readers and writers. Call the methods within it.
        is_alive: Returns whether the run of a ticket lives.
        free_ports: Takes (count, taken ports) and returns up to `count` free ports.
        shares: Path of the shares file, which need not exist; "" to use no file.
        used_gpus: Takes (GPUs, Paceline's own pids) and returns {GPU: text} of GPUs that other processes use.
    """

    def __init__(
        self,
        own: str,
        folders: "Callable[[], Sequence[tuple[int | None, str]]]",
        locked: "Callable[[], AbstractContextManager[None]]",
        is_alive: "Callable[[Ticket], bool]",
        free_ports: "Callable[[int, Any], Sequence[int]] | None" = None,
        shares: str = "",
        used_gpus: "Callable[[Sequence[str], set[int]], Mapping[str, str]]" = lambda gpus, own: {},
    ) -> None:
        self.own, self.locked, self.shares = own, locked, shares
        self._folders, self._is_alive, self.free_ports, self._used_gpus = folders, is_alive, free_ports, used_gpus
        #: Path of a ticket's (queue entry's) file -> (its inode, change time and size, the ticket) as parsed last.
        self._known = {}  # type: dict[str, tuple[tuple[int, int, int], Ticket | None]]
        #: The folders of tickets at the last listing. A folder's change time shows whether a ticket was added or removed.
        self._listed = []  # type: list[tuple[int | None, str]]
        #: User id, or a run's id in a user's own queue -> (ids of running runs, time from which one more run could start, ids of
        #: waiting runs).
        self._offered = {}  # type: dict[object, tuple[frozenset[TicketId], float, set[TicketId]]]
        #: Monotonic time at which this process last knew that its offers were up to date.
        self._looked_at = 0.0
        self._waits = {}  # type: dict[str, _Wait]
        #: Cached reason why this run must return its resources: change times of the read files, expiry time, reason.
        self._left = None  # type: tuple[tuple[int, ...], float, str] | None
        self._beat_at = 0.0
        #: The reason why the shares file can't be used, or "" if it can.
        self.shares_error = ""

    def tickets(self) -> "list[Ticket]":
        """Return living runs' tickets. Delete tickets of this user's ended runs."""
        found = []
        for path, ticket, is_mine in self.files():
            if ticket is not None and self._is_alive(ticket):
                found.append(ticket)
            elif is_mine:
                if ticket is not None and ticket["granted"] is not None:
                    self._charge(ticket, ticket["seen"] + BEAT_S / 2)
                forget(path)
        return found

    def files(self) -> "Iterator[tuple[str, Ticket | None, bool]]":
        """Yield (path, content or None if invalid, whether the file is this user's) per ticket."""
        known, self._known = self._known, {}
        self._listed = list(self._folders())
        for uid, folder in self._listed:
            is_mine = uid is None or uid == os.geteuid()
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                continue
            # Read a limited number of another user's files, because that user may have filled the folder with files.
            for name in names if is_mine else names[:_TICKETS]:
                path = os.path.join(folder, name)
                if name.endswith(".ticket"):
                    yield path, self._read(path, uid, known), is_mine
                elif name.endswith(".new"):  # a killed process left this file: a living process would hold the lock
                    yield path, None, is_mine

    def _read(
        self, path: str, uid: "int | None", known: "dict[str, tuple[tuple[int, int, int], Ticket | None]]"
    ) -> "Ticket | None":
        try:
            status = os.lstat(path)
        except OSError:
            return None
        stamp = (status.st_ino, status.st_ctime_ns, status.st_size)
        before = known.get(path)
        self._known[path] = before if before is not None and before[0] == stamp else (stamp, read(path, uid))
        found = self._known[path][1]
        return None if found is None else dict(found)

    def policy(self) -> "SharePolicy | None":
        """Return the shares file's rules; None without a file.

        If the file is wrong, return the default rules, which give all users equal shares.
        """
        self.shares_error = ""
        try:
            value, status = load_json(self.shares, None)
            return SharePolicy(value, status.st_ctime)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.shares_error = "%s: %s. Equal shares apply until it is corrected" % (self.shares, error)
            return SharePolicy({}, _changed_ns(self.shares) / 1e9)

    def uses(self) -> "dict[int, PastUse]":
        """Return {uid: past use of the machine by this user}."""
        found = {}
        for uid, folder in self._listed or self._folders():
            use = read_use(os.path.join(folder, USE), uid)
            if use is not None:
                found[uid or 0] = use
        return found

    def grant(
        self,
        ticket: "Ticket",
        others: "Sequence[Ticket]",
        all_cores: int,
        all_gpus: "Sequence[str]",
        at_once: bool = False,
    ) -> "LeaseAnswer":
        """Return the run's share if its turn has come, else the tickets before it.

        ticket: The run's ticket. The call writes it to the queue's folder; with `at_once` only if the run gets its share now.
        others: All other tickets.
        all_cores: Cores of the machine, for all runs together; `all_gpus` are its GPUs.
        """
        if ticket["granted"] is None:
            stamp = self.stamp()
            # Forget offers that their users have taken. A process that was stopped has not seen that, so it forgets all offers.
            offers = self._offered.items() if time.monotonic() < self._looked_at + 3 * _OFFER_S else ()
            self._offered = {to: offer for to, offer in offers if offer[0] == self._running(others, to)}
            self._looked_at = time.monotonic()
            # A run without GPUs has an empty `all_gpus`. Take GPU names from tickets, because `plan` places all runs.
            gpus = all_gpus or sorted({gpu for one in others for gpu in gpus_named(one)})
            policy, uses, now, mine = self.policy(), self.uses(), time.time(), ident(ticket)
            old = [one for one in others if ident(one) == mine and one["granted"] is not None]
            if old:  # an earlier process of this run still lives, and its workers may use the GPUs
                return {"ahead": [], "holders": old, "uid": os.geteuid()}
            everyone = [*others, ticket]
            outside = self.outside(all_gpus, everyone) if ticket["gpu_count"] else {}
            decided = plan(everyone, all_cores, gpus, now, policy, uses, outside, self._passed)
            why = decided["why"].get(mine, "")
            if mine in decided["starts"]:
                starts = list(decided["starts"])
                soon = starts[: starts.index(mine)]
                why = self._cores_outside(ticket, others, soon, all_cores) if policy and ticket["cores"] else ""
            elif outside and mine in plan(everyone, all_cores, gpus, now, policy, uses, (), self._passed)["starts"]:
                why = gpus_text(outside)
            self._note_offers(decided["starts"], others, mine)
            holders = [one for one in decided["order"] if one["granted"] is not None]
            order = [one for one in decided["order"] if one["granted"] is None]
            before = order[: [ident(one) for one in order].index(mine)]
            ahead = [one for one in before if ident(one) not in decided["why"]]
            if mine in decided["starts"] and not why:
                ticket["granted"] = self._with_ports(ticket, decided["starts"][mine], holders)
                ticket["granted_at"] = now
            if ticket["granted"] is not None or not (at_once or self._has_place(ticket)):
                self.write(ticket)
            if ticket["granted"] is None:
                answer = {"ahead": ahead, "holders": holders, "uid": os.geteuid(), "why": why}  # type: LeaseAnswer
                if not at_once:
                    wait = self._waits[ticket["key"]] = _Wait(stamp, len(ahead), answer)
                    # Read all tickets again when the next offer expires, because that changes no file.
                    ends = (since_s + _OFFER_S for _, since_s, _ in self._offered.values())
                    wait.read_at = min([wait.read_at, *(end_s for end_s in ends if end_s >= time.monotonic())])
                return answer
        self._waits.pop(ticket["key"], None)
        return {"granted": ticket["granted"]}

    def outside(self, gpus: "Sequence[str]", tickets: "Sequence[Ticket]") -> "dict[str, str]":
        """Return {GPU: text} of the GPUs that processes outside Paceline use."""
        # Don't report a leased GPU as used by another program: that program may be the run which holds the lease.
        held = {gpu for one in tickets for gpu in held_gpus(one)}
        return {gpu: text for gpu, text in self._used_gpus(gpus, own_pids(tickets)).items() if gpu not in held}

    def _cores_outside(
        self, ticket: "Ticket", others: "Sequence[Ticket]", soon: "Sequence[TicketId]", all_cores: int
    ) -> str:
        """Return who uses the cores that `ticket` needs, or "". `soon` are the runs that start before it."""
        found = used_cores(own_pids([*others, ticket]))
        held = sum(one["cores"] for one in others if one["granted"] is not None or ident(one) in soon)
        used = held + sum(cores for cores, _ in found.values())
        # A run that asks for all cores of the machine waits until no other program uses a core.
        if not found or used + min(ticket["cores"], all_cores) <= all_cores + 0.5:
            return ""
        most = sorted(found.values(), reverse=True)[:3]
        return "cores: used by " + ", ".join("%s, %.1f cores" % (text, cores) for cores, text in most)

    @property
    def _passed(self) -> "set[TicketId]":
        """Return waiting runs whose share has been free for some time."""
        late = time.monotonic() - _OFFER_S
        return {key for _, since_s, keys in self._offered.values() if since_s < late for key in keys}

    def _note_offers(self, starts: "dict[TicketId, list[str]]", others: "Sequence[Ticket]", mine: "TicketId") -> None:
        receivers = {self._receiver(key) for key in [*starts, *self._passed] if key != mine}
        waiting = [ident(one) for one in others if one["granted"] is None]
        since_s = {to: self._offered[to][1] if to in self._offered else time.monotonic() for to in receivers}
        self._offered = {
            to: (self._running(others, to), since_s[to], {key for key in waiting if self._receiver(key) == to})
            for to in receivers
        }

    def _receiver(self, key: "TicketId") -> object:
        # In a queue of several users, a user's stopped processes delay others only once, however many wait.
        return key[0] if self.shares else key

    def _running(self, tickets: "Sequence[Ticket]", receiver: object) -> "frozenset[TicketId]":
        granted = (ident(one) for one in tickets if one["granted"] is not None)
        return frozenset(key for key in granted if self._receiver(key) == receiver)

    def _with_ports(self, ticket: "Ticket", gpus: "list[str]", holders: "list[Ticket]") -> "GrantedShare | None":
        granted = {"gpus": gpus}  # type: GrantedShare
        if self.free_ports is not None:
            granted["ports"] = list(self.free_ports(ticket["port_count"], taken_ports(holders)))
            if len(granted["ports"]) < ticket["port_count"]:
                return None
        return granted

    def _has_place(self, ticket: "Ticket") -> bool:
        there = read(os.path.join(self.own, ticket["key"] + ".ticket"), None)
        return there is not None and there["granted"] is None and there.get("pid") == ticket.get("pid")

    # --- methods that detect changes for a waiting run without reading all tickets

    def stamp(self) -> "tuple[int, ...]":
        """Return a stamp that changes whenever a ticket or the shares file does."""
        return tuple(map(_changed_ns, [*(folder for _, folder in self._listed), *filter(None, [self.shares])]))

    def unchanged(self, key: str) -> "LeaseAnswer | None":
        """Return a waiting run's last answer if no ticket has changed, else None.

        Checks are less frequent for a run far behind in the queue, so that many waiting runs together need little time.
        """
        wait, now = self._waits.get(key), time.monotonic()
        if wait is None or now >= wait.read_at:
            return None
        if now < wait.look_at:
            return wait.answer
        wait.look_at = now + min(_LOOK_S + _PLACE_S * wait.place, _SLOWEST_S)
        if now >= wait.alive_at:
            wait.alive_at = now + _ALIVE_S * (1 + 20 * wait.place)
            if not all(map(self._is_alive, wait.answer["holders"])):
                return None
        if self.stamp() != wait.stamp:
            return None
        self._looked_at = now
        return wait.answer

    # --- methods for runs that hold cores or GPUs

    def leave_reason(self, key: str, all_cores: int, all_gpus: "Sequence[str]") -> str:
        """Return why a run must release its cores and GPUs, or "".

        Call this method about once a second, without the lock. It also updates the change time of the ticket's file: if
        the run is killed, its use counts up to that time.
        """
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            with contextlib.suppress(OSError):
                os.utime(os.path.join(self.own, key + ".ticket"))
        self._listed = list(self._folders())
        stamp = self.stamp()
        if self._left is None or self._left[0] != stamp or now >= self._left[1]:
            self._left = (stamp, now + _READ_S, self._leave_reason(key, all_cores, all_gpus))
            if self._left[2]:
                with self.locked():
                    self.mark(key, leaving=True)
        return self._left[2]

    def _leave_reason(self, key: str, all_cores: int, all_gpus: "Sequence[str]") -> str:
        tickets = [ticket for _, ticket, _ in self.files() if ticket is not None and self._is_alive(ticket)]
        mine = next((one for one in tickets if one["key"] == key and one["uid"] in (None, os.geteuid())), None)
        policy = self.policy()
        urgent = [one for one in tickets if one["granted"] is None and stated_level(one) == URGENT]
        if mine is None or not urgent:
            return ""
        gpus = all_gpus or sorted({gpu for one in tickets for gpu in gpus_named(one)})
        outside = self.outside(all_gpus, tickets)
        if ident(mine) not in plan(tickets, all_cores, gpus, time.time(), policy, self.uses(), outside)["leave"]:
            return ""
        return "the urgent run %s of %s needs its place" % (urgent[0]["run_id"], urgent[0]["user"])

    def mark(self, key: str, **values: "Any") -> None:
        """Set values in this user's ticket `key`, if it exists."""
        found = read(os.path.join(self.own, key + ".ticket"), None)
        if found is not None:
            self.write(dict(found, **values))

    # --- methods that write tickets and records of use

    def write(self, ticket: "Ticket") -> None:
        """Write a ticket atomically into this user's folder, readable for all."""
        write(os.path.join(self.own, ticket["key"] + ".ticket"), ticket)

    def remove(self, key: str) -> None:
        """Delete this user's ticket, which ends its lease or queue position."""
        path = os.path.join(self.own, key + ".ticket")
        found = read(path, None)
        if found is not None and found["granted"] is not None:
            self._charge(found, time.time())
        self._waits.pop(key, None)
        forget(path)

    def _charge(self, ticket: "Ticket", until: float) -> None:
        path, start = os.path.join(self.own, USE), granted_at(ticket)
        until = min(until, time.time())
        before = read_use(path, None)
        hours, lasted = before["hours"] if before is not None else [], max(0.0, until - start)
        typical = 0.7 * before["typical_s"] + 0.3 * lasted if before is not None else lasted
        policy, taken = self.policy() or SharePolicy({}), stated_level(ticket)
        gpus = gpu_count_held(ticket)
        rows = {row[0]: list(row) for row in hours}
        at = start
        while at < until and len(rows) < 10 * _ROWS:
            hour = at - at % 3600
            seconds = min(until, hour + 3600) - at
            row = rows.setdefault(hour, [hour, 0.0, 0.0, 0.0])
            for place, amount in enumerate((policy.weight(ticket, taken), gpus, gpus * (taken == URGENT)), start=1):
                row[place] = round(row[place] + seconds * amount, 3)
            at = hour + 3600
        with contextlib.suppress(OSError):  # if the disk is full, write no record, so that the lease ends in any case
            write(path, {"hours": _merged(list(rows.values()), until), "typical_s": round(typical, 1)})


class _Wait:
    def __init__(self, stamp: "tuple[int, ...]", place: int, answer: "LeaseAnswer") -> None:
        now = time.monotonic()
        self.stamp, self.place, self.answer = stamp, place, answer
        self.look_at, self.alive_at = now, now + _ALIVE_S
        self.read_at = now + min(_READ_S * (1 + place), _LONGEST_READ_S)


def own_pids(tickets: "Sequence[Ticket]") -> "set[int]":
    """Return the pids of Paceline's own processes: this process, supervisors and guardians in `tickets`."""
    return {one[name] for one in tickets for name in ("pid", "guardian") if isinstance(one.get(name), int)} | {
        os.getpid()
    }


def gpus_text(blocked: "Mapping[str, str]") -> str:
    return "; ".join("GPU %s: %s" % item for item in sorted(blocked.items()))


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_ctime_ns
    except OSError:
        return 0


def _merged(rows: "list[list[float]]", now: float) -> "list[list[float]]":
    """Merge `PastUse.hours` by hour, older rows by day. Drop very old rows."""
    found = {}  # type: dict[float, list[float]]
    for row in rows:
        if row[0] > now - _KEPT_S:
            start = row[0] if row[0] > now - _HOURLY_S else row[0] - row[0] % 86400
            before = found.get(start, [start, 0.0, 0.0, 0.0])
            found[start] = [start, *(round(before[place] + row[place], 3) for place in (1, 2, 3))]
    return [found[start] for start in sorted(found)][-_ROWS:]


def taken_ports(tickets: "Sequence[Ticket]") -> "set[int]":
    """Return the ports that runs hold, from their queue entries."""
    return {port for one in tickets if one["granted"] for port in one["granted"].get("ports", ())}


def gpus_named(ticket: "Ticket") -> "list[str]":
    """Return the GPUs that a queue entry lists as held or visible."""
    seen = ticket.get("all_gpus")
    named = [*held_gpus(ticket), *(seen if isinstance(seen, list) else ())]
    return [gpu for gpu in named[:_COUNT] if isinstance(gpu, str)]


def since(key: str, written: float) -> float:
    """Return the submission time (Unix seconds) in a queue entry's key.

    The result is at most `_CLAIM_S` seconds before `written`, the change time of the ticket's file, and never after it.
    """
    try:
        claimed = float(calendar.timegm(time.strptime(key[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return written
    return max(written - _CLAIM_S, min(claimed, written))


def has_room(ticket: "Ticket", others: "Sequence[Ticket]", all_cores: int, all_gpus: "Sequence[str]") -> bool:
    """Return whether a run's cores and GPUs are free now. Reserve nothing."""
    holders = [other for other in others if other["granted"] is not None]
    # If another run waits in the queue, this run has to wait behind it.
    return len(holders) == len(others) and Room(all_cores, all_gpus, holders).fit(ticket) is not None


def forget(path: str) -> None:
    # Ignore errors: a ticket (queue entry) that can't be deleted counts as dead in any case.
    with contextlib.suppress(OSError):
        os.unlink(path)


def write(path: str, value: "Any") -> None:
    """Write a JSON file atomically and readable for all users."""
    # Write to a new file of random name, because another user could have put a symbolic link at a predictable name.
    beside = "%s.%s.new" % (path, os.urandom(8).hex())
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        # Let other users read the file, even with a strict umask.
        os.fchmod(fd, 0o644)
        json.dump(value, file)
    os.rename(beside, path)


def read_json(path: str, uid: "int | None") -> "tuple[Any, os.stat_result] | None":
    """Return a file's JSON value and `os.stat_result`; None if missing or invalid. See `load_json`."""
    try:
        return load_json(path, uid)
    except (OSError, ValueError, RecursionError):
        return None


def load_json(path: str, uid: "int | None") -> "tuple[Any, os.stat_result]":
    """Return a file's JSON value and `os.stat_result`.

    uid: The owner that the file must have; None for any owner.
    """
    # Open with O_NONBLOCK: another user may have put a FIFO here, whose opening would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or uid not in (None, status.st_uid) or status.st_size > _TICKET_BYTES:
            raise ValueError("it is not a file of its owner with at most %d bytes" % _TICKET_BYTES)
        return json.loads(file.read(_TICKET_BYTES).decode()), status


def read_use(path: str, uid: "int | None") -> "PastUse | None":
    """Return a user's past use recorded at `path`, without hours in the future; None if invalid."""
    found = read_json(path, uid)
    if found is None or not isinstance(found[0], dict) or not isinstance(found[0].get("hours"), list):
        return None
    value, status = found
    rows = [
        (float(row[0]), float(row[1]), float(row[2]), float(row[3]))
        for row in value["hours"][:_ROWS]
        if isinstance(row, list) and len(row) == 4 and all(map(_is_amount, row)) and row[0] <= status.st_ctime
    ]
    typical = value.get("typical_s")
    return {
        "user": user_name(status.st_uid),
        "hours": rows,
        "typical_s": float(typical) if _is_amount(typical) else 0.0,
        "changed": status.st_ctime,
    }


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 1e15 and math.isfinite(value)


def read(path: str, uid: "int | None") -> "Ticket | None":
    """Return the ticket at `path`; None if invalid or not owned by `uid`."""
    found = read_json(path, uid)
    if found is None:
        return None
    value, status = found
    is_ticket = isinstance(value, dict) and isinstance(value.get("key"), str)
    if not is_ticket or os.path.basename(path) != value["key"] + ".ticket":
        return None
    granted = value.get("granted")
    held = {"gpus": []} if granted is None else granted
    counts = (value.get("cores"), value.get("gpu_count", 0))
    is_right = isinstance(held, dict) and all(isinstance(count, int) and 0 <= count < 1 << 31 for count in counts)
    if not is_right or counts[1] > _COUNT:
        return None
    for found, kind in ((held.get("gpus"), str), (held.get("ports", []), int)):
        if not isinstance(found, list) or len(found) > _COUNT or not all(isinstance(one, kind) for one in found):
            return None
    # Escape special characters in texts that another user may have written, because terminals and logs show the texts.
    run_id = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value.get("run_id"))[:_LONGEST])
    hangs = value.get("hangs_since")
    hangs = hangs if isinstance(hangs, str) and len(hangs) == _UTC_LENGTH and hangs.isprintable() else None
    # The ticket (queue entry) claims a submission time. Compare it with the file's ctime, which users can't set.
    return dict(
        value,
        uid=uid,
        user=user_name(status.st_uid),
        run_id=run_id,
        gpu_count=counts[1],
        granted=granted,
        since=since(value["key"], status.st_ctime),
        changed=status.st_ctime,
        seen=min(status.st_mtime, status.st_ctime),
        hangs_since=hangs,
    )
