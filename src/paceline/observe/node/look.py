"""Dump the stacks of a node's workers without stopping them.

    python -I -S .../paceline/observe/node/look.py OUTPUT FOLDER {"ranks": [...], "native": bool}

The program appends a line of JSON to the file OUTPUT: {"time", "ranks": {rank: facts}, "notes": [missing permissions]}.
FOLDER has the files that workers write about themselves (`paceline.worker.watched`). A worker's facts:

    pid, state, wchan, cpu_s, io_bytes, tracer, command    see `observe.node.process_state`; "gone": true if it ended
    threads       see `observe.node.dumps`; "by": "faulthandler" or "py-spy"; "silent": why there are no stacks
    children      these facts about each child process
    board, torch  unfinished collectives of Paceline, and in torch's flight recorder
    call          a blocking system call, such as "write to pipe:[12]"; readers: pids of the pipe's readers
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from typing import cast

if __name__ == "__main__":
    # Add Paceline's folder to sys.path, because Python's option -I leaves out Paceline as well as the script's packages.
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")))

from paceline.observe.node import dumps, process_state
from paceline.observe.node.messages import Collective, ProcessFacts, Thread, WorkerFacts
from paceline.system import collective_state, processes

#: Timeout of a dump in seconds. A handler in C answers within a millisecond on an idle machine.
_ANSWER_S = 3.0
#: Timeout in seconds if the process's state, such as "stopped", makes an answer unlikely.
_UNLIKELY_S = 0.3
#: Seconds of silence after which a dump without a recognizable end counts as complete.
_QUIET_S, _SHORT_QUIET_S = 0.25, 0.03
#: If a thread has got the signal and writes nothing for this many seconds, it is a native thread, which has no dump.
_NATIVE_S = 0.01
_LOOK_S = 0.002
_SPY_S = 10.0
#: Maximum number of child processes to examine for each worker.
_MOST_CHILDREN = 32
_PTRACE = "/proc/sys/kernel/yama/ptrace_scope"


def main(argv: list[str]) -> int:
    output, folder, asked = argv[0], argv[1], json.loads(argv[2])
    notes: list[str] = []
    with open(os.path.join(folder, "lock"), "a") as lock:
        # Let only one program request dumps at a time, because two programs would read each other's dumps.
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = look(folder, asked["ranks"], native=bool(asked.get("native")), notes=notes)
    answer(output, found, notes)
    return 0


def answer(output: str, found: dict[str, WorkerFacts], notes: list[str]) -> None:
    """Append the state and stacks of all ranks' workers to a file as JSON."""
    text = json.dumps({"time": time.time(), "ranks": found, "notes": sorted(set(notes))})
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(text.encode() + b"\n")


def look(folder: str, ranks: list[int], *, native: bool, notes: list[str]) -> dict[str, WorkerFacts]:
    """Return {rank: stacks and state of its worker}. Add missing permissions to `notes`.

    native: Get frames of C too, by py-spy.
    """
    workers = [Worker(folder, rank) for rank in ranks]
    # Send all requests first, so that all stacks are from one moment and a silent worker does not delay other workers.
    for worker in workers:
        worker.ask()
    _wait_for(workers)
    for worker in workers:
        worker.look_at_children()
    spy = py_spy()
    for worker in workers:
        worker.look_with(spy, native=native, notes=notes)
    return {str(worker.rank): worker.found for worker in workers}


class Worker:
    """A worker, with its state and stacks as far as they were collected."""

    def __init__(self, folder: str, rank: int) -> None:
        self.rank = rank
        self.found: WorkerFacts = {}
        self._folder = folder
        self._stacks = os.path.join(folder, f"stacks_{rank}")
        self._told = os.path.join(folder, f"told_{rank}")
        self._number, self.pid, self._descriptor = self._numbers()
        self._dump: Dump | None = None
        self._is_asked = self._is_dumped = False
        self._asked_s = 0.0

    def ask(self) -> None:
        """Read the worker's state from the kernel, and request its stacks."""
        self.found["board"] = [
            cast("Collective", entry._asdict())
            for entry in collective_state.read(os.path.join(self._folder, f"board_{self.rank}"))
        ]
        state = process_state.state_of(self.pid) if self.pid else None
        if state is None:
            self.found["gone"] = bool(self.pid)
            self.found["silent"] = (
                "its process has ended" if self.pid else "it has not started, or is not a Python program"
            )
            return
        self.found = cast("WorkerFacts", {**self.found, **state})
        _add_call(self.found)
        self._dump = self.asked_of(self.pid, self.found)

    def is_settled(self, since_s: float) -> bool:
        """Return whether the worker has answered, or is too late `since_s` seconds after `ask`."""
        if not self._is_dumped:
            if self._dump is not None and not self._dump.is_done():
                return False
            self._is_dumped, self._asked_s = True, since_s
            # Ask the process's recorder of collectives last: its thread wakes up, and must not appear in the stacks.
            self._is_asked = "pid" in self.found and self._ask_recorder()
        if self._is_asked and os.path.exists(self._told):
            self._is_asked = False
            with contextlib.suppress(OSError, ValueError):
                with open(self._told, "rb") as file:
                    data = file.read()
                self.found["answer_bytes"] = self.found.get("answer_bytes", 0) + len(data)
                self.found["torch"] = dumps.under_way(data)
                os.unlink(self._told)
        return not self._is_asked or since_s - self._asked_s > _ANSWER_S

    def look_at_children(self) -> None:
        """Collect the worker's stacks, then its child processes' stacks."""
        self._take(self._dump, self.found)
        self.found["children"] = children = []
        if "pid" not in self.found:
            return
        for pid in processes.descendants(self.pid)[:_MOST_CHILDREN]:
            child = process_state.state_of(pid)
            if child is None:
                continue
            children.append(child)
            _add_call(child)
            if (dump := self.asked_of(pid, child)) is None:
                continue
            while not dump.is_done():
                time.sleep(_LOOK_S)
            self._take(dump, child)
        self.empty()

    def empty(self) -> None:
        """Truncate the file for stack dumps, which the next stack dump must find empty."""
        with contextlib.suppress(OSError):
            os.truncate(self._stacks, 0)

    def look_with(self, spy: str | None, *, native: bool, notes: list[str]) -> None:
        """Get from py-spy the stacks that the worker has not written itself.

        spy: py-spy's path, or None if it is not installed.
        native: Get all stacks from py-spy, including the frames of C functions.
        """
        if "pid" not in self.found:
            return
        for one in (self.found, *self.found["children"]):
            if (one.get("threads") and not native) or not process_state.is_python(one["pid"]):
                continue
            if spy is None:
                if native:
                    notes.append(
                        "py-spy is not installed there, so frames of native code are not shown: pip install py-spy"
                    )
                continue
            try:
                one["threads"], one["by"] = _spied(spy, one["pid"], native=native), "py-spy"
                one.pop("silent", None)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                notes.append(why_not(str(error)))

    def asked_of(self, pid: int, found: ProcessFacts, *, only_main: bool = False) -> Dump | None:
        """Request a stack dump from a process. Return the pending dump, or None if impossible.

        found: The process's state. If a dump is impossible, `found["silent"]` gets the reason.
        only_main: Request only the main thread's stack.
        """
        if found["state"] in "Tt":
            found["silent"] = "it is stopped"
        elif not self._number:
            found["silent"] = "it is not a Python program, or PACELINE_STACKS_SIGNAL is 0"
        # Check that the process has the file for dumps open: otherwise the pid belongs to another process by now, or to a program
        # that has replaced the script and would handle the signal differently.
        elif not process_state.has_open(pid, self._descriptor, self._stacks):
            found["silent"] = "it is another program, or has closed all files"
        elif not process_state.catches(pid, self._number):
            found["silent"] = f"it has taken the handler of signal {self._number} away"
        else:
            limit_s = _UNLIKELY_S if found["state"] == "D" else _ANSWER_S
            return Dump(self._stacks, pid, self._number, limit_s, only_main=only_main)
        return None

    def _take(self, dump: Dump | None, found: ProcessFacts) -> None:
        if dump is None:
            return
        found["answer_bytes"] = found.get("answer_bytes", 0) + dump.size
        found["threads"] = dump.threads
        if found["threads"]:
            found["by"] = "faulthandler"
        elif found["state"] == "D":
            found["silent"] = "it waits in the kernel, where no signal reaches it"
        else:
            found["silent"] = (
                f"it has not answered signal {self._number}: the script has a handler of its own, or blocks it"
            )

    def _ask_recorder(self) -> bool:
        with contextlib.suppress(OSError):
            os.unlink(self._told)
        try:
            pipe = os.open(os.path.join(self._folder, f"ask_{self.rank}"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # the process has no recorder: its pipe is missing, or has no reader
            return False
        try:
            os.write(pipe, f"{os.path.basename(self._told)}\n".encode())
        except OSError:
            return False
        finally:
            os.close(pipe)
        return self.found["state"] not in "Tt"

    def _numbers(self) -> tuple[int, int, int]:
        try:
            with open(os.path.join(self._folder, f"worker_{self.rank}")) as file:
                number, pid, descriptor = map(int, file.read().split())
                return number, pid, descriptor
        except (OSError, ValueError):
            return 0, 0, -1


class Dump:
    """A stack dump of one process, whose threads write it in turn."""

    def __init__(self, path: str, pid: int, number: int, limit_s: float, *, only_main: bool = False) -> None:
        # A sampler dumps only main threads, and does so often, so it must not wait long for the end of a dump.
        self._quiet_s = _SHORT_QUIET_S if only_main else _QUIET_S
        self.threads: list[Thread] = []
        #: Bytes that the process wrote for this dump.
        self.size = 0
        self._path, self._pid, self._number, self._limit_s = path, pid, number, limit_s
        self._left = [pid] if only_main else process_state.threads(pid)
        self._thread = 0
        self._from = self._seen = 0
        self._asked_s = self._seen_s = 0.0
        self._is_taken = False

    def is_done(self) -> bool:
        """Read a thread's stack, or request the next thread's. Return True after the last."""
        now = time.monotonic()
        if self._thread:
            if not self._has_answered(now):
                return False
            self._take()
        if not self._left:
            return True
        self._thread, self._is_taken = self._left.pop(0), False
        self._from = self._seen = self._size()
        self._asked_s = self._seen_s = now
        process_state.signal_thread(self._pid, self._thread, self._number)
        return False

    def _has_answered(self, now: float) -> bool:
        size = self._size()
        if size != self._seen:
            self._seen, self._seen_s = size, now
        if size > self._from:
            return dumps.is_whole(self._text()[-1000:]) or now - self._seen_s > self._quiet_s
        if not self._is_taken and not process_state.is_pending(self._pid, self._thread, self._number):
            self._is_taken, self._seen_s = True, now
        # A native thread writes no dump, so don't wait for it. The main thread always belongs to Python.
        if self._is_taken and self._thread != self._pid:
            return now - self._seen_s > _NATIVE_S
        return now - self._asked_s > (self._limit_s if self._thread == self._pid else _UNLIKELY_S)

    def _take(self) -> None:
        text = self._text()
        self.size += len(text)
        for thread in dumps.from_faulthandler(text):
            if thread["frames"]:
                thread["name"] = "main" if self._thread == self._pid else ""
                self.threads.append(thread)
        self._thread = 0

    def _text(self) -> str:
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                file.seek(self._from)
                return file.read()
        except OSError:
            return ""

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0


def _wait_for(workers: list[Worker]) -> None:
    begun_s = time.monotonic()
    while True:
        since_s = time.monotonic() - begun_s
        # Poll each worker in every round, so that answers are read at once.
        settled = [worker.is_settled(since_s) for worker in workers]
        if all(settled) or since_s > 2 * _ANSWER_S:
            return
        time.sleep(_LOOK_S)


def _add_call(found: ProcessFacts) -> None:
    if "pipe" not in found["wchan"] or (call := process_state.waits_for(found["pid"])) is None:
        return
    found["call"] = call
    if call.startswith("write"):
        found["readers"] = process_state.other_end(found["pid"], call)


def py_spy() -> str | None:
    """Return py-spy's path, beside this interpreter or on PATH, or None."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _spied(spy: str, pid: int, *, native: bool) -> list[Thread]:
    # Let py-spy stop the process only if it has to read frames of C (`native`).
    words = [spy, "dump", "--json", "--pid", str(pid), "--native" if native else "--nonblocking"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_SPY_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(errno.EPERM, (done.stderr.strip().splitlines() or ["it failed"])[0])
    return dumps.from_py_spy(done.stdout, pid)


def why_not(error: str) -> str:
    """Return why py-spy cannot read a process, and how to permit it.

    error: py-spy's error message.
    """
    what = "py-spy may not look into processes here"
    scope = ""
    with contextlib.suppress(OSError), open(_PTRACE) as file:
        scope = file.read().strip()
    if scope not in ("", "0") and os.geteuid() != 0:
        return (
            f"{what}: kernel.yama.ptrace_scope is {scope}. Let an administrator set it to 0 (sysctl kernel.yama.ptrace_scope=0), "
            "or give py-spy the right (setcap cap_sys_ptrace+ep)."
        )
    if "permission" in error.lower() or "permitted" in error.lower():
        return f"{what}: {error}. In a container it takes --cap-add SYS_PTRACE."
    return f"py-spy has failed: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
