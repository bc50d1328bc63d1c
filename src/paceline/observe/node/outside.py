"""Find a machine's GPUs and cores that processes outside Paceline use.

Machines on which Paceline is not installed run a copy of this file with their own Python (3.6 or later). So the file
imports only the standard library, and its annotations are strings.
"""

# ruff: noqa: UP031

import contextlib
import functools
import os

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

if "Nvml" not in globals():  # without Paceline, a host runs nvml.py, lock_holder.py and this file as one program
    from paceline.observe.node.nvml import Nvml
    from paceline.system.lock_holder import user_name

#: Report a process that has used this many CPU seconds, and on average this share of a core since its start.
_BUSY_S, _BUSY_SHARE = 60.0, 0.5
#: Maximum number of processes that a message names.
_NAMED = 3


@functools.lru_cache(maxsize=1)
def driver() -> "Nvml | None":
    """Return the GPU driver's library NVML, or None without an NVIDIA driver."""
    return Nvml.begin()


def used_gpus(gpus: "Sequence[str]", own: "Collection[int]") -> "dict[str, str]":
    """Return {GPU: text} for the GPUs that processes outside Paceline use.

    A text names the processes, such as "used by bob's python (pid 4711), 40.0 GB".

    own: Pids of Paceline's processes. The descendants of these processes count as Paceline's too.
    """
    found = {}
    nvml = driver() if gpus else None
    for name, processes in nvml.processes_by_name().items() if nvml is not None else ():
        others = sorted((pid, used) for pid, used in processes.items() if not is_below(pid, own))
        if name in gpus and others:
            shown = ["%s (pid %d), %.1f GB" % (_owned(pid), pid, used / 1e9) for pid, used in others[:_NAMED]]
            found[name] = "used by " + ", ".join(shown) + (", ..." if len(others) > _NAMED else "")
    return found


def used_cores(own: "Collection[int]") -> "dict[int, tuple[float, str]]":
    """Return {pid: (number of cores, owner and name)} of busy processes outside Paceline."""
    found = {}  # type: dict[int, tuple[float, str]]
    if not os.path.exists("/proc/uptime"):
        return found
    ticks = os.sysconf("SC_CLK_TCK")
    with open("/proc/uptime") as file:
        now = float(file.read().split()[0])
    for pid in _pids():
        state = stat_fields(pid)
        if state is None or state[0] != "R":
            continue
        used, age = (int(state[11]) + int(state[12])) / ticks, max(now - int(state[19]) / ticks, 1.0)
        if used >= _BUSY_S and used / age >= _BUSY_SHARE and not is_below(pid, own):
            found[pid] = (used / age, "%s (pid %d)" % (_owned(pid), pid))
    return found


def is_below(pid: int, tops: "Collection[int]") -> bool:
    """Return whether a process or one of its ancestors is in `tops`."""
    for _ in range(100):
        if pid in tops:
            return True
        state = stat_fields(pid) if pid > 1 else None
        if state is None:
            return False
        pid = int(state[1])
    return False


def _owned(pid: int) -> str:
    """Return a text with a process's owner and name, such as "bob's python"."""
    try:
        with open("/proc/%d/comm" % pid) as file:
            name = "".join(char if char.isprintable() else "?" for char in file.read().strip()[:40])
        return "%s's %s" % (user_name(os.stat("/proc/%d" % pid).st_uid), name or "?")
    except (OSError, UnicodeDecodeError):
        return "a process that can't be seen from here"


def stat_fields(pid: int) -> "list[str] | None":
    """Return the fields of /proc/<pid>/stat that follow the process's name, or None."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open("/proc/%d/stat" % pid) as file:
        return file.read().rpartition(")")[2].split()
    return None


def _pids() -> "Iterator[int]":
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                yield int(name)
