"""The queue of one machine. Its tickets are files of the runs that hold a share of the machine or wait for a share.

A ticket's file name gives its queue position. Runs are served strictly in order, so large demands do not starve. A
ticket is valid while its run lives: for `local` while the lock of the run's folder is held (`paceline.targets.local_leases`),
on a host of an `ssh` target while the run's agent lives (`paceline.targets.host_leases`). No process serves the queue and
nothing needs cleaning: readers ignore invalid tickets, and delete those of their own user.

Tickets of several users are ordered by the ctimes of their files. A ticket may claim to be up to `_CLAIM_S`
seconds older, since runs are submitted on other machines. Among one user's tickets, the older submission is first.

Hosts run this text with their own Python, 3.6 or later, so it needs only the standard library and quotes annotations.
"""

# ruff: noqa: UP031

import calendar
import contextlib
import json
import os
import stat
import time

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import Any, TypedDict

    #: A ticket as read from a file, perhaps of another user; or the request for a ticket.
    Ticket = dict[str, Any]

    class GrantedShare(TypedDict, total=False):
        """The GPUs and ports of a machine that a run holds."""

        gpus: list[str]
        ports: list[int]

    class LeaseAnswer(TypedDict, total=False):
        """A host's answer: a granted share or the tickets that the run waits for, the host's resources, or an error."""

        granted: GrantedShare
        ahead: list[Ticket]
        holders: list[Ticket]
        uid: int
        host: str
        boot_id: str
        cores: int
        gpus: list[str]
        tickets: list[Ticket]
        error: str
        python: list[Any]


if "user_name" not in globals():  # on a host, the text of `lock_holder` precedes the text of this module
    from paceline.system.lock_holder import user_name

#: Most seconds between the submission time that a ticket claims and the change time of its file.
_CLAIM_S = 60.0
#: Limits on the size of a ticket and on the number of files read per user.
_TICKET_BYTES, _TICKETS = 1 << 16, 1000
#: The longest run id that is displayed, and the length of a displayed UTC time.
_LONGEST, _UTC_LENGTH = 300, len("2026-11-23 06:12:03 UTC")


class LeasesError(OSError):
    """The error that a machine's leases can't be used; the message says why, and what to do."""


class Queue:
    """The tickets of one machine. Call the methods of a queue within `locked()`.

        {"key": "2026-...", "run_id": ..., "cores": 2, "gpu_count": 1, "port_count": 0, "granted": {"gpus": ["0"]} or None}

    The optional key gpu_share is the share of each GPU that the run takes.

    Args:
        own: The folder of this user's tickets.
        folders: Returns (uid, folder) of each user whose tickets count; uid None accepts files of any owner.
        locked: Returns a context manager that excludes other readers and writers.
        is_alive: Returns whether the run of a ticket lives.
        free_ports: Takes (count, taken ports) and returns up to `count` free ports.
    """

    def __init__(
        self,
        own: str,
        folders: "Callable[[], Sequence[tuple[int | None, str]]]",
        locked: "Callable[[], AbstractContextManager[None]]",
        is_alive: "Callable[[Ticket], bool]",
        free_ports: "Callable[[int, Any], Sequence[int]] | None" = None,
    ) -> None:
        self.own, self.locked = own, locked
        self._folders, self._is_alive, self._free_ports = folders, is_alive, free_ports

    def tickets(self) -> "list[Ticket]":
        """Return the valid tickets in the order of service. Delete invalid tickets of this user."""
        found = []
        for path, ticket, is_mine in self.files():
            if ticket is not None and self._is_alive(ticket):
                found.append(ticket)
            elif is_mine:
                forget(path)
        return in_order(found)

    def files(self) -> "Iterator[tuple[str, Ticket | None, bool]]":
        """Yield (path, ticket or None if invalid, whether the file is this user's) of each file."""
        for uid, folder in self._folders():
            is_mine = uid is None or uid == os.geteuid()
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                continue
            # Limit the number of files: another user may have filled their folder with files.
            for name in names[:_TICKETS]:
                path = os.path.join(folder, name)
                if name.endswith(".ticket"):
                    yield path, read(path, uid), is_mine
                elif name.endswith(".new"):  # a killed process left this file: living writers hold the guard
                    yield path, None, is_mine

    def grant(
        self,
        ticket: "Ticket",
        others: "Sequence[Ticket]",
        all_cores: int,
        all_gpus: "Sequence[str]",
        at_once: bool = False,
    ) -> "LeaseAnswer":
        """Return {"granted": share} if the run is first and fits, else {"ahead": tickets, "holders": tickets}.

        ticket: The run's ticket, which is written to its file unless at_once is set and the run does not fit.
        others: All other tickets.
        all_cores: Cores of the machine, for all runs together; `all_gpus` are its GPUs.
        """
        if ticket["granted"] is None:
            queue = in_order([*(other for other in others if other["granted"] is None), ticket])
            ahead = queue[: next(place for place, other in enumerate(queue) if other is ticket)]
            holders = [other for other in others if other["granted"] is not None]
            if not ticket["cores"] and not ticket["gpu_count"]:
                ahead = []  # the run takes no resources from the runs ahead
            ticket["granted"] = None if ahead else self._fit(ticket, holders, all_cores, all_gpus)
            if ticket["granted"] is not None or not (at_once or self._has_place(ticket)):
                self.write(ticket)
            if ticket["granted"] is None:
                return {"ahead": ahead, "holders": holders, "uid": os.geteuid()}
        return {"granted": ticket["granted"]}

    def _fit(
        self, ticket: "Ticket", holders: "list[Ticket]", all_cores: int, all_gpus: "Sequence[str]"
    ) -> "GrantedShare | None":
        """Return a share of the machine that the holders of leases leave free, or None if the run does not fit."""
        granted = fit(ticket, holders, all_cores, all_gpus)
        if granted is not None and self._free_ports is not None:
            granted["ports"] = list(self._free_ports(ticket["port_count"], self.taken("ports", holders)))
            if len(granted["ports"]) < ticket["port_count"]:
                return None
        return granted

    def _has_place(self, ticket: "Ticket") -> bool:
        """Return whether the ticket is already queued. Rewriting its file would reset the ticket's age."""
        there = read(os.path.join(self.own, ticket["key"] + ".ticket"), None)
        return there is not None and there["granted"] is None and there.get("pid") == ticket.get("pid")

    @staticmethod
    def taken(what: str, holders: "Sequence[Ticket]") -> "Any":
        """Return the set of "gpus" or "ports" that the tickets hold."""
        return {each for item in holders if item["granted"] for each in item["granted"].get(what, ())}

    def write(self, ticket: "Ticket") -> None:
        """Write a ticket atomically and readable for all users, into a folder that only this user can write to."""
        path = os.path.join(self.own, ticket["key"] + ".ticket")
        # Create a new file with a random name, so that no existing file or link is followed or overwritten.
        beside = "%s.%s.new" % (path, os.urandom(8).hex())
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            # Other users have to read it, whatever the umask.
            os.fchmod(fd, 0o644)
            json.dump(ticket, file)
        os.rename(beside, path)

    def remove(self, key: str) -> None:
        """Delete a ticket of this user, which gives up its lease or its queue position."""
        forget(os.path.join(self.own, key + ".ticket"))


def in_order(tickets: "Sequence[Ticket]") -> "list[Ticket]":
    """Return the tickets in the order of service. File ages give each user's positions; key order fills them."""
    places = sorted(tickets, key=lambda ticket: (ticket["since"], ticket["uid"] or 0, ticket["key"]))
    by_key = sorted(tickets, key=lambda ticket: ticket["key"])
    mine = {uid: iter([each for each in by_key if each["uid"] == uid]) for uid in {each["uid"] for each in tickets}}
    return [next(mine[place["uid"]]) for place in places]


def since(key: str, written: float) -> float:
    """Return the submission time in seconds since 1970 that a key claims, at most `_CLAIM_S` before `written`."""
    try:
        claimed = float(calendar.timegm(time.strptime(key[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return written
    return max(written - _CLAIM_S, min(claimed, written))


def has_room(ticket: "Ticket", others: "Sequence[Ticket]", all_cores: int, all_gpus: "Sequence[str]") -> bool:
    """Return whether a run's demand, without ports, fits now. No ticket is written."""
    holders = [other for other in others if other["granted"] is not None]
    # Another run that waits in the queue would be served before this run.
    return len(holders) == len(others) and fit(ticket, holders, all_cores, all_gpus) is not None


def fit(
    ticket: "Ticket", holders: "Sequence[Ticket]", all_cores: int, all_gpus: "Sequence[str]"
) -> "GrantedShare | None":
    """Return {"gpus": [...]} for a run from the resources that the holders leave free, or None if it does not fit."""
    used = sum(int(item["cores"]) for item in holders)
    free = free_gpus(ticket, holders, all_gpus)
    # A run that asks for more cores than the machine has gets all of them.
    if used + min(ticket["cores"], all_cores) > all_cores or ticket["gpu_count"] > len(free):
        return None
    return {"gpus": free[: ticket["gpu_count"]]}


def free_gpus(ticket: "Ticket", holders: "Sequence[Ticket]", all_gpus: "Sequence[str]") -> "list[str]":
    """Return the GPUs that can fit the run's share, most used GPUs first, to keep whole GPUs free."""
    used = dict.fromkeys(all_gpus, 0.0)
    for item in holders:
        for gpu in item["granted"].get("gpus", ()):
            used[gpu] = used.get(gpu, 0.0) + share_of(item)
    # Rounding: ten shares of 0.1 sum to slightly more than 1.
    free = [gpu for gpu in all_gpus if used[gpu] + share_of(ticket) < 1 + 1e-6]
    return sorted(free, key=lambda gpu: -round(used[gpu], 6))


def forget(path: str) -> None:
    # An undeletable ticket is ignored anyway.
    with contextlib.suppress(OSError):
        os.unlink(path)


def read(path: str, uid: "int | None") -> "Ticket | None":
    """Return the ticket at `path`, or None if it is invalid or its file's owner is not `uid` (None: any owner)."""
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or uid not in (None, status.st_uid):
                return None
            value = json.loads(file.read(_TICKET_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("key"), str):
        return None
    if os.path.basename(path) != value["key"] + ".ticket":
        return None
    granted = value.get("granted")
    gpus_held = granted.get("gpus") if isinstance(granted, dict) else []
    cores = value.get("cores")
    if not isinstance(cores, int) or not 0 <= cores < 1 << 31:
        return None
    if (granted is not None and not isinstance(granted, dict)) or not isinstance(gpus_held, list):
        return None
    if not all(isinstance(gpu, str) for gpu in gpus_held):
        return None
    # The owner of a file can set its mtime, but not its ctime.
    place = since(value["key"], status.st_ctime)
    # Untrusted text of another user, shown on terminals and in logs.
    run_id = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value.get("run_id"))[:_LONGEST])
    hangs = value.get("hangs_since")
    hangs = hangs if isinstance(hangs, str) and len(hangs) == _UTC_LENGTH and hangs.isprintable() else None
    return dict(
        value, uid=uid, user=user_name(status.st_uid), run_id=run_id, granted=granted, since=place, hangs_since=hangs
    )


def share_of(ticket: "Ticket") -> float:
    """Return the share of each GPU that a run takes. An invalid value in another user's ticket counts as 1."""
    share = ticket.get("gpu_share", 1.0)
    return float(share) if isinstance(share, (int, float)) and 0 < share <= 1 else 1.0
