"""The queue of one machine: tickets of the runs that hold a share of it or wait for one.

A ticket is a small file, whose name gives its place. Runs are served strictly in order, so large demands do not starve. A
ticket is valid while its run lives: for `local` while the lock of the run's folder is held (`paceline.targets.local_leases`),
on a host of an `ssh` target while the run's agent lives (below). No process serves the queue and nothing needs cleaning:
readers ignore invalid tickets, and remove their own.

The second half is the program of a host. The file is sent as text to a bare Python there
(`paceline.targets.ssh.probe.host_program`), which reports resources and grants leases.

    /tmp/paceline-leases-<hostname>.guard     shared by all users: locked while tickets are read or changed
    /tmp/paceline-leases-<uid>/<hostname>/ 2026-11-21T...Z_<run id>.ticket       valid while the run's agent on this machine
    lives: until its supervisor ends or
                                              the link is cut

The variable PACELINE_LEASES replaces /tmp.

Tickets of several users are ordered by the times that the kernel gave to their files. A ticket may claim up to `_CLAIM_S`
before that, since runs are submitted elsewhere. Among one user's tickets, the older submission is first.

Users write in their own folders and read the others'. A ticket always counts as its file owner's. Links, files of other
owners and invalid tickets are ignored. So no user can make another's program write elsewhere, remove another's tickets or
forge them. Everybody can hold the guard, but the error names the holder.

The code is Python 3.6, so an interpreter that is too old can report that.
"""

# ruff: noqa: UP031

import calendar
import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    Ticket = dict[str, Any]

if "devices" not in globals():  # on a host, the texts of these modules precede this one
    from paceline.observe.node.gpus import devices
    from paceline.system.lock_holder import holder, user_name

_PARENT = "/tmp"
_PREFIX = "paceline-leases-"
#: Longer than the guard is ever needed, shorter than the time limit of a host's answer.
_GUARD_S = 8.0
#: How long before its file was written a ticket may claim to be submitted.
_CLAIM_S = 60.0
#: Limits on the size of a ticket and the tickets per user.
_TICKET_BYTES, _TICKETS = 1 << 16, 1000
#: Limits on the run id and the UTC time that are displayed.
_LONGEST, _UTC_LENGTH = 300, len("2026-11-23 06:12:03 UTC")


class LeasesError(OSError):
    """The error that the leases can't be used; the message says why, and what to do."""


class Queue:
    """The tickets of one machine. Call its methods within `locked()`.

        {"key": "2026-...", "run_id": ..., "cores": 2, "gpu_count": 1, "port_count": 0, "granted": {"gpus": ["0"]} or None}

    An optional gpu_share is the share of each GPU that the run takes.

    Args:
        own: The folder of this user's tickets.
        folders: Returns (uid, folder) of each user whose tickets count; uid None accepts files of any owner.
        locked: Excludes other readers and writers.
        is_alive: Whether the run of a ticket lives.
        free_ports: Takes (count, taken ports) and returns ports.
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
        """Return the valid tickets in order. Remove invalid ones of this user."""
        found = []
        for path, ticket, is_mine in self.files():
            if ticket is not None and self._is_alive(ticket):
                found.append(ticket)
            elif is_mine:
                forget(path)
        return in_order(found)

    def files(self) -> "Iterator[tuple[str, Ticket | None, bool]]":
        """Yield (path, ticket or None if invalid, whether it is this user's) of each file."""
        for uid, folder in self._folders():
            is_mine = uid is None or uid == os.geteuid()
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                continue
            # Read a limited number: another user may fill their folder.
            for name in names[:_TICKETS]:
                path = os.path.join(folder, name)
                if name.endswith(".ticket"):
                    yield path, read(path, uid), is_mine
                elif name.endswith(".new"):  # left by a killed process: writers hold the guard
                    yield path, None, is_mine

    def grant(
        self,
        ticket: "Ticket",
        others: "Sequence[Ticket]",
        all_cores: int,
        all_gpus: "Sequence[str]",
        at_once: bool = False,
    ) -> "dict[str, Any]":
        """Serve a run if it is first and fits: {"granted": share}, else {"ahead": tickets, "holders": tickets}.

        ticket: The run's; it is written to its file, unless at_once is set and nothing fits.
        others: All other tickets.
        all_cores: To share out, as `all_gpus`.
        """
        if ticket["granted"] is None:
            queue = in_order([*(other for other in others if other["granted"] is None), ticket])
            ahead = queue[: next(place for place, other in enumerate(queue) if other is ticket)]
            holders = [other for other in others if other["granted"] is not None]
            if not ticket["cores"] and not ticket["gpu_count"]:
                ahead = []  # it takes nothing from the runs ahead
            ticket["granted"] = None if ahead else self._fit(ticket, holders, all_cores, all_gpus)
            if ticket["granted"] is not None or not (at_once or self._has_place(ticket)):
                self.write(ticket)
            if ticket["granted"] is None:
                return {"ahead": ahead, "holders": holders, "uid": os.geteuid()}
        return {"granted": ticket["granted"]}

    def _fit(
        self, ticket: "Ticket", holders: "list[Ticket]", all_cores: int, all_gpus: "Sequence[str]"
    ) -> "dict[str, Any] | None":
        """Return a share of the machine for the run beside the holders, or None."""
        granted = fit(ticket, holders, all_cores, all_gpus)
        if granted is not None and self._free_ports is not None:
            granted["ports"] = list(self._free_ports(ticket["port_count"], self.taken("ports", holders)))
            if len(granted["ports"]) < ticket["port_count"]:
                return None
        return granted

    def _has_place(self, ticket: "Ticket") -> bool:
        """Return whether the ticket is already queued: writing it again would lose its age."""
        there = read(os.path.join(self.own, ticket["key"] + ".ticket"), None)
        return there is not None and there["granted"] is None and there.get("pid") == ticket.get("pid")

    @staticmethod
    def taken(what: str, holders: "Sequence[Ticket]") -> "Any":
        """Return the set of "gpus" or "ports" that the tickets hold."""
        return {each for item in holders if item["granted"] for each in item["granted"].get(what, ())}

    def write(self, ticket: "Ticket") -> None:
        """Write a ticket atomically, readable for everybody, in a folder that only this user can write to."""
        path = os.path.join(self.own, ticket["key"] + ".ticket")
        # A new file with a random name: never follow or overwrite an existing file.
        beside = "%s.%s.new" % (path, os.urandom(8).hex())
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            # Other users have to read it, whatever the umask.
            os.fchmod(fd, 0o644)
            json.dump(ticket, file)
        os.rename(beside, path)

    def remove(self, key: str) -> None:
        """Remove a ticket of this user: its lease or its place."""
        forget(os.path.join(self.own, key + ".ticket"))


def in_order(tickets: "Sequence[Ticket]") -> "list[Ticket]":
    """Return the tickets in the order of service: a user's places come from file ages, filled in key order."""
    places = sorted(tickets, key=lambda ticket: (ticket["since"], ticket["uid"] or 0, ticket["key"]))
    by_key = sorted(tickets, key=lambda ticket: ticket["key"])
    mine = {uid: iter([each for each in by_key if each["uid"] == uid]) for uid in {each["uid"] for each in tickets}}
    return [next(mine[place["uid"]]) for place in places]


def since(key: str, written: float) -> float:
    """Return when a ticket was submitted, in seconds since 1970, limiting the claim of its key."""
    try:
        claimed = float(calendar.timegm(time.strptime(key[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return written
    return max(written - _CLAIM_S, min(claimed, written))


def has_room(ticket: "Ticket", others: "Sequence[Ticket]", all_cores: int, all_gpus: "Sequence[str]") -> bool:
    """Return whether a run's demand, without ports, fits now. Nothing is written."""
    holders = [other for other in others if other["granted"] is not None]
    # A waiting run would be served first.
    return len(holders) == len(others) and fit(ticket, holders, all_cores, all_gpus) is not None


def fit(
    ticket: "Ticket", holders: "Sequence[Ticket]", all_cores: int, all_gpus: "Sequence[str]"
) -> "dict[str, Any] | None":
    """Return the GPUs for a run beside the holders, {"gpus": [...]}, or None if it does not fit."""
    used = sum(int(item["cores"]) for item in holders)
    free = free_gpus(ticket, holders, all_gpus)
    # A run that asks for more cores than the machine has gets all of them.
    if used + min(ticket["cores"], all_cores) > all_cores or ticket["gpu_count"] > len(free):
        return None
    return {"gpus": free[: ticket["gpu_count"]]}


def free_gpus(ticket: "Ticket", holders: "Sequence[Ticket]", all_gpus: "Sequence[str]") -> "list[str]":
    """Return the GPUs with room for the run's share, shared ones first, to keep whole GPUs free."""
    used = dict.fromkeys(all_gpus, 0.0)
    for item in holders:
        for gpu in item["granted"].get("gpus", ()):
            used[gpu] = used.get(gpu, 0.0) + share_of(item)
    # Rounding: ten shares of 0.1 sum to slightly more than 1.
    free = [gpu for gpu in all_gpus if used[gpu] + share_of(ticket) < 1 + 1e-6]
    return sorted(free, key=lambda gpu: -round(used[gpu], 6))


def answer(verb: str, given: "dict[str, Any]") -> "dict[str, Any]":
    """Return the result of "look", "take" or "give_back", or {"error": reason}, and the Python that ran it."""
    try:
        found = {"look": look, "take": take, "give_back": give_back}[verb](given)
    except OSError as error:
        found = {"error": str(error)}
    return dict(found, python=[sys.executable, *sys.version_info[:3]])


def look(given: "dict[str, Any]") -> "dict[str, Any]":
    """Report the machine's resources and tickets. GPUs only if `with_gpus`, since listing them is slow."""
    answer: dict[str, Any] = {"host": os.uname().nodename, "cores": core_count(), "boot_id": boot_id()}
    if given.get("with_gpus"):
        answer["gpus"] = list(devices())
    answer["tickets"] = []
    # On a machine without runs, don't create a file.
    if user_folders():
        with locked():
            answer["tickets"] = host_queue().tickets()
    return answer


def take(given: "dict[str, Any]") -> "dict[str, Any]":
    """Return the run's lease {"granted": {"gpus": [...]}} if it is first and fits; else the runs in the way.

    Args:
        given: The ticket's `key`, `run_id`, `cores` and `gpu_count`, the `pid` of the run's agent, the machine's `all_cores`
            and `all_gpus`, and at_once: don't queue unless granted.
    """
    offered = [given.pop("all_cores"), given.pop("all_gpus"), given.pop("at_once", False)]
    mine = dict(given, boot_id=boot_id(), started=start_time(given["pid"]), uid=os.geteuid(), granted=None)
    mine["since"] = since(mine["key"], time.time())
    queue = host_queue()
    with locked():
        for folder in (os.path.dirname(queue.own), queue.own):
            make_own_folder(folder)
        others = []
        # The pid is part of the identity: a new agent must not take over the ticket of a living old one.
        for item in queue.tickets():
            if all(item[name] == mine[name] for name in ("uid", "key", "pid")):
                mine.update(granted=item["granted"], since=item["since"])
            else:
                others.append(item)
        return queue.grant(mine, others, *offered)


def give_back(given: "dict[str, Any]") -> "dict[str, Any]":
    """Remove the run's ticket."""
    with locked():
        host_queue().remove(given["key"])
    return {}


def note(given: "dict[str, Any]") -> "dict[str, Any]":
    """Record in the run's ticket since when it hangs (`hangs_since`, None to clear), for waiting runs."""
    queue = host_queue()
    with locked():
        found = read(os.path.join(queue.own, given["key"] + ".ticket"), os.geteuid())
        if found is not None:
            queue.write(dict(found, hangs_since=given["hangs_since"]))
    return {}


def host_queue() -> Queue:
    """Return the queue of this host, which all of its users share."""
    # Machines that boot without a disk may share a /tmp.
    own = os.path.join(parent_dir(), "%s%d" % (_PREFIX, os.geteuid()), os.uname().nodename)
    return Queue(own, user_folders, locked, is_alive)


def is_alive(ticket: "Ticket") -> bool:
    """Return whether the ticket's agent runs and belongs to its owner."""
    pid = ticket.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31 or ticket.get("boot_id") != boot_id():
        return False
    # Signal 0 only checks whether the process exists.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process, which /proc may hide
    owner = process_owner(pid)
    if owner is not None and owner != ticket["uid"]:
        return False
    # With hidepid, /proc hides other users' processes: then a used pid has to suffice.
    found = start_time(pid)
    return found == ticket.get("started") if found else not os.path.isdir("/proc/%d" % pid)


def start_time(pid: int) -> str:
    """Return the start time of a process, which distinguishes reused pids; "" if unknown or dead."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            state, *others = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else others[18]


def process_owner(pid: int) -> "int | None":
    """Return the uid of a process's owner, or None if unknown."""
    try:
        with open("/proc/%d/status" % pid) as file:
            for line in file:
                if line.startswith("Uid:"):
                    return int(line.split()[2])
    except (OSError, ValueError):
        pass
    return None


def forget(path: str) -> None:
    # An undeletable ticket is ignored anyway.
    with contextlib.suppress(OSError):
        os.unlink(path)


def read(path: str, uid: "int | None") -> "Ticket | None":
    """Return the ticket of this user (any user for None), or None if it is invalid."""
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
        value,
        uid=uid,
        user=user_name(status.st_uid),
        run_id=run_id,
        granted=granted,
        since=place,
        hangs_since=hangs,
    )


def share_of(ticket: "Ticket") -> float:
    """Return the share of each GPU that a run takes. Invalid values of other users' tickets count as 1."""
    share = ticket.get("gpu_share", 1.0)
    return float(share) if isinstance(share, (int, float)) and 0 < share <= 1 else 1.0


def parent_dir() -> str:
    return os.environ.get("PACELINE_LEASES") or _PARENT


def user_folders() -> "list[Any]":
    """Return (uid, folder of tickets) of all users that own theirs."""
    parent, found = parent_dir(), []
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    for name in names:
        number = name[len(_PREFIX) :]
        if not name.startswith(_PREFIX) or not number.isdigit():
            continue
        outer = os.path.join(parent, name)
        inner = os.path.join(outer, os.uname().nodename)
        # Check the outer folder too: its writers could replace the inner one.
        if is_own_folder(outer, int(number)) and is_own_folder(inner, int(number)):
            found.append((int(number), inner))
    return sorted(found)


def is_own_folder(path: str, uid: int) -> bool:
    """Return whether a path is a folder (not a link) of this user that only they can write to."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


@contextlib.contextmanager
def locked() -> "Iterator[None]":
    """Exclude other readers and writers of tickets during a `with` block.

    Raises:
        LeasesError: A folder is unsafe, or a process holds the guard too long.
    """
    check_parent()
    fd = take_guard(os.path.join(parent_dir(), "%s%s.guard" % (_PREFIX, os.uname().nodename)))
    try:
        yield
    # Closing releases the lock. The file stays: removing it could lead to two locks of one name.
    finally:
        os.close(fd)


def check_parent() -> None:
    parent = parent_dir()
    if parent != _PARENT and not os.path.isdir(parent):
        with contextlib.suppress(FileExistsError):
            os.makedirs(parent, 0o755)
    found = os.stat(parent)
    if not stat.S_ISDIR(found.st_mode):
        raise LeasesError("PACELINE_LEASES=%r is no folder" % parent)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise LeasesError("everybody can rename what lies in %r. Set its sticky bit: chmod +t %s" % (parent, parent))
    if parent != _PARENT and found.st_uid not in (0, os.geteuid()):
        raise LeasesError(
            "PACELINE_LEASES=%r belongs to user %s, who could take leases away. Let root make a folder of mode 1777, or "
            "leave the variable out" % (parent, user_name(found.st_uid))
        )


def make_own_folder(path: str) -> None:
    """Create this user's folder, readable for others."""
    try:
        # Create it private, then open it to readers: others can't get in between.
        os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        os.fchmod(fd, 0o755)
        os.close(fd)
    except FileExistsError:
        pass
    if not is_own_folder(path, os.geteuid()):
        found = os.lstat(path)
        what = "is a link" if stat.S_ISLNK(found.st_mode) else "belongs to user %s" % user_name(found.st_uid)
        if found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
            what = "is no folder" if not stat.S_ISDIR(found.st_mode) else "can be written to by others"
        raise LeasesError("%r %s: it is not used. Remove it, or let an administrator do so" % (path, what))


def take_guard(path: str) -> int:
    """Return an open file that holds the lock of the guard, which is never removed.

    Raises:
        LeasesError: It is not a plain file, or another process holds it; the message names the process.
    """
    deadline = time.monotonic() + _GUARD_S
    while True:
        fd, why = open_guard(path), "user %s keeps it from being opened" % owner_of(path)
        if fd is not None:
            try:
                # Non-blocking: the holder may be stopped, and this process has to report it.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The owner may have removed it between open and flock, leading to two locks of one name.
                if is_still(path, fd):
                    return fd
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(fd)
                    raise
                why = "%s holds it" % holder(path)
            os.close(fd)
        if time.monotonic() > deadline:
            raise LeasesError(
                "the lock %r of the machine's leases can't be had: %s, and has for %g s. It is needed for milliseconds: "
                "let that process end, or be ended" % (path, why, _GUARD_S)
            )
        time.sleep(0.02)


def open_guard(path: str) -> "int | None":
    """Open or create the guard. Return None if another user has just created it or denies reading."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Read access suffices for a lock, and is all that another user's file grants.
        fd = os.open(path, os.O_RDONLY | flags)
    except FileNotFoundError:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
        except FileExistsError:
            return None
        os.fchmod(fd, 0o644)
    except PermissionError:
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise LeasesError("%r is a link, of user %s: it is not followed. Remove it" % (path, owner_of(path))) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LeasesError("%r of user %s is no plain file: it is not used. Remove it" % (path, owner_of(path)))
    return fd


def is_still(path: str, fd: int) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def owner_of(path: str) -> str:
    try:
        return user_name(os.lstat(path).st_uid)
    except OSError:
        return "?"


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
