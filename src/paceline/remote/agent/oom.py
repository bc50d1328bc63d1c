"""The kernel's counts of processes that it has killed for memory, for the whole machine and for each control group.

/proc/vmstat, oom_kill: the machine. memory.events, oom_kill (cgroup v2) and memory.oom_control, oom_kill (v1): the
group this process is in, which catches a container's or a batch system's limit on kernels without the first.
"""

from __future__ import annotations

import re


def oom_kills() -> int:
    """The number of processes that the kernel has killed for memory so far, as far as can be seen; 0 where nothing tells."""
    return sum(_count(path) for path in ["/proc/vmstat", *_group_files()])


def _group_files() -> list[str]:
    found = []
    try:
        lines = _read("/proc/self/cgroup").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [f"/sys/fs/cgroup{path}/memory.events", f"/sys/fs/cgroup/unified{path}/memory.events"]
        elif "memory" in controllers.split(","):
            found.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return found


def _count(path: str) -> int:
    try:
        match = re.search(r"^oom_kill (\d+)$", _read(path), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
