"""Read facts about a process and its children from the kernel (proc(5)). Linux only."""

from __future__ import annotations

import os
import sys

from paceline.observe.node.messages import ProcessFacts
from paceline.system import processes

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_COMMAND_CHARS = 200
#: Machine -> number of the system call tgkill(2), for which the C library has a function only from glibc 2.30 on.
_TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250}
#: Prefixes of native threads' names.
_NATIVE = ("pt_", "gloo", "nccl", "NCCL", "cuda", "omp", "iou-", "jemalloc", "grpc", "async-")


def state_of(pid: int) -> ProcessFacts | None:
    """Return facts about a process, or None if it is missing or a zombie.

    state: The letter of ps(1): R, S, D (waits in the kernel for a disk or file server), T (stopped), t (stopped by a
        debugger).
    wchan: The kernel function in which the process waits, or "".
    cpu_s: CPU seconds of the process.
    io_bytes: Bytes that the process has read and written.
    tracer: Pid of the debugger that traces the process, or 0.
    command: The shortened command line.
    """
    words = processes.stat_of(pid)
    if not words or words[0] in "ZX":
        return None
    status, io = table(f"/proc/{pid}/status"), table(f"/proc/{pid}/io")
    command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or _read(f"/proc/{pid}/comm").strip()
    return {
        "pid": pid,
        "parent": int(words[1]),
        "state": words[0],
        "wchan": _read(f"/proc/{pid}/wchan").strip("0\n "),
        "cpu_s": (int(words[11]) + int(words[12])) / _TICKS,
        "io_bytes": int(io.get("rchar", 0)) + int(io.get("wchar", 0)),
        "tracer": int(status.get("TracerPid", 0)),
        "command": command[:_COMMAND_CHARS],
    }


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for this signal."""
    caught = table(f"/proc/{pid}/status").get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def threads(pid: int) -> list[int]:
    """Return the ids of a process's threads, the main thread first.

    Leave out threads of native libraries, whose names begin with "nccl" or "cuda", for example.
    """
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/task"):
            if int(name) != pid and not _read(f"/proc/{pid}/task/{name}/comm").startswith(_NATIVE):
                found.append(int(name))
    except OSError:
        pass
    return [pid, *sorted(found)]


def signal_thread(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread. Where this is unsupported, only a main thread gets it."""
    call = _TGKILL.get(os.uname().machine) if sys.platform.startswith("linux") else None
    if call is None:
        if thread == pid:
            processes.send(pid, number)
        return
    import ctypes

    ctypes.CDLL(None).syscall(call, pid, thread, number)


def is_pending(pid: int, thread: int, number: int) -> bool:
    """Return whether a signal to this thread is still pending."""
    pending = table(f"/proc/{pid}/task/{thread}/status").get("SigPnd", "0")
    return bool(int(pending, 16) >> (number - 1) & 1)


def has_open(pid: int, descriptor: int, path: str) -> bool:
    """Return whether this descriptor of the process refers to this file."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{descriptor}"), os.stat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def is_python(pid: int) -> bool:
    """Return whether the process runs a Python interpreter."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def waits_for(pid: int) -> str | None:
    """Return the read or write that blocks the process, such as "write to pipe:[123]", or None."""
    words = _read(f"/proc/{pid}/syscall").split()
    verb = (
        {"0": "read from", "1": "write to"}.get(words[0]) if len(words) > 1 and os.uname().machine == "x86_64" else None
    )
    if verb is None:
        return None
    try:
        return f"{verb} {os.readlink(f'/proc/{pid}/fd/{int(words[1], 16)}')}"
    except (OSError, ValueError):
        return None


def other_end(pid: int, what: str) -> list[int]:
    """Return the pids of processes that read the pipe named in `what`.

    what: A result of `waits_for`.
    """
    _, _, pipe = what.partition(" to ")
    if not pipe.startswith("pipe:"):
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            for fd in os.listdir(f"/proc/{name}/fd"):
                if os.readlink(f"/proc/{name}/fd/{fd}") == pipe and _is_reader(int(name), fd):
                    found.append(int(name))
                    break
        except OSError:
            continue
    return found


def _is_reader(pid: int, descriptor: str) -> bool:
    flags = table(f"/proc/{pid}/fdinfo/{descriptor}").get("flags", "1")
    return int(flags, 8) & os.O_ACCMODE == os.O_RDONLY


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def table(path: str) -> dict[str, str]:
    """Return {name: value} of a file with lines `name: value`; {} if unreadable."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return {name: value.strip() for name, _, value in lines}
