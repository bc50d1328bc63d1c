"""Find and kill the processes of a run, so that no process outlives it.

On Linux, Paceline finds all processes of a run in `/proc`, even processes that have left their group and lost their
parent. The run's supervisor and its guardian are child subreapers: they adopt orphans among their descendants
(prctl(2), PR_SET_CHILD_SUBREAPER). On other systems, `ps` gives only each process's parent.
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
#: A flag in /proc/<pid>/stat, which Linux sets when a process starts to exit, before it closes the process's files.
_PF_EXITING = 0x4
_PR_SET_CHILD_SUBREAPER = 36
#: Seconds to wait at most until a started process has left exec(2), which takes under a millisecond on a free core.
_EXEC_S = 0.5

#: Environment variable with a supervisor's run id. A supervisor that a worker starts does not count as part of the worker's run.
SUPERVISOR_VARIABLE = "PACELINE_SUPERVISOR"
#: Variables that mark a run's processes, so that orphans of a killed supervisor are found, and supervisors are not killed.
RUN_VARIABLES = (SUPERVISOR_VARIABLE, "PACELINE_RUN_ID", "PACELINE_RUN_DIR")


def leave(code: int) -> NoReturn:
    """Flush the output and end this process immediately, without Python's cleanup.

    Python's cleanup takes 10 ms, and copies memory pages that forked processes share.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become_subreaper() -> None:
    """Make this process the parent of orphans below it, on Linux only."""
    # exec keeps the subreaper setting, but a forked child does not inherit it.
    if _LINUX:
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ends_with_parent(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """Return a `preexec_fn` that makes the kernel signal the child when this process ends.

    None on other systems than Linux. The kernel also sends the signal when the thread that started the child ends.
    """
    if not _LINUX:
        return None
    import ctypes

    # Load the library before the fork, because code between fork and exec must not import modules.
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        # If the parent died before prctl, the kernel sends no signal any more, so end this process here.
        if os.getppid() != parent:
            os._exit(1)

    return ask


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with HOME set, as Open MPI's programs need it."""
    if environment.get("HOME"):
        return dict(environment)
    import pwd

    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = "/"
    return {**environment, "HOME": home}


def of_no_run(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that mark a run's processes."""
    return {name: value for name, value in environment.items() if name not in RUN_VARIABLES}


def raise_open_files() -> None:
    """Raise this process's soft limit of open files to the hard limit."""
    import resource  # imported here because few processes need it

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses an infinite soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def said_by(
    words: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None, cwd: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program without input, and return its output as text.

    Raises:
        OSError: The program can't be started.
        subprocess.TimeoutExpired: The program did not end in time.
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
    """Return this process's environment with the PYTHONPATH of the submitting shell.

    A supervisor's own PYTHONPATH leads to Paceline's package alone (`paceline.system.detached_process`).
    """
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PACELINE_SHELL_PYTHONPATH")}
    if theirs := os.environ.get("PACELINE_SHELL_PYTHONPATH"):
        own["PYTHONPATH"] = theirs
    return own


def cores() -> set[int]:
    """Return the numbers of the CPU cores that this process may run on."""
    return set(os.sched_getaffinity(0)) if _LINUX else set(range(os.cpu_count() or 1))


def core_count() -> int:
    """Return how many CPU cores this process may run on."""
    return len(cores())


def boot_id() -> str:
    """Return an id that changes at each boot; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        # Signal 0 only checks whether the process exists; zombies exist, so check the state below.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # the process belongs to another user
    return _state(pid) != "Z"


def is_ending(pid: int) -> bool:
    """Return whether a process has ended or, on Linux, is about to end.

    The parent learns of an end only after the last thread has ended, which may take long on a busy machine.
    """
    if not _LINUX:
        return not is_alive(pid)
    fields = stat_of(pid)
    # Fields of proc(5): state, flags, and the pending signals of the first thread, to which the kernel adds SIGKILL.
    return (
        fields is None
        or fields[0] in "ZX"
        or bool(int(fields[6]) & _PF_EXITING or int(fields[28]) & 1 << signal.SIGKILL - 1)
    )


def descendants(pid: int) -> list[int]:
    """Return the pids of the living descendants of `pid`.

    The result includes neither other runs' supervisors nor descendants of these supervisors.
    """
    # Asking the kernel for this process's children is instant, but the table of all processes takes milliseconds, and the end
    # of a run asks several times.
    if pid == os.getpid() and not _has_children():
        return []
    return _below([pid])


def with_variable(name: str, value: str) -> list[int]:
    """Return the pids of other processes started with the variable `name=value` (Linux only)."""
    return [
        pid for pid, _, state in _table() if state != "Z" and pid != os.getpid() and _has_variable(pid, name, value)
    ]


def belonging(name: str, value: str) -> list[int]:
    """Return the pids of processes started with the variable `name=value`.

    The result includes their descendants, but no supervisors.
    """
    marked = _marked(name, value)
    return list(dict.fromkeys([*_below(marked), *marked]))


def ancestors() -> Iterator[int]:
    """Yield this process's parent, grandparent and so on; Linux only."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        fields = stat_of(pid) if _LINUX else None
        pid = int(fields[1]) if fields else 0


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's initial environment, or {} if unreadable."""
    return dict(
        os.fsdecode(name_and_value).split("=", 1)
        for name_and_value in _environment(pid).split(b"\0")
        if b"=" in name_and_value
    )


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command line, or [] if unreadable."""
    return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:-1]]


def stat_of(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat after the name; None if unreadable."""
    try:
        # Use os.open, which makes one system call, while `open` makes eight: a process table has hundreds of files.
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096).rpartition(b")")[2].decode().split()
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None


def kill_descendants(pid: int, *, wait_s: float = 10.0) -> int:
    """Kill all descendants of `pid`.

    Repeat until no descendant is left or `wait_s` seconds have passed, because a process may start another process
    before it dies. Also reap ended children of this process. Return the number of killed processes.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + wait_s
    # Send SIGKILL, because a SIGTERM handler could start more processes. Wait for the killed processes too: unless this process
    # is a subreaper, a killed process whose parent died first is no longer a descendant, but may still be dying.
    while (left := descendants(pid)) or any(map(is_alive, killed)):
        for child in left:
            killed.add(child)
            send(child, signal.SIGKILL)
        # Killed children stay zombies until they are reaped. Their orphans are adopted by this subreaper and show up in the
        # next round.
        reap()
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    reap()
    return len(killed)


def kill_with_variable(name: str, value: str, *, wait_s: float = 10.0) -> int:
    """Kill the processes started with variable `name=value`, except supervisors. Return their number."""
    return _kill_all(lambda: _marked(name, value), wait_s)


def kill_writers(folder: str, *, wait_s: float = 10.0) -> int:
    """Kill processes whose stdout or stderr is below `folder`. Return their number.

    This works on Linux only. It finds even daemons that have left their parent, session and environment.
    """
    return _kill_all(lambda: _writers(os.path.realpath(folder)), wait_s)


def _kill_all(which: Callable[[], list[int]], wait_s: float) -> int:
    killed: set[int] = set()
    deadline = time.monotonic() + wait_s
    # Repeat the search, because a process may have started another process before it was killed.
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
            # Skip processes that only read the file: a person may be looking at the log.
            if path.startswith(f"{folder}/") and flags & os.O_ACCMODE != os.O_RDONLY:
                found.append(pid)
                break
    return found


def send(pid: int, number: int) -> bool:
    """Signal a process. Return False if it is gone or another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(group: int) -> None:
    """Kill all processes of a process group, unless it is gone or another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_session(session: int, wait_s: float = 1.0) -> None:
    """Kill this process's descendants in a session, and wait until they are gone."""
    deadline = time.monotonic() + wait_s
    while (left := [pid for pid in descendants(os.getpid()) if _session_of(pid) == session]) and (
        time.monotonic() < deadline
    ):
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.005)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def reaped() -> list[tuple[int, int, int]]:
    """Reap all ended children. Return (pid, wait status, peak memory in bytes) of each.

    The peak is the largest of the peaks of the child and of all processes that the child has reaped.
    """
    ended: list[tuple[int, int, int]] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        # children exist, but none has ended
        if pid == 0:
            return ended
        ended.append((pid, status, usage.ru_maxrss * (1024 if _LINUX else 1)))


def reap() -> list[tuple[int, int]]:
    """Reap all ended children. Return (pid, wait status) of each."""
    return [(pid, status) for pid, status, _ in reaped()]


def ended_child() -> int | None:
    """Return the pid of a zombie child without reaping it, or None."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def shell_exit_code(wait_status: int) -> int:
    """Return the exit code that a shell reports: 128+n after signal n."""
    return shell_code(os.waitstatus_to_exitcode(wait_status))


def shell_code(code: int) -> int:
    """Convert an exit code of `subprocess` (-n after signal n) to a shell's (128+n)."""
    return 128 - code if code < 0 else code


def _marked(name: str, value: str) -> list[int]:
    return [pid for pid in with_variable(name, value) if not _has_variable(pid, SUPERVISOR_VARIABLE)]


def _below(pids: Sequence[int]) -> list[int]:
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
            # Include processes with the mark of this run's own supervisor: between fork and exec, a new worker has this mark too.
            if _variable(child, SUPERVISOR_VARIABLE) not in (None, own):
                continue
            found.append(child)
        # Include children of zombies: if only the main thread has ended, other threads still run and keep the children.
        todo += children.get(child, ())
    return found


def _family() -> tuple[dict[int, int], set[int]]:
    """Return {pid: parent's pid} of every process, and the pids of the zombies.

    A parent may end while the table is read. The function then reads again, so that it misses no living descendant.
    """
    known: set[tuple[int, int]] = set()
    for _ in range(5):
        table = list(_table())
        parents = {child: parent for child, parent, _ in table}
        # A missing parent may be outside this container, hidden, or dead since the read: read until no other parent is missing.
        hidden = {(child, parent) for child, parent in parents.items() if parent and parent not in parents}
        if hidden <= known:
            break
        known |= hidden
    return parents, {child for child, _, state in table if state == "Z"}


def _table() -> Iterator[tuple[int, int, str]]:
    if not _LINUX:
        text = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False).stdout
        for line in text.splitlines():
            pid, parent, state = line.split(None, 2)
            yield int(pid), int(parent), state[0]
        return
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := stat_of(int(name))):
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
    _, is_there, rest = (b"\0" + _environment(pid)).partition(f"\0{name}=".encode())
    return os.fsdecode(rest.partition(b"\0")[0]) if is_there else None


def _environment(pid: int) -> bytes:
    """Return /proc/<pid>/environ; wait briefly if exec(2) has emptied it."""
    end_s = time.monotonic() + _EXEC_S
    while True:
        found = _read(pid, "environ")
        if found or not _is_starting(pid) or time.monotonic() > end_s:
            return found
        time.sleep(0.0005)


def _is_starting(pid: int) -> bool:
    """Return whether a process is in exec(2)."""
    fields = stat_of(pid)
    # Exclude kernel threads and ended processes, whose vsize (proc(5)) is 0, and processes whose variables can't be read.
    return (
        fields is not None
        and int(fields[20]) > 0
        and not _read(pid, "cmdline")
        and os.access(f"/proc/{pid}/environ", os.R_OK)
    )


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
