"""Runs on a node, as `python - VERB JSON` with this file as its input: what there is, and who holds how much of it.

    /tmp/paceline-leases/<hostname>/        of everybody on the machine; or in PACELINE_LEASES of its environment
        guard                               locked by whoever reads or changes
        2026-11-21T...Z_<run id>.ticket     a run's place in the queue: what it asks for, and what it holds once it is
                                            granted. It counts as long as the run's agent on this machine lives, which
                                            ends when the run's supervisor does, or when the link to it is cut

Order is by name, which starts with the time of submission. Runs are served strictly in order: one that needs much is
not overtaken for ever by those that need little. Nothing has to be cleaned up: whoever looks next leaves out, and
where it may removes, what counts no more.

Written in the words of Python 3.6, so that one that is too old can say so. The answer is one line that starts with MARK.
"""

# ruff: noqa: UP006, UP031, UP035, UP045

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from typing import Any, Dict, Iterator, List, Optional

MARK = "PACELINE-ANSWERS "
_TOP = "/tmp/paceline-leases"


def main() -> None:
    verb, given = sys.argv[1], json.loads(sys.argv[2])
    verbs = {"look": look, "take": take, "give_back": give_back}
    try:
        answer = verbs[verb](given)
    except OSError as error:
        answer = {"error": str(error)}
    answer["python"] = [sys.executable, *sys.version_info[:3]]
    print("\n" + MARK + json.dumps(answer), flush=True)


def look(given: Dict[str, Any]) -> Dict[str, Any]:
    """What the machine has, and who holds or waits for some of it. GPUs only where `with_gpus`: asking takes a while."""
    answer: Dict[str, Any] = {"host": socket.gethostname(), "cores": core_count(), "boot_id": boot_id()}
    if given.get("with_gpus"):
        answer["gpus"] = gpus()
    if os.path.isdir(leases_dir()):
        with locked():
            answer["tickets"] = living()
    else:
        answer["tickets"] = []
    return answer


def take(ticket: Dict[str, Any]) -> Dict[str, Any]:
    """The run's lease {"granted": {"gpus": [...]}} if it is its turn and there is room; else who is in the way.

    ticket: `key`, `pid` of the agent, and as `fitting`. at_once: leave no place in the queue unless granted.
    """
    at_once = ticket.pop("at_once", False)
    with locked():
        tickets = living()
        mine = next((item for item in tickets if item["key"] == ticket["key"] and item["pid"] == ticket["pid"]), None)
        if mine is None:
            mine = dict(ticket, boot_id=boot_id(), started=start_time(ticket["pid"]), granted=None)
        elif mine["granted"] is not None:
            return {"granted": mine["granted"]}
        ahead = [item for item in tickets if item["granted"] is None and item["key"] < ticket["key"]]
        holders = [item for item in tickets if item["granted"] is not None]
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


def living() -> List[Dict[str, Any]]:
    """All tickets that count, in order."""
    found, folder = [], leases_dir()
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.endswith(".new"):
            forget(path)  # of one that was killed: whoever writes holds the guard
        if name.endswith(".ticket"):
            ticket = read(path)
            if ticket is not None and is_alive(ticket):
                found.append(ticket)
            else:
                forget(path)
    return found


def is_alive(ticket: Dict[str, Any]) -> bool:
    """Whether the agent that the ticket names still runs."""
    if ticket.get("boot_id") != boot_id():
        return False
    try:
        os.kill(int(ticket["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, of whom /proc may show nothing
    found = start_time(ticket["pid"])
    return found == ticket["started"] if found else not os.path.isdir("/proc/%d" % ticket["pid"])


def start_time(pid: int) -> str:
    """Tells a process from a later one of the same number; empty where it can't be seen, or is dead already."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            state, *others = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else others[18]


def forget(path: str) -> None:
    # Somebody else's is theirs to remove; it counts for nothing either way.
    with contextlib.suppress(OSError):
        os.unlink(path)


def write(path: str, value: Dict[str, Any]) -> None:
    """All of it or nothing, for everybody to read."""
    beside = "%s.%d.new" % (path, os.getpid())
    with open(beside, "w") as file:
        json.dump(value, file)
    os.chmod(beside, 0o644)
    os.rename(beside, path)


def read(path: str) -> Optional[Dict[str, Any]]:
    try:
        with open(path) as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def leases_dir() -> str:
    # Several machines may share a /tmp, as hosts that boot without a disk do.
    return os.path.join(os.environ.get("PACELINE_LEASES") or _TOP, socket.gethostname())


def ticket_path(ticket: Dict[str, Any]) -> str:
    return os.path.join(leases_dir(), "%s.ticket" % ticket["key"])


@contextlib.contextmanager
def locked() -> Iterator[None]:
    folder = leases_dir()
    guard = os.path.join(folder, "guard")
    if not os.path.exists(guard):
        for path in (os.path.dirname(folder), folder):
            make_folder(path)
        make_guard(guard)
    # Reading is enough for a lock, and all that another user's file in such a folder is good for.
    fd = os.open(guard, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def make_folder(path: str) -> None:
    """A folder that everybody may write to, from the moment that it has its name."""
    if os.path.isdir(path):
        return
    beside = "%s.%d.new" % (path, os.getpid())
    os.mkdir(beside)
    try:
        os.chmod(beside, 0o1777)
        os.rename(beside, path)
    except OSError:
        os.rmdir(beside)
        if not os.path.isdir(path):
            raise


def make_guard(path: str) -> None:
    """A file that everybody may read, from the moment that it has its name."""
    beside = "%s.%d.new" % (path, os.getpid())
    os.close(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
    os.chmod(beside, 0o644)
    # Of two who make it, the first counts; whoever holds it already tidies up.
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(beside, path)
    forget(beside)


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def gpus() -> List[str]:
    """As `paceline.agent.gpus.devices`, which is not there before the library is."""
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


if __name__ == "__main__":
    main()
