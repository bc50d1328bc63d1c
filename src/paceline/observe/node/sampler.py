"""Sample the stacks of one node's workers for some seconds while they run.

    python -I -S .../paceline/observe/node/sampler.py OUTPUT FOLDER {"ranks": [...], "seconds": S, "rate": R}

If py-spy is installed and allowed, it samples all threads of a worker and its Python children, R times per second.
Otherwise the program signals each worker at most 20 times per second. The worker then writes its main thread's stack to
FOLDER (`paceline.worker.watched`).

The program writes one line of JSON to the file OUTPUT: {"time", "ranks": {rank: profile}, "notes": [missing
permissions]}. A profile:

    by        "py-spy" or "signals"; if there are no samples, the profile has only "silent", the reason
    rate      samples per second
    frames    [[function, file, line], ...], each frame once
    stacks    [[where, [frame indices, outermost first], count], ...]; where: "main", a thread's name, "process 12 main"
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

if __name__ == "__main__":
    # Add Paceline's folder to sys.path, because Python's option -I leaves out Paceline as well as the script's packages.
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")))

from paceline.observe.node import process_state
from paceline.observe.node.look import Dump, Worker, answer, py_spy, why_not
from paceline.observe.node.messages import Thread, WorkerFacts
from paceline.system import processes

#: Maximum samples per second if samples are taken by signals, because each sample takes a millisecond of the worker's time.
_MOST_BY_SIGNAL = 20.0
#: Timeouts in seconds: for py-spy to end after the time of sampling, and for one sample by signals.
_EXTRA_S, _SAMPLE_S = 20.0, 0.5
_LOOK_S = 0.001
_MOST_CHILDREN = 4
_FRAME = re.compile(r"(?P<function>.*?) \((?P<file>.*?)(?::(?P<line>\d+))?\)\Z")
_PROCESS = re.compile(r'(?:\A|;)process (?P<pid>\d+):"')
_THREAD = re.compile(r"(?:\A|;)thread \((?P<number>[0-9a-fA-Fx]+)\)(?:: (?P<name>[^;\n]*))?;")
_END = re.compile(r"\) (?P<count>\d+)\Z")


def main(argv: list[str]) -> int:
    output, folder, asked = argv[0], argv[1], json.loads(argv[2])
    notes: list[str] = []
    found = profile(folder, asked["ranks"], float(asked["seconds"]), float(asked["rate"]), notes)
    answer(output, found, notes)
    return 0


def profile(folder: str, ranks: list[int], seconds: float, rate: float, notes: list[str]) -> dict[str, WorkerFacts]:
    """Sample the stacks of a node's ranks. Return {rank: profile}.

    notes: A list to which missing permissions are added.
    """
    workers = {rank: Worker(folder, rank) for rank in ranks}
    spy = py_spy()
    if spy is None:
        notes.append(
            "py-spy is not installed there, so the main threads alone were sampled, by signal: pip install py-spy into the "
            "script's environment"
        )
    begun = time.monotonic()
    spied = {rank: _Spied(spy, folder, worker, seconds, rate) for rank, worker in workers.items() if spy}
    found: dict[str, WorkerFacts] = {}
    left: dict[int, Worker] = dict(workers)
    # All py-spy processes run at the same time, so that the profiles cover the same time.
    for rank, one in spied.items():
        try:
            found[str(rank)] = one.end(begun + seconds + _EXTRA_S)
            # If py-spy has no valid sample of a rank, as on an overloaded machine, try signals.
            if "frames" in found[str(rank)] or not workers[rank].pid:
                del left[rank]
        except (OSError, subprocess.SubprocessError) as error:
            notes.append(why_not(str(error)))
    if left:
        # If py-spy lacks a permission, it fails at once, so there is enough time left to sample its ranks by signals.
        for rank, counted in _by_signals(folder, left, seconds, rate).items():
            found[str(rank)] = counted
    return found


class StackCounts:
    """The sampled stacks of one worker, with the number of samples of each."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], int] = {}
        self._stacks: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, where: str, frames: list[tuple[str, str, int]], count: int = 1) -> None:
        """Count a stack, its outermost frame first, sampled in the thread `where`."""
        numbers = tuple(self._frames.setdefault(frame, len(self._frames)) for frame in frames)
        key = (where, numbers)
        self._stacks[key] = self._stacks.get(key, 0) + count

    def told(self, by: str, rate: float) -> WorkerFacts:
        if not self._stacks:
            return {"silent": "no sample could be had of it"}
        return {
            "by": by,
            "rate": rate,
            "frames": [*self._frames],
            "stacks": [(where, list(numbers), count) for (where, numbers), count in self._stacks.items()],
        }


class _Spied:
    def __init__(self, spy: str, folder: str, worker: Worker, seconds: float, rate: float) -> None:
        self._rate, self._pid = max(1, round(rate)), worker.pid
        self._path = os.path.join(folder, f"profile_{worker.rank}_{os.getpid()}")
        words = [
            *(spy, "record", "--pid", str(worker.pid), "--duration", str(max(1, round(seconds)))),
            *("--rate", str(self._rate), "--format", "raw", "--output", self._path),
            *("--idle", "--threads", "--subprocesses", "--full-filenames"),
            # Don't pause the worker. py-spy then drops stacks that have changed while it read them.
            "--nonblocking",
        ]
        self._process: subprocess.Popen[str] | None = None
        if worker.pid:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )

    def end(self, deadline: float) -> WorkerFacts:
        if self._process is None:
            return {"silent": "it has not started, or is not a Python program"}
        try:
            _, said = self._process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            with open(self._path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            said = "" if self._process.poll() is None else (self._process.communicate()[1] or "")
            raise OSError((said.strip().splitlines() or ["it has told nothing"])[-1]) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        counted = StackCounts()
        for stack in from_raw(text, self._pid):
            counted.add(*stack)
        return counted.told("py-spy", float(self._rate))


def from_raw(text: str, worker: int) -> Iterator[tuple[str, list[tuple[str, str, int]], int]]:
    """Yield (thread, frames, count) of each stack in py-spy's raw format.

    process 7:"python t.py";process 9:"python t.py";thread (9): MainThread;<module> (t.py:12);load (data.py:4) 17

    A command line may have newlines and semicolons. So the stack begins after the last thread's name, here MainThread.
    """
    record = ""
    for line in text.splitlines():
        record = f"{record}\n{line}" if record else line
        if not (end := _END.search(line)):
            continue
        threads, pids = list(_THREAD.finditer(record)), _PROCESS.findall(record)
        if threads:
            thread, pid = threads[-1], int(pids[-1]) if pids else worker
            is_main = int(thread["number"], 0) == pid or thread["name"] == "MainThread"
            name = "main" if is_main else thread["name"] or f"thread {thread['number']}"
            parts = record[thread.end() :].rpartition(" ")[0].split(";")
            frames = [(f["function"], f["file"], int(f["line"] or 0)) for f in map(_FRAME.match, parts) if f]
            if frames:
                yield name if pid == worker else f"process {pid} {name}", frames, int(end["count"])
        record = ""


def _by_signals(folder: str, workers: dict[int, Worker], seconds: float, rate: float) -> dict[int, WorkerFacts]:
    rate = min(rate, _MOST_BY_SIGNAL)
    counted = {rank: StackCounts() for rank in workers}
    taken = dict.fromkeys(workers, 0)
    begun = time.monotonic()
    number = 0
    with open(os.path.join(folder, "lock"), "a") as lock:
        while (now := time.monotonic()) < begun + seconds:
            # Release the lock after each sample, so that another program can request dumps between two samples.
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                for rank in _sample(workers, counted):
                    taken[rank] += 1
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)
            number += 1
            time.sleep(max(0.0, begun + number / rate - time.monotonic(), _LOOK_S))
    passed = max(now - begun, 1 / rate)
    return {rank: one.told("signals", round(taken[rank] / passed, 3)) for rank, one in counted.items()}


def _sample(workers: dict[int, Worker], counted: dict[int, StackCounts]) -> list[int]:
    asked = {}
    for rank, worker in workers.items():
        dump = _asked(worker, worker.pid) if worker.pid else None
        if dump is not None:
            asked[rank] = dump
    _wait_for(list(asked.values()))
    for rank, dump in asked.items():
        worker = workers[rank]
        for thread in dump.threads:
            counted[rank].add("main", _outermost_first(thread))
        for pid in processes.descendants(worker.pid)[:_MOST_CHILDREN]:
            if (below := _asked(worker, pid)) is None:
                continue
            _wait_for([below])
            for thread in below.threads:
                counted[rank].add(f"process {pid} main", _outermost_first(thread))
        worker.empty()
    return [rank for rank, dump in asked.items() if dump.threads]


def _asked(worker: Worker, pid: int) -> Dump | None:
    state = process_state.state_of(pid)
    return None if state is None else worker.asked_of(pid, state, only_main=True)


def _wait_for(dumps: list[Dump]) -> None:
    deadline = time.monotonic() + _SAMPLE_S
    while time.monotonic() < deadline:
        # Poll each dump in every round, so that answers are read at once.
        done = [dump.is_done() for dump in dumps]
        if all(done):
            return
        time.sleep(_LOOK_S)


def _outermost_first(thread: Thread) -> list[tuple[str, str, int]]:
    return [(frame["function"], frame["file"], frame["line"]) for frame in reversed(thread["frames"])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
