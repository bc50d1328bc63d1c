"""Facts about the machine that an agent runs on."""

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
from typing import Any

from paceline.observe.node.gpus import devices
from paceline.system import processes
from paceline.system.lock_holder import user_name

#: Below the range from which Linux takes ports for outgoing connections (32768 and up), above most services.
_PORTS = range(20000, 32000)
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B

#: More than a worker's report of its exception takes.
REPORT_BYTES = 1 << 14


def about(settings: dict[str, Any]) -> dict[str, Any]:
    """The first frame of an agent, which describes itself (`paceline.remote.link.messages.Hello`)."""
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
    """Name -> (IPv4 address, length of the network's prefix) of each interface that has one; Linux only."""
    found: dict[str, tuple[str, int]] = {}
    if not sys.platform.startswith("linux"):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            # IFNAMSIZ is 16 with the zero byte at the end.
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                # Behind the name, of 16 bytes, and the family and port, of 4, lie the address's 4 bytes.
                address = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(asked.fileno(), _SIOCGIFNETMASK, request)[20:24]
            except OSError:
                continue  # it has none
            found[name] = (socket.inet_ntoa(address), int.from_bytes(mask, "big").bit_count())
    return found


def free_ports(count: int, taken: Container[int] = ()) -> list[int]:
    """`count` ports on which no process listens now, not among `taken`; fewer where there are not so many."""
    found: list[int] = []
    # From a place of its own, so that two who ask at once, or who ask again, get others.
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
        # Without it a port whose last connection ended a minute ago would seem taken.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def disk_of(path: str) -> tuple[int, int, int]:
    """(bytes that the user may still write, bytes in all, number of the file system) of the disk of `path`.

    Raises:
        OSError: there is no such folder.
    """
    found = os.statvfs(path)
    # f_bavail leaves out what is kept for root.
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, os.stat(path).st_dev


def disks_here(paths: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Path -> (bytes free for the user, bytes in all, number of the file system); paths that are not there are left out."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = disk_of(path)
    return found


def is_low(free: int, total: int) -> bool:
    """True if a disk is about to be full: less than a twentieth of it is free, or 2 GB; of a large one 20 GB, of a small
    one a tenth.
    """
    gb = 10**9
    return free < min(max(total / 20, 2 * gb), 20 * gb, total / 10)


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
