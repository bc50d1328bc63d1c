"""Runs on a node as text that a bare Python is given (`paceline.remote.call`): what there is, and who holds how much of it.

    /tmp/paceline-leases-<hostname>.guard     of everybody on the machine: locked by whoever reads or changes
    /tmp/paceline-leases-<user's number>/<hostname>/
        2026-11-21T...Z_<run id>.ticket       a run's place in the queue: what it asks for, and what it holds once it is
                                              granted. It counts as long as the run's agent on this machine lives,
                                              which ends when the run's supervisor does, or when the link to it is cut

PACELINE_LEASES of the machine's environment names another folder than /tmp.

Everybody writes in a folder of their own, and reads the others'. A ticket counts as its owner's, whatever it says; links,
other people's files in somebody's folder, and what is no ticket count for nothing. So nobody can have another user's
program write where he likes, take his tickets away, or speak for him. What anybody can do is to hold the guard: who does
is named.

Order is by name, which starts with the time of submission. Runs are served strictly in order: one that needs much is
not overtaken for ever by those that need little. Nothing has to be cleaned up: whoever looks next leaves out, and
where it may removes, what counts no more.

Written in the words of Python 3.6, so that one that is too old can say so.
"""

# ruff: noqa: UP006, UP031, UP035, UP045

import contextlib
import errno
import fcntl
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List, Optional

_PARENT = "/tmp"
_PREFIX = "paceline-leases-"
#: Longer than anybody needs the guard for, shorter than a host may take to answer.
_GUARD_S = 8.0
#: No ticket is longer, and nobody has more.
_TICKET_BYTES, _TICKETS = 1 << 16, 1000


class LeasesError(OSError):
    """The leases can't be used as they are found; the message says why, and what to do."""


def answer(verb: str, given: Dict[str, Any]) -> Dict[str, Any]:
    """What "look", "take" or "give_back" returns, or {"error": why it can't}; with the Python that did it."""
    try:
        found = {"look": look, "take": take, "give_back": give_back}[verb](given)
    except OSError as error:
        found = {"error": str(error)}
    return dict(found, python=[sys.executable, *sys.version_info[:3]])


def look(given: Dict[str, Any]) -> Dict[str, Any]:
    """What the machine has, and who holds or waits for some of it. GPUs only where `with_gpus`: asking takes a while."""
    answer: Dict[str, Any] = {"host": socket.gethostname(), "cores": core_count(), "boot_id": boot_id()}
    if given.get("with_gpus"):
        answer["gpus"] = gpus()
    answer["tickets"] = []
    if user_folders():
        with locked():
            answer["tickets"] = living()
    return answer


def take(ticket: Dict[str, Any]) -> Dict[str, Any]:
    """The run's lease {"granted": {"gpus": [...]}} if it is its turn and there is room; else who is in the way.

    ticket: `key`, `pid` of the agent, and as `fitting`. at_once: leave no place in the queue unless granted.
    """
    at_once = ticket.pop("at_once", False)
    with locked():
        for folder in (os.path.dirname(leases_dir()), leases_dir()):
            make_own_folder(folder)
        tickets = living()
        mine = next((item for item in tickets if is_same(item, ticket)), None)
        if mine is None:
            mine = dict(ticket, boot_id=boot_id(), started=start_time(ticket["pid"]), granted=None)
        elif mine["granted"] is not None:
            return {"granted": mine["granted"]}
        others = [item for item in tickets if item is not mine]
        ahead = [item for item in others if item["granted"] is None and item["key"] < ticket["key"]]
        holders = [item for item in others if item["granted"] is not None]
        mine["granted"] = None if ahead else fitting(ticket, holders)
        if mine["granted"] is not None or not at_once:
            write(ticket_path(ticket), mine)
        if mine["granted"] is not None:
            return {"granted": mine["granted"]}
        return {"ahead": ahead, "holders": holders}


def give_back(ticket: Dict[str, Any]) -> Dict[str, Any]:
    """Remove the run's ticket."""
    with locked():
        forget(ticket_path(ticket))
    return {}


def fitting(ticket: Dict[str, Any], holders: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """What the run would hold beside these; None where there is no room.

    ticket: `cores` and `gpu_count` asked for, of `all_cores` and `all_gpus`.
    """
    used = sum(int(item["cores"]) for item in holders)
    taken = {gpu for item in holders for gpu in item["granted"]["gpus"]}
    free = [gpu for gpu in ticket["all_gpus"] if gpu not in taken]
    if used + min(ticket["cores"], ticket["all_cores"]) > ticket["all_cores"] or ticket["gpu_count"] > len(free):
        return None
    return {"gpus": free[: ticket["gpu_count"]]}


def is_same(found: Dict[str, Any], ticket: Dict[str, Any]) -> bool:
    return (found["uid"], found["key"], found["pid"]) == (os.geteuid(), ticket["key"], ticket["pid"])


def living() -> List[Dict[str, Any]]:
    """All tickets that count, in order."""
    found = []
    for uid, folder in user_folders():
        is_mine = uid == os.geteuid()
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names[:_TICKETS]:
            path = os.path.join(folder, name)
            if name.endswith(".new") and is_mine:
                forget(path)  # of one that was killed: whoever writes holds the guard
            if name.endswith(".ticket"):
                ticket = read(path, uid)
                if ticket is not None and is_alive(ticket):
                    found.append(ticket)
                elif is_mine:
                    forget(path)
    return sorted(found, key=lambda ticket: (ticket["key"], ticket["uid"]))


def is_alive(ticket: Dict[str, Any]) -> bool:
    """Whether the agent that the ticket names still runs, and is its owner's."""
    if ticket.get("boot_id") != boot_id():
        return False
    pid = ticket["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, of whom /proc may show nothing
    owner = process_owner(pid)
    if owner is not None and owner != ticket["uid"]:
        return False
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


def process_owner(pid: int) -> Optional[int]:
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


def write(path: str, value: Dict[str, Any]) -> None:
    """All of it or nothing, for everybody to read; in a folder where nobody else can write."""
    beside = "%s.%s.new" % (path, os.urandom(8).hex())
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o644)
        json.dump(value, file)
    os.rename(beside, path)


def read(path: str, uid: int) -> Optional[Dict[str, Any]]:
    """A ticket of this user's; None for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
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
    numbers = [value.get("pid"), value.get("cores")]
    if not all(isinstance(number, int) and 0 <= number < 1 << 31 for number in numbers) or numbers[0] == 0:
        return None
    if (granted is not None and not isinstance(granted, dict)) or not isinstance(gpus_held, list):
        return None
    if not all(isinstance(gpu, str) for gpu in gpus_held):
        return None
    return dict(value, uid=uid, user=user_name(uid), run_id=str(value.get("run_id")), granted=granted)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def parent_dir() -> str:
    return os.environ.get("PACELINE_LEASES") or _PARENT


def leases_dir() -> str:
    """This user's tickets."""
    # Several machines may share a /tmp, as hosts that boot without a disk do.
    return os.path.join(parent_dir(), "%s%d" % (_PREFIX, os.geteuid()), socket.gethostname())


def ticket_path(ticket: Dict[str, Any]) -> str:
    return os.path.join(leases_dir(), "%s.ticket" % ticket["key"])


def user_folders() -> List[Any]:
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
        inner = os.path.join(outer, socket.gethostname())
        if is_own_folder(outer, int(number)) and is_own_folder(inner, int(number)):
            found.append((int(number), inner))
    return sorted(found)


def is_own_folder(path: str, uid: int) -> bool:
    """Whether it is a folder, no link to one, that belongs to this user, and that nobody else can write to."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """While it lasts, nobody else reads or changes tickets.

    Raises:
        LeasesError: a folder is not as it has to be, or somebody holds the guard for longer than anybody needs it.
    """
    check_parent()
    fd = take_guard(os.path.join(parent_dir(), "%s%s.guard" % (_PREFIX, socket.gethostname())))
    try:
        yield
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
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_still(path, fd):
                    return fd
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(fd)
                    raise
                why = "%s holds it" % holder(fd)
            os.close(fd)
        if time.monotonic() > deadline:
            raise LeasesError(
                "the lock %r of the machine's leases can't be had: %s, and has for %g s. It is needed for milliseconds: "
                "let that process end, or be ended" % (path, why, _GUARD_S)
            )
        time.sleep(0.02)


def open_guard(path: str) -> Optional[int]:
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
    """Whether the name still stands for the open file: its owner may have removed it."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def owner_of(path: str) -> str:
    try:
        return user_name(os.lstat(path).st_uid)
    except OSError:
        return "?"


def holder(fd: int) -> str:
    """Who holds the lock of this open file, in words, as `locks.holder` does, which is not there before the library is."""
    inode = os.fstat(fd).st_ino
    try:
        with open("/proc/locks") as file:
            rows = [line.split() for line in file]
    except OSError:
        rows = []
    for row in rows:
        # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:123 0 EOF"; those that wait have "->" in the second place.
        if len(row) > 5 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode) and int(row[4]) > 0:
            pid = int(row[4])
            owner = process_owner(pid)
            if owner is None:
                return "process %d, which has ended and left it to one of its own," % pid
            return "process %d (%s) of user %s" % (pid, command_of(pid), user_name(owner))
    return "a process that can't be seen from here"


def command_of(pid: int) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return "".join(char if char.isprintable() else "?" for char in words)[:80] or "?"


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def gpus() -> List[str]:
    """As `paceline.remote.agent.gpus.devices`, which is not there before the library is."""
    for name in ("PACELINE_GPUS", "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            return [part.strip() for part in os.environ[name].split(",") if part.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in done.stdout.decode().splitlines()] if done.returncode == 0 else []
    return [line for line in lines if line.isdigit()]
