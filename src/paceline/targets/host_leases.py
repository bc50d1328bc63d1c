"""Report an `ssh` host's resources, and lease shares of this machine to runs.

Paceline sends this file as text to the host's Python, after `targets.leases` (`targets.ssh.probe.host_program`).

    /tmp/paceline-leases-<hostname>.guard     shared by all users: locked while tickets are read or changed
    /tmp/paceline-leases-<uid>/<hostname>/
        2026-11-21T...Z_<run id>.ticket       valid while the run's agent on this machine lives: until its supervisor ends or
                                              the link is cut

        use.json                              what the user's ended runs have used
    /var/tmp/paceline-share/shares.json       shares and limits, once somebody has called `paceline share init`

The variable PACELINE_LEASES replaces /tmp and /var/tmp. Root's /etc/paceline/shares.json replaces the file in /var/tmp.

Users write in their own folders and read all users' folders. A ticket belongs to the owner of its file. Links, files of
other owners and invalid tickets are ignored. So no user can forge or remove another user's tickets, or redirect another
user's writes. A user can lock the guard too long, but the error message then names this user.

The code runs in Python 3.6, so that an interpreter that is too old for Paceline can report its version.
"""

# ruff: noqa: UP031

import contextlib
import errno
import fcntl
import functools
import os
import stat
import sys
import time

TYPE_CHECKING = False  # `typing` is slow to load, so don't import it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from paceline.targets.leases import LeaseAnswer, SharesAnswer, Ticket

if "Queue" not in globals():  # false on an SSH host, where the modules below and this one are parts of one script
    from paceline.observe.node.gpus import devices
    from paceline.observe.node.outside import driver, stat_fields, used_cores, used_gpus
    from paceline.system.lock_holder import holder, user_name
    from paceline.targets.fair_share import expected_starts, level, plan
    from paceline.targets.leases import LeasesError, Queue, gpus_named, gpus_text, own_pids, since
    from paceline.targets.shares import PRIORITIES, ident

_PARENT = "/tmp"
_PREFIX = "paceline-leases-"
#: Paths of two files that state each user's share of the machine. If root's file (the second) exists, the first file is ignored.
_SHARES, _ROOTS_SHARES = "/var/tmp/paceline-share/shares.json", "/etc/paceline/shares.json"
#: Folder of this user's tickets (queue entries) -> this process's `Queue` object, which caches the tickets that it has read.
_queues = {}  # type: dict[str, Queue]
#: Seconds to wait for the lock that protects all tickets. Programs hold it for less, and callers wait longer.
_GUARD_S = 8.0


def answer(verb: str, given: "Ticket") -> "LeaseAnswer":
    """Answer a request on the host's queue, by calling `look`, `take` or `give_back`.

    The answer has this interpreter's path and version as "python". After an OSError, "error" is the reason.
    """
    try:
        found: LeaseAnswer = {"look": look, "take": take, "give_back": give_back}[verb](given)
    except OSError as error:
        found = {"error": str(error)}
    found["python"] = [sys.executable, *sys.version_info[:3]]
    return found


def look(given: "Ticket") -> "LeaseAnswer":
    """Return the machine's cores and GPUs, and its runs' queue entries.

    given: Options. `with_gpus` lists the GPUs, which is slow; `gpus` has the machine's GPUs if the caller knows them.
    """
    answer: LeaseAnswer = {"host": os.uname().nodename, "cores": core_count(), "boot_id": boot_id()}
    if given.get("with_gpus") or "gpus" in given:
        answer["gpus"] = list(given["gpus"] if "gpus" in given else devices())
    queue, answer["tickets"] = host_queue(), []
    # If no user has tickets (queue entries), don't create the guard file, because its lock would protect nothing.
    if user_folders():
        with locked():
            answer["tickets"] = queue.tickets()
    answer["blocked"] = queue.outside(answer.get("gpus", ()), answer["tickets"])
    answer["shares"] = describe(queue, answer)
    busy = used_cores(own_pids(answer["tickets"]))
    answer["outside"] = [
        *("GPU %s: %s" % item for item in sorted(answer["blocked"].items())),
        *("cores: used by %s, %.1f cores" % (text, cores) for cores, text in busy.values()),
    ]
    return answer


def describe(queue: Queue, answer: "LeaseAnswer") -> "SharesAnswer":
    """Sort a host's queue entries in order of service. Return the users' shares.

    Also add the reason of the wait, and the likely time until the start, to each waiting run's ticket.
    """
    tickets, policy, uses, now = answer["tickets"], queue.policy(), queue.uses(), time.time()
    gpus = answer.get("gpus") or sorted({gpu for one in tickets for gpu in gpus_named(one)})
    blocked = answer.get("blocked", {})
    decided = plan(tickets, answer["cores"], gpus, now, policy, uses, blocked)
    undisturbed = plan(tickets, answer["cores"], gpus, now, policy, uses)
    answer["tickets"] = tickets = decided["order"]
    # A run over its quota, for example, starts at an unknown time, and delays no other run.
    counted = [one for one in tickets if ident(one) not in decided["why"]]
    starts = expected_starts(counted, answer["cores"], gpus, now, uses, blocked, decided["leave"])
    why = dict.fromkeys(undisturbed["starts"].keys() - decided["starts"], gpus_text(blocked))
    why.update(decided["why"])
    for ticket in tickets:
        key = ident(ticket)
        ticket.update(why=why.get(key), starts_in_s=starts.get(key), is_asked_to_leave=key in decided["leave"])
        if policy is not None:
            ticket["priority"] = PRIORITIES[level(ticket, tickets, policy, uses, now)]
    found = {"path": "", "error": queue.shares_error, "users": []}  # type: SharesAnswer
    if policy is not None:
        names = {uid: use["user"] for uid, use in uses.items()}
        names.update((int(one["uid"]), one["user"]) for one in tickets)
        used = {uid: policy.decayed(uses[uid], now) / 3600 if uid in uses else 0.0 for uid in names}
        found["path"], found["owner"] = queue.shares, owner_of(queue.shares)
        for uid, name in sorted(names.items()):
            group, _, share = policy.place_of(name)
            found["users"].append({"user": name, "group": group, "share": share, "used_hours": round(used[uid], 2)})
    return found


def take(given: "Ticket", free_ports: "Callable[[int, Any], Sequence[int]] | None" = None) -> "LeaseAnswer":
    """Grant the run cores and GPUs if its turn has come and enough are free.

    Return {"granted": {"gpus": [...]}}. If the run must wait, return the tickets of the runs before it in the queue.

    Args:
        given: The ticket's `key`, `run_id`, `cores` and `gpu_count`, the `pid` of the run's agent, the machine's
            `all_cores` and `all_gpus`, and `at_once`: whether to leave the queue if no lease is granted now. Optional:
            `guardian`, the pid of the agent's guardian process, and keys of `paceline.targets.leases.Queue`.
        free_ports: Takes (count, taken ports) and returns up to `count` free ports, for runs that lease ports.
    """
    queue, now = host_queue(free_ports), time.time()
    at_once, all_cores, all_gpus = given.pop("at_once", False), given.pop("all_cores"), given["all_gpus"]
    waits = None if at_once else queue.unchanged(given["key"])
    if waits is not None:
        return waits
    mine = dict(given, boot_id=boot_id(), started=start_time(given["pid"]), uid=os.geteuid(), granted=None)
    mine.update(user=user_name(mine["uid"]), since=since(mine["key"], now), changed=now)
    if "guardian" in given:
        mine["guardian_started"] = start_time(given["guardian"])
    if given["gpu_count"]:
        driver()  # load the GPU driver before locking, because loading is slow, and other users would wait for the lock
    try:
        with locked():
            for folder in (os.path.dirname(queue.own), queue.own):
                make_own_folder(folder)
            others = []
            # Compare the pid too. Otherwise a run's new agent would get the ticket of an old agent that still lives.
            for item in queue.tickets():
                if all(item[name] == mine[name] for name in ("uid", "key", "pid")):
                    mine.update({name: item[name] for name in ("granted", "since", "changed")})
                else:
                    others.append(item)
            return queue.grant(mine, others, all_cores, all_gpus, at_once)
    except TimeoutError as error:  # the process that holds the lock may be stopped, so the run tries again later
        return {"ahead": [], "holders": [], "why": str(error)}


def give_back(given: "Ticket") -> "LeaseAnswer":
    """Remove the run's queue entry, which ends its lease."""
    with locked():
        host_queue().remove(given["key"])
    return {}


def note(given: "Ticket") -> "LeaseAnswer":
    """Record since when the run hangs (`hangs_since`) in its queue entry; None clears it."""
    with locked():
        host_queue().mark(given["key"], hangs_since=given["hangs_since"])
    return {}


def leave(given: "Ticket") -> "LeaseAnswer":
    """Return {"leave": why the run must release its cores and GPUs, or ""}."""
    return {"leave": host_queue().leave_reason(given["key"], given["all_cores"], given["all_gpus"])}


def host_queue(free_ports: "Callable[[int, Any], Sequence[int]] | None" = None) -> Queue:
    """Return the queue of this host's runs, which all its users share."""
    # Put the host's name into the path, because several machines that boot without a disk may share one /tmp.
    own = os.path.join(parent_dir(), "%s%d" % (_PREFIX, os.geteuid()), os.uname().nodename)
    if own not in _queues:
        _queues[own] = Queue(own, user_folders, locked, is_alive, shares=shares_path(), used_gpus=used_gpus)
    _queues[own].free_ports = free_ports or _queues[own].free_ports
    return _queues[own]


def shares_path() -> str:
    """Return the path of the shares file, which need not exist."""
    parent = parent_dir()
    if parent != _PARENT:
        return os.path.join(parent, "paceline-share", "shares.json")
    return _ROOTS_SHARES if os.path.exists(_ROOTS_SHARES) else _SHARES


def is_alive(ticket: "Ticket") -> bool:
    """Return whether the run's Paceline process on this host, or its guardian, lives."""
    names = (("pid", "started"), ("guardian", "guardian_started"))
    return ticket.get("boot_id") == boot_id() and any(_is_process(ticket, *pair) for pair in names)


def _is_process(ticket: "Ticket", pid_name: str, started_name: str) -> bool:
    pid = ticket.get(pid_name)
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    # Signal 0 only checks whether the process exists.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process exists and belongs to another user; /proc may hide it
    owner = process_owner(pid)
    if owner is not None and owner != ticket["uid"]:
        return False
    # If /proc hides other users' processes (hidepid), any living process with this pid counts as the run's agent.
    found = start_time(pid)
    return found == ticket.get(started_name) if found else not os.path.isdir("/proc/%d" % pid)


def start_time(pid: int) -> str:
    """Return the start time of a process, or "". It tells reused pids apart."""
    fields = stat_fields(pid)
    return "" if fields is None or fields[0] in "ZX" else fields[19]


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


def parent_dir() -> str:
    return os.environ.get("PACELINE_LEASES") or _PARENT


def user_folders() -> "list[Any]":
    """Return (uid, folder of tickets) of each user, ignoring folders of wrong owners."""
    parent, found = parent_dir(), []
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    for name in names:
        number = name[len(_PREFIX) :]
        # Other users may create any name, such as one with another digit in front.
        if not name.startswith(_PREFIX) or not number.isdecimal() or number != str(int(number)):
            continue
        outer = os.path.join(parent, name)
        inner = os.path.join(outer, os.uname().nodename)
        # Check the outer folder too: users who can write to it could replace the inner folder.
        if is_own_folder(outer, int(number)) and is_own_folder(inner, int(number)):
            found.append((int(number), inner))
    return sorted(found)


def is_own_folder(path: str, uid: int) -> bool:
    """Return whether a path is a folder that only this user can change."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


@contextlib.contextmanager
def locked() -> "Iterator[None]":
    """Lock the host's queue during a `with` block, so that no ticket changes.

    Raises:
        LeasesError: A folder is unsafe.
        TimeoutError: Another process holds the lock too long.
    """
    check_parent()
    fd = take_guard(os.path.join(parent_dir(), "%s%s.guard" % (_PREFIX, os.uname().nodename)))
    try:
        yield
    # Closing the file releases the lock. Don't delete the file: processes could then lock two different files of this name.
    finally:
        os.close(fd)


def check_parent() -> None:
    parent = parent_dir()
    if parent != _PARENT and not os.path.isdir(parent):
        with contextlib.suppress(FileExistsError):
            os.makedirs(parent, 0o755)
    found = os.stat(parent)
    if not stat.S_ISDIR(found.st_mode):
        raise LeasesError("PACELINE_LEASES=%r is not a folder" % parent)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise LeasesError("everybody can rename files in %r. Set its sticky bit: chmod +t %s" % (parent, parent))
    if parent != _PARENT and found.st_uid not in (0, os.geteuid()):
        raise LeasesError(
            "PACELINE_LEASES=%r belongs to user %s, who could take leases away. Let root make a folder of mode 1777, or "
            "leave the variable out" % (parent, user_name(found.st_uid))
        )


def make_own_folder(path: str) -> None:
    """Create a folder of this user that all users can read."""
    try:
        # Mode 0700 keeps other users from changing the folder before `is_own_folder` checks it. Then allow reading.
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
            what = "is not a folder" if not stat.S_ISDIR(found.st_mode) else "can be written to by others"
        raise LeasesError("%r %s: it is not used. Remove it, or let an administrator do so" % (path, what))


def take_guard(path: str) -> int:
    """Lock the guard file of the host's queue. Return its file descriptor.

    Raises:
        LeasesError: The guard is not a plain file.
        TimeoutError: Another process holds the lock; the message names the process.
    """
    deadline = time.monotonic() + _GUARD_S
    while True:
        fd, why = open_guard(path), "user %s keeps it from being opened" % owner_of(path)
        if fd is not None:
            try:
                # Don't wait for the lock: the process that holds it may be stopped, and this process must then report it.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # If the owner has just deleted this file, another process may lock a new file of this name. Open that file then.
                if is_still(path, fd):
                    return fd
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(fd)
                    raise
                why = "%s holds it" % holder(path)
            os.close(fd)
        if time.monotonic() > deadline:
            raise TimeoutError(
                "the lock %r of the machine's leases stays taken: %s, and has for %g s. A run needs it for milliseconds: "
                "let that process end, or be ended" % (path, why, _GUARD_S)
            )
        time.sleep(0.02)


def open_guard(path: str) -> "int | None":
    """Open or create the lock file, or return None if another user prevents it."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Read access suffices for a lock, and another user's file grants only read access.
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
        raise LeasesError("%r of user %s is not a plain file: it is not used. Remove it" % (path, owner_of(path)))
    return fd


def is_still(path: str, fd: int) -> bool:
    """Return whether the path still names the open file `fd`."""
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


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
