"""The queue of one machine: a ticket for each run that holds some of it or waits for some, and who is served next.

A ticket is a small file. Its name gives its place in the order. Runs are served strictly in order: one that needs much is
not overtaken for ever by those that need little. A ticket counts as long as the run is alive. Who counts as alive is handed
in: `local` looks at the lock of the run's folder (`paceline.targets.local_leases`), a host of a `ssh` target at the run's
agent (below). Nothing has to be cleaned up and no process serves the queue: whoever looks next leaves out, and where it may
removes, what counts no more.

Behind the queue is the program of a host, of which the whole file is a text that a bare Python is given
(`paceline.targets.ssh.probe.host_program`): what the host has, and who holds how much of it.

    /tmp/paceline-leases-<hostname>.guard     of everybody on the machine: locked by whoever reads or changes
    /tmp/paceline-leases-<user's number>/<hostname>/
        2026-11-21T...Z_<run id>.ticket       counts as long as the run's agent on this machine lives, which ends when the
                                              run's supervisor does, or when the link to it is cut

PACELINE_LEASES of the machine's environment names another folder than /tmp.

The order of several users' tickets is that in which they came to the machine, by the times that the kernel gives to their
files. A ticket's own word counts for up to `_CLAIM_S` before that, since runs are submitted elsewhere. Of one user's tickets the
older submission comes first.

Everybody writes in a folder of their own, and reads the others'. A ticket counts as its owner's, whatever it says; links,
other people's files in somebody's folder, and what is no ticket count for nothing. So nobody can have another user's
program write where he likes, take his tickets away, or speak for him. What anybody can do is to hold the guard: who does
is named.

Written in the words of Python 3.6, so that one that is too old can say so.
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

TYPE_CHECKING = False  # typing's own takes its time to load
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    Ticket = dict[str, Any]

if "devices" not in globals():  # there the texts of these modules stand above this one
    from paceline.observe.node.gpus import devices
    from paceline.system.lock_holder import holder, user_name

_PARENT = "/tmp"
_PREFIX = "paceline-leases-"
#: Longer than anybody needs the guard for, shorter than a host may take to answer.
_GUARD_S = 8.0
#: A ticket's key may claim that it was submitted so long before its file was written.
_CLAIM_S = 60.0
#: No ticket is longer, and nobody has more.
_TICKET_BYTES, _TICKETS = 1 << 16, 1000
#: Characters of a run's id that are shown, and of a time in UTC.
_LONGEST, _UTC_LENGTH = 300, len("2026-11-23 06:12:03 UTC")


class LeasesError(OSError):
    """The leases can't be used as they are found; the message says why, and what to do."""


class Queue:
    """The tickets of one machine. Its methods are called while `locked()` lasts.

        {"key": "2026-...", "run_id": ..., "cores": 2, "gpu_count": 1, "port_count": 0, "granted": {"gpus": ["0"]} or None}

    gpu_share, where it is there: of each of its GPUs that the run takes; the rest is for others that take no more than that.

    own: the folder of this user's tickets. folders: returns (user's number, folder) of each user whose tickets count; None
    for the number takes a ticket whoever wrote it. locked: while it lasts, nobody else reads or changes tickets. is_alive:
    whether the run of a ticket still is. free_ports: (how many, those that are taken) -> ports, for tickets that ask for some.
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
        """All tickets that count, in order. Of this user's files, those that do not count are removed."""
        found = []
        for path, ticket, is_mine in self.files():
            if ticket is not None and self._is_alive(ticket):
                found.append(ticket)
            elif is_mine:
                forget(path)
        return in_order(found)

    def files(self) -> "Iterator[tuple[str, Ticket | None, bool]]":
        """(path, the ticket in it or None for what is none, whether it is this user's) of each file, whether it counts or not."""
        for uid, folder in self._folders():
            is_mine = uid is None or uid == os.geteuid()
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                continue
            # Another user may fill a folder of his own: so many are read, and no more.
            for name in names[:_TICKETS]:
                path = os.path.join(folder, name)
                if name.endswith(".ticket"):
                    yield path, read(path, uid), is_mine
                elif name.endswith(".new"):  # of one that was killed: whoever writes holds the guard
                    yield path, None, is_mine

    def grant(
        self,
        ticket: "Ticket",
        others: "Sequence[Ticket]",
        all_cores: int,
        all_gpus: "Sequence[str]",
        at_once: bool = False,
    ) -> "dict[str, Any]":
        """Serve the run if it is its turn and there is room: {"granted": what it holds}; else those in its way, {"ahead":
        tickets, "holders": tickets}.

        ticket: the run's. It is written to its file, but not where at_once finds no room. others: all other tickets.
        all_cores, all_gpus: what there is to share out.
        """
        if ticket["granted"] is None:
            queue = in_order([*(other for other in others if other["granted"] is None), ticket])
            ahead = queue[: next(place for place, other in enumerate(queue) if other is ticket)]
            holders = [other for other in others if other["granted"] is not None]
            if not ticket["cores"] and not ticket["gpu_count"]:
                ahead = []  # it takes nothing away from those before it
            ticket["granted"] = None if ahead else self._fit(ticket, holders, all_cores, all_gpus)
            if ticket["granted"] is not None or not (at_once or self._has_place(ticket)):
                self.write(ticket)
            if ticket["granted"] is None:
                return {"ahead": ahead, "holders": holders, "uid": os.geteuid()}
        return {"granted": ticket["granted"]}

    def _fit(
        self, ticket: "Ticket", holders: "list[Ticket]", all_cores: int, all_gpus: "Sequence[str]"
    ) -> "dict[str, Any] | None":
        """A share of the machine for the run, beside these; None where there is no room."""
        granted = fit(ticket, holders, all_cores, all_gpus)
        if granted is not None and self._free_ports is not None:
            granted["ports"] = list(self._free_ports(ticket["port_count"], self.taken("ports", holders)))
            if len(granted["ports"]) < ticket["port_count"]:
                return None
        return granted

    def _has_place(self, ticket: "Ticket") -> bool:
        """True if the ticket waits already: written again, its file would be as young as a new one."""
        there = read(os.path.join(self.own, ticket["key"] + ".ticket"), None)
        return there is not None and there["granted"] is None and there.get("pid") == ticket.get("pid")

    @staticmethod
    def taken(what: str, holders: "Sequence[Ticket]") -> "Any":
        """The set of all "gpus" or "ports" that these tickets hold."""
        return {each for item in holders if item["granted"] for each in item["granted"].get(what, ())}

    def write(self, ticket: "Ticket") -> None:
        """Put the ticket in its file: all of it or nothing, for everybody to read; in a folder where nobody else can write."""
        path = os.path.join(self.own, ticket["key"] + ".ticket")
        # A new file of a random name: nothing that lies there is followed or written to.
        beside = "%s.%s.new" % (path, os.urandom(8).hex())
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            # Whatever the umask: other users have to read it.
            os.fchmod(fd, 0o644)
            json.dump(ticket, file)
        os.rename(beside, path)

    def remove(self, key: str) -> None:
        """Give back what the ticket of this user's holds, or its place."""
        forget(os.path.join(self.own, key + ".ticket"))


def in_order(tickets: "Sequence[Ticket]") -> "list[Ticket]":
    """Return the tickets in the order of service: a user has the places of their files, by age, and fills them by key."""
    places = sorted(tickets, key=lambda ticket: (ticket["since"], ticket["uid"] or 0, ticket["key"]))
    by_key = sorted(tickets, key=lambda ticket: ticket["key"])
    mine = {uid: iter([each for each in by_key if each["uid"] == uid]) for uid in {each["uid"] for each in tickets}}
    return [next(mine[place["uid"]]) for place in places]


def since(key: str, written: float) -> float:
    """When a ticket was submitted, by its key's word as far as that may be believed: seconds since 1970."""
    try:
        claimed = float(calendar.timegm(time.strptime(key[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return written
    return max(written - _CLAIM_S, min(claimed, written))


def has_room(ticket: "Ticket", others: "Sequence[Ticket]", all_cores: int, all_gpus: "Sequence[str]") -> bool:
    """True if a run could be given what its ticket asks for now, ports left out, whatever it holds. Nothing is written."""
    holders = [other for other in others if other["granted"] is not None]
    # Somebody who waits would be served first.
    return len(holders) == len(others) and fit(ticket, holders, all_cores, all_gpus) is not None


def fit(
    ticket: "Ticket", holders: "Sequence[Ticket]", all_cores: int, all_gpus: "Sequence[str]"
) -> "dict[str, Any] | None":
    """The GPUs of a run, {"gpus": [...]}, beside these; None where there is no room for it."""
    used = sum(int(item["cores"]) for item in holders)
    free = free_gpus(ticket, holders, all_gpus)
    # A run that asks for more cores than there are gets all of them.
    if used + min(ticket["cores"], all_cores) > all_cores or ticket["gpu_count"] > len(free):
        return None
    return {"gpus": free[: ticket["gpu_count"]]}


def free_gpus(ticket: "Ticket", holders: "Sequence[Ticket]", all_gpus: "Sequence[str]") -> "list[str]":
    """Those with room for the run's share. First the ones that are shared already, so that whole ones stay free."""
    used = dict.fromkeys(all_gpus, 0.0)
    for item in holders:
        for gpu in item["granted"].get("gpus", ()):
            used[gpu] = used.get(gpu, 0.0) + share_of(item)
    # Ten shares of 0.1 are a little more than 1.
    free = [gpu for gpu in all_gpus if used[gpu] + share_of(ticket) < 1 + 1e-6]
    return sorted(free, key=lambda gpu: -round(used[gpu], 6))


def answer(verb: str, given: "dict[str, Any]") -> "dict[str, Any]":
    """The result of "look", "take" or "give_back", or {"error": why there is none}; with the Python that did it."""
    try:
        found = {"look": look, "take": take, "give_back": give_back}[verb](given)
    except OSError as error:
        found = {"error": str(error)}
    return dict(found, python=[sys.executable, *sys.version_info[:3]])


def look(given: "dict[str, Any]") -> "dict[str, Any]":
    """Look at what the machine has, and who holds or waits for some of it. GPUs only where `with_gpus`: asking takes a while."""
    answer: dict[str, Any] = {"host": os.uname().nodename, "cores": core_count(), "boot_id": boot_id()}
    if given.get("with_gpus"):
        answer["gpus"] = list(devices())
    answer["tickets"] = []
    # Where no run has ever been, looking leaves no file behind.
    if user_folders():
        with locked():
            answer["tickets"] = host_queue().tickets()
    return answer


def take(given: "dict[str, Any]") -> "dict[str, Any]":
    """The run's lease {"granted": {"gpus": [...]}} if it is its turn and there is room; else who is in the way.

    given: a ticket's `key`, `run_id`, `cores` and `gpu_count`, the `pid` of the run's agent, and `all_cores` and `all_gpus` of
    the machine. at_once: leave no place in the queue unless granted.
    """
    offered = [given.pop("all_cores"), given.pop("all_gpus"), given.pop("at_once", False)]
    mine = dict(given, boot_id=boot_id(), started=start_time(given["pid"]), uid=os.geteuid(), granted=None)
    mine["since"] = since(mine["key"], time.time())
    queue = host_queue()
    with locked():
        for folder in (os.path.dirname(queue.own), queue.own):
            make_own_folder(folder)
        others = []
        # The pid belongs to it: a run's new agent does not take over the ticket of an old one that still lives.
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
    """Write into the run's ticket since when it hangs (`hangs_since`; None: not any more), for those who wait for it."""
    queue = host_queue()
    with locked():
        found = read(os.path.join(queue.own, given["key"] + ".ticket"), os.geteuid())
        if found is not None:
            queue.write(dict(found, hangs_since=given["hangs_since"]))
    return {}


def host_queue() -> Queue:
    """The queue of this host, which all of its users share."""
    # Several machines may share a /tmp, as hosts that boot without a disk do.
    own = os.path.join(parent_dir(), "%s%d" % (_PREFIX, os.geteuid()), os.uname().nodename)
    return Queue(own, user_folders, locked, is_alive)


def is_alive(ticket: "Ticket") -> bool:
    """True if the agent that the ticket names still runs, and is its owner's."""
    pid = ticket.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31 or ticket.get("boot_id") != boot_id():
        return False
    # Signal 0 is never delivered; the kernel only says whether it could be.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, of whom /proc may show nothing
    owner = process_owner(pid)
    if owner is not None and owner != ticket["uid"]:
        return False
    # Mounted with hidepid, /proc shows nothing of other users' processes: then that the pid is in use has to do.
    found = start_time(pid)
    return found == ticket.get("started") if found else not os.path.isdir("/proc/%d" % pid)


def start_time(pid: int) -> str:
    """Tells a process from a later one of the same number; empty where it can't be seen, or is dead already."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            state, *others = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else others[18]


def process_owner(pid: int) -> "int | None":
    """The number of the user whose the process is; None where that can't be seen."""
    try:
        with open("/proc/%d/status" % pid) as file:
            for line in file:
                if line.startswith("Uid:"):
                    return int(line.split()[2])
    except (OSError, ValueError):
        pass
    return None


def forget(path: str) -> None:
    # It counts for nothing either way.
    with contextlib.suppress(OSError):
        os.unlink(path)


def read(path: str, uid: "int | None") -> "Ticket | None":
    """A ticket of this user's, anybody's for None; None for anything else."""
    try:
        # O_NONBLOCK: opening a FIFO that somebody has put there would wait for a writer.
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
    # Nobody can set the time of a file's change, as its owner can that of its contents.
    place = since(value["key"], status.st_ctime)
    # Another user's text, which is shown on a terminal and in files of lines.
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
    """The part of each of its GPUs that a run takes. Another user's ticket may say anything: all of it then."""
    share = ticket.get("gpu_share", 1.0)
    return float(share) if isinstance(share, (int, float)) and 0 < share <= 1 else 1.0


def parent_dir() -> str:
    return os.environ.get("PACELINE_LEASES") or _PARENT


def user_folders() -> "list[Any]":
    """(number of the user, their tickets' folder) of all users who have one, and whose own it is."""
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
        # The outer one too: who could write there could put another folder in the place of the inner one.
        if is_own_folder(outer, int(number)) and is_own_folder(inner, int(number)):
            found.append((int(number), inner))
    return sorted(found)


def is_own_folder(path: str, uid: int) -> bool:
    """True for a folder, not a link to one, that belongs to this user, and that nobody else can write to."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


@contextlib.contextmanager
def locked() -> "Iterator[None]":
    """While it lasts, nobody else reads or changes tickets.

    Raises:
        LeasesError: a folder is not as it has to be, or somebody holds the guard for longer than anybody needs it.
    """
    check_parent()
    fd = take_guard(os.path.join(parent_dir(), "%s%s.guard" % (_PREFIX, os.uname().nodename)))
    try:
        yield
    # Closing gives the lock back. The file stays: removing it would leave two locks of one name.
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
    """This user's own folder, which others can read."""
    try:
        # Closed at first, then opened for reading: nobody gets in between.
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
    """An open file that holds the lock of this file, which nobody removes.

    Raises:
        LeasesError: it is no plain file, or somebody else holds it; who that is.
    """
    deadline = time.monotonic() + _GUARD_S
    while True:
        fd, why = open_guard(path), "user %s keeps it from being opened" % owner_of(path)
        if fd is not None:
            try:
                # Not blocking: the holder may be stopped, and this process could not say who it is.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between open and flock its owner may have removed it; two would then hold two locks of one name.
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
    """The file, made where it is not there; None where another user has just made it, or does not let others read it."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Reading is enough for a lock, and all that another user's file in such a folder is good for.
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
    """True if the name still stands for the open file: its owner may have removed it."""
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
