"""Processes and their children, so that no child of a run outlives it, however it was started.

Linux tells everything through `/proc`; elsewhere `ps` tells who is whose child, and no more. A process that leaves its
group and loses its parent stays findable on Linux: the run's supervisor and its guardian are "child subreapers", to
which the kernel hands every orphan below them (prctl(2), PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

_LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: For so long a program that is being started is waited for. It takes less than a millisecond where a core is free.
_EXEC_S = 0.5

#: Marks a supervisor, in the environment it was started with: it belongs to its own run, whoever its parent is.
SUPERVISOR_VARIABLE = "PACELINE_SUPERVISOR"
#: All that marks a process as a run's: by these what a killed supervisor has left is found, and supervisors are spared.
RUN_VARIABLES = (SUPERVISOR_VARIABLE, "PACELINE_RUN_ID", "PACELINE_RUN_DIR")


def leave(code: int) -> NoReturn:
    """Write the output and end this process at once. Python would first free each loaded object, which takes 10 ms, and
    copies the pages that forked processes share.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become_subreaper() -> None:
    """Make orphans below this process its own children. Does nothing where the system has no such thing."""
    # A fork does not hand this down, an exec keeps it.
    if _LINUX:
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ends_with_parent(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """What a child calls before its program starts (`preexec_fn`), to be sent this signal when this process ends; None where
    the system has no such thing.

    The kernel takes the thread that starts the program for its parent: that has to be one that stays.
    """
    if not _LINUX:
        return None
    import ctypes

    # Loaded here: between fork and exec nothing may be imported.
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        # The parent may have died before prctl was called: then no signal will come any more.
        if os.getppid() != parent:
            os._exit(1)

    return ask


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, with the user's home where it names none: Open MPI's programs end at once without."""
    if environment.get("HOME"):
        return dict(environment)
    import pwd

    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = "/"
    return {**environment, "HOME": home}


def of_no_run(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is not to pass for one of the run that starts it."""
    return {name: value for name, value in environment.items() if name not in RUN_VARIABLES}


def said_by(
    words: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None, cwd: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A program run to its end, with what it has printed as text, whatever bytes that was; it is given nothing to read.

    Raises:
        OSError: it can't be started. subprocess.TimeoutExpired: it did not end in time.
    """
    return subprocess.run(
        words,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def shell_environment() -> dict[str, str]:
    """The environment of this process, with the submitting shell's PYTHONPATH: a supervisor's own leads to Paceline's library,
    and the shell's was put aside under another name (`paceline.system.detached_process`).
    """
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PACELINE_SHELL_PYTHONPATH")}
    if theirs := os.environ.get("PACELINE_SHELL_PYTHONPATH"):
        own["PYTHONPATH"] = theirs
    return own


def cores() -> set[int]:
    """The numbers of the cores that this process may run on: the machine's, less what a cpuset or taskset keeps from it."""
    return set(os.sched_getaffinity(0)) if _LINUX else set(range(os.cpu_count() or 1))


def core_count() -> int:
    """How many cores this process may run on."""
    return len(cores())


def boot_id() -> str:
    """Different after each start of the machine; empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """True if there is a process of this number that is not a zombie."""
    try:
        # No signal is sent, only looked whether one could be. It could be to a zombie, which is why the state is looked at
        # below.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's, so it is there
    # A zombie takes signals as well; it has only not been waited for yet.
    return _state(pid) != "Z"


def descendants(pid: int) -> list[int]:
    """The children of `pid`, their children and so on, zombies and other runs' supervisors with theirs left out."""
    # The system tells a process at once that it has no child at all. To read what all processes of the machine are takes
    # milliseconds, and a run's end asks several times.
    if pid == os.getpid() and not _has_children():
        return []
    return _below([pid])


def with_variable(name: str, value: str) -> list[int]:
    """The processes, not this one, that were started with `name=value` in their environment; Linux only."""
    return [
        pid for pid, _, state in _table() if state != "Z" and pid != os.getpid() and _has_variable(pid, name, value)
    ]


def belonging(name: str, value: str) -> list[int]:
    """The processes that were started with `name=value` in their environment, supervisors left out, and all below them."""
    marked = _marked(name, value)
    return list(dict.fromkeys([*_below(marked), *marked]))


def ancestors() -> Iterator[int]:
    """This process's parent, the parent's parent and so on, as far as the system tells; Linux only."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        fields = stat_of(pid) if _LINUX else None
        pid = int(fields[1]) if fields else 0


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with, whatever it has set since; empty where it can't be read."""
    return dict(
        os.fsdecode(name_and_value).split("=", 1)
        for name_and_value in _environment(pid).split(b"\0")
        if b"=" in name_and_value
    )


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty where it can't be read."""
    return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:-1]]


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name, which may itself hold spaces and parentheses."""
    try:
        # Not by Python's own `open`, which asks the system eight times for one such file: a table has hundreds.
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096).rpartition(b")")[2].decode().split()
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None


def kill_descendants(pid: int, *, wait_s: float = 10.0) -> int:
    """Kill everything below `pid` and wait until it is gone; the number of processes that were killed.

    Looks again until nothing is left, for a process may start another while it is being killed. Reaps those that are
    this process's own children.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + wait_s
    # SIGKILL, for a process that handles SIGTERM may start others in its handler, and each look would find new ones.
    # One whose parent died first is no descendant any more where this process is no subreaper; it may still be dying.
    while (left := descendants(pid)) or any(map(is_alive, killed)):
        for child in left:
            killed.add(child)
            send(child, signal.SIGKILL)
        # A process that was killed is a zombie until it is waited for; its orphans come to this process, a subreaper, and are
        # among the descendants of the next round.
        reap()
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    reap()
    return len(killed)


def kill_with_variable(name: str, value: str, *, wait_s: float = 10.0) -> int:
    """Kill every process that was started with `name=value` in its environment, supervisors of other runs spared; how
    many there were.
    """
    return _kill_all(lambda: _marked(name, value), wait_s)


def kill_writers(folder: str, *, wait_s: float = 10.0) -> int:
    """Kill every process whose standard output or error is a file below `folder`, and return how many there were.

    So a daemon is found that has left its parent, its session and its environment; not one that writes elsewhere. Linux only.
    """
    return _kill_all(lambda: _writers(os.path.realpath(folder)), wait_s)


def _kill_all(which: Callable[[], list[int]], wait_s: float) -> int:
    killed: set[int] = set()
    deadline = time.monotonic() + wait_s
    # Until a round finds none: a process may have been started by one that had not been killed yet.
    while time.monotonic() < deadline:
        left = which()
        if not left:
            break
        for pid in left:
            killed.add(pid)
            send(pid, signal.SIGKILL)
        time.sleep(0.01)
    return len(killed)


def _writers(folder: str) -> list[int]:
    found = []
    for pid, _, state in _table() if _LINUX else ():
        if pid == os.getpid() or state in "ZX":
            continue
        for fd in (1, 2):
            try:
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                flags = int(_read(pid, f"fdinfo/{fd}").split()[3], 8)
            except (OSError, ValueError, IndexError):
                continue
            # Whoever only reads there may be a person who looks at the log.
            if path.startswith(f"{folder}/") and flags & os.O_ACCMODE != os.O_RDONLY:
                found.append(pid)
                break
    return found


def send(pid: int, number: int) -> bool:
    """Send a signal; False where there is no such process (any more) or it is somebody else's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(group: int) -> None:
    """Kill all processes of a group. One that is gone, or somebody else's, is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def reaped() -> list[tuple[int, int, int]]:
    """Every child of this process that has ended and was not yet waited for: its pid, its wait status, and how many bytes it, or
    one process that it has waited for itself, had in memory at most.
    """
    ended: list[tuple[int, int, int]] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        # There are children, but none that has ended.
        if pid == 0:
            return ended
        ended.append((pid, status, usage.ru_maxrss * (1024 if _LINUX else 1)))


def reap() -> list[tuple[int, int]]:
    """The (pid, wait status) of every child of this process that has ended and was not yet waited for."""
    return [(pid, status) for pid, status, _ in reaped()]


def ended_child() -> int | None:
    """A child of this process that has ended and was not yet waited for, and which this leaves so; None where there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def _has_children() -> bool:
    """True if this process has a child, one that has ended and was not yet waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def shell_exit_code(wait_status: int) -> int:
    """The exit code as a shell gives it: 128+n for a process that signal n ended."""
    return shell_code(os.waitstatus_to_exitcode(wait_status))


def shell_code(code: int) -> int:
    """The same of an exit code of subprocess's, which is -n for a process that signal n ended."""
    return 128 - code if code < 0 else code


def _marked(name: str, value: str) -> list[int]:
    """The processes that were started with `name=value` in their environment, supervisors left out."""
    return [pid for pid in with_variable(name, value) if not _has_variable(pid, SUPERVISOR_VARIABLE)]


def _below(pids: Sequence[int]) -> list[int]:
    """The same as `descendants`, of several processes."""
    parents, zombies = _family()
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    own = _variable(os.getpid(), SUPERVISOR_VARIABLE)
    found: list[int] = []
    todo = [child for pid in pids for child in children.get(pid, ())]
    while todo:
        child = todo.pop()
        if child not in zombies:
            # A supervisor that is killed while it starts a worker leaves a copy of itself, for a moment, by the name of its run.
            if _variable(child, SUPERVISOR_VARIABLE) not in (None, own):
                continue
            found.append(child)
        # Of zombies too: what shows as one may have threads that are still ending, and has its children until they have.
        todo += children.get(child, ())
    return found


def _family() -> tuple[dict[int, int], set[int]]:
    """Pid -> parent's pid of every process, and which are zombies.

    The table is read line by line. A child whose parent ended meanwhile stands in it below a process that is not there:
    then it is read again, or one that lives would be overlooked.
    """
    known: set[tuple[int, int]] = set()
    for _ in range(5):
        table = list(_table())
        parents = {child: parent for child, parent, _ in table}
        # Some parents never show: outside this container, or other users' where the system hides those.
        hidden = {(child, parent) for child, parent in parents.items() if parent and parent not in parents}
        if hidden <= known:
            break
        known |= hidden
    return parents, {child for child, _, state in table if state == "Z"}


def _table() -> Iterator[tuple[int, int, str]]:
    """(pid, parent's pid, state letter) of every process."""
    if not _LINUX:
        text = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False).stdout
        for line in text.splitlines():
            pid, parent, state = line.split(None, 2)
            yield int(pid), int(parent), state[0]
        return
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_of(int(name))):
            yield int(name), int(fields[1]), fields[0]


def _state(pid: int) -> str:
    if not _LINUX:
        return next((state for child, _, state in _table() if child == pid), "Z")
    fields = stat_of(pid)
    return fields[0] if fields else "Z"


def _has_variable(pid: int, name: str, value: str | None = None) -> bool:
    found = _variable(pid, name)
    return found is not None and value in (None, found)


def _variable(pid: int, name: str) -> str | None:
    """As it was at the start: what a process sets in its own environment later does not show in /proc."""
    _, is_there, rest = (b"\0" + _environment(pid)).partition(f"\0{name}=".encode())
    return os.fsdecode(rest.partition(b"\0")[0]) if is_there else None


def _environment(pid: int) -> bytes:
    """/proc/<pid>/environ. It is empty for a moment while a program is being started, which is waited for: whoever looks for the
    processes of a run would not find the one that it has just got.
    """
    end_s = time.monotonic() + _EXEC_S
    while True:
        found = _read(pid, "environ")
        if found or not _is_starting(pid) or time.monotonic() > end_s:
            return found
        time.sleep(0.0005)


def _is_starting(pid: int) -> bool:
    """Whether it is in the middle of exec(2): it has memory, where neither its command line nor its variables lie yet."""
    fields = stat_of(pid)
    # vsize of proc(5): 0 of a thread of the kernel's, and of a process that has ended. Another user's variables are never read.
    return (
        fields is not None
        and int(fields[20]) > 0
        and not _read(pid, "cmdline")
        and os.access(f"/proc/{pid}/environ", os.R_OK)
    )


def _read(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>; empty where there is no such process, or it is another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
