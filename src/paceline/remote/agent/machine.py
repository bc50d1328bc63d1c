"""Facts about the agent's machine, such as network interfaces, free ports, disks and OOM kills."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Container, Iterable

from paceline.observe.node.gpus import devices
from paceline.remote.wire import Header
from paceline.system import processes
from paceline.system.lock_holder import user_name

#: Ports to choose from: above those of most services, below Linux's range for outgoing connections (32768 and up).
_PORTS = range(20000, 32000)
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B

#: How many bytes a worker's error report needs. A disk with fewer free bytes counts as full.
REPORT_BYTES = 1 << 14


def about(settings: dict[str, object]) -> Header:
    """Return the agent's first message to the supervisor, which describes this node."""
    return {
        "op": "hello",
        "host": socket.gethostname(),
        "user": user_name(os.geteuid()),
        "home": os.path.expanduser("~"),
        "python": [sys.executable, list(sys.version_info[:3])],
        "cores": processes.core_count(),
        "gpus": list(devices()),
        "interfaces": interfaces(),
        "env": dict(os.environ),
        "pid": os.getpid(),
        "time": time.time(),
        "boot_id": processes.boot_id(),
        "library": settings["library"],
        "folder": settings["folder"],
    }


def interfaces() -> dict[str, tuple[str, int]]:
    """Return {name: (IPv4 address, prefix length)} of network interfaces; {} except on Linux."""
    found: dict[str, tuple[str, int]] = {}
    if not sys.platform.startswith("linux"):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            # An interface's name has at most 15 bytes: IFNAMSIZ is 16 including the final zero.
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                # In the result, the address's 4 bytes follow the name (16 bytes), the family and the port (4 bytes together).
                address = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(asked.fileno(), _SIOCGIFNETMASK, request)[20:24]
            except OSError:
                continue  # the interface has no address
            found[name] = (socket.inet_ntoa(address), int.from_bytes(mask, "big").bit_count())
    return found


def free_ports(count: int, taken: Container[int] = ()) -> list[int]:
    """Return up to `count` ports, not in `taken`, on which no process listens."""
    found: list[int] = []
    # Start at a random port, so that simultaneous or repeated calls find different ports.
    start = int.from_bytes(os.urandom(4), "big") % len(_PORTS)
    for step in range(len(_PORTS)):
        if len(found) == count:
            break
        port = _PORTS[(start + step) % len(_PORTS)]
        if port not in taken and _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        # Without SO_REUSEADDR, a port would look used for a minute after its last connection has ended.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def disk_of(path: str) -> tuple[int, int, int]:
    """Return (free bytes for this user, total bytes, device number) of a file system.

    path: Any path in the file system.

    Raises:
        OSError: The path does not exist.
    """
    found = os.statvfs(path)
    # f_bavail excludes blocks reserved for root.
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, os.stat(path).st_dev


def disks_here(paths: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Return {path: (free bytes, total bytes, device number)} for the paths that exist."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = disk_of(path)
    return found


def is_low(free: int, total: int) -> bool:
    """Return whether a disk is almost full: less than 5 % is free.

    On a disk below 40 GB, the limit is 2 GB, but at most 10 % of the disk. On a disk above 400 GB, the limit is 20 GB.
    """
    gb = 10**9
    return free < min(max(total / 20, 2 * gb), 20 * gb, total / 10)


def oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed on this machine.

    The result is the sum of the machine's counter (/proc/vmstat) and the counters of this process's cgroup. On some kernels,
    only the cgroup counts kills at the memory limit of a container or batch job. A counter that can't be read counts as 0.
    """
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
