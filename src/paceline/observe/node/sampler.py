"""Samples the stacks of one node's workers for some seconds, while they run on.

    python -I -S .../paceline/observe/node/sampler.py OUTPUT FOLDER {"ranks": [...], "seconds": S, "rate": R}

By py-spy where it is there and may look: all threads of a worker and of the Python processes below it, R times a second. Else by
the signal at which workers write their stacks (`paceline.worker.watched`): the main threads alone, 20 times a second at most.

OUTPUT gets one line of JSON: {"time", "ranks": rank -> profile, "notes": [what is not allowed here]}. A profile:

    by        "py-spy" or "signals"; "silent": why there is none
    rate      samples a second
    frames    [[function, file, line], ...], each once
    stacks    [[where, [numbers of frames, outermost first], how often], ...]; where: "main", a thread's name, "process 12 main"
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
from typing import Any

if __name__ == "__main__":
    # Started by its path, and apart from all that the environment has for the script: the library alone.
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")))

from paceline.observe.node import process_state
from paceline.observe.node.look import Dump, Worker, answer, py_spy, why_not
from paceline.system import processes

#: By signals, so often at most: each sample is a millisecond of the worker's.
_MOST_BY_SIGNAL = 20.0
#: How long py-spy may take beyond the time that it samples, and a worker for one sample.
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


def profile(folder: str, ranks: list[int], seconds: float, rate: float, notes: list[str]) -> dict[str, dict[str, Any]]:
    """Rank -> its profile. notes: gets what is not allowed on this machine."""
    workers = {rank: Worker(folder, rank) for rank in ranks}
    spy = py_spy()
    if spy is None:
        notes.append(
            "py-spy is not installed there, so the main threads alone were sampled, by signal: pip install py-spy into the "
            "script's environment"
        )
    begun = time.monotonic()
    spied = {rank: _Spied(spy, folder, worker, seconds, rate) for rank, worker in workers.items() if spy}
    found: dict[str, dict[str, Any]] = {}
    left: dict[int, Worker] = dict(workers)
    # All at once, so that what is compared is of the same time.
    for rank, one in spied.items():
        try:
            found[str(rank)] = one.end(begun + seconds + _EXTRA_S)
            # Where each of its samples was torn, as on a machine that is overloaded, the worker's own answers are tried.
            if "frames" in found[str(rank)] or not workers[rank].pid:
                del left[rank]
        except (OSError, subprocess.SubprocessError) as error:
            notes.append(why_not(str(error)))
    if left:
        # Where py-spy was refused it said so at once.
        for rank, counted in _by_signals(folder, left, seconds, rate).items():
            found[str(rank)] = counted
    return found


class StackCounts:
    """The stacks of one worker, each with how often it was met."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], int] = {}
        self._stacks: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, where: str, frames: list[tuple[str, str, int]], count: int = 1) -> None:
        """Add a stack, its outermost frame first."""
        numbers = tuple(self._frames.setdefault(frame, len(self._frames)) for frame in frames)
        key = (where, numbers)
        self._stacks[key] = self._stacks.get(key, 0) + count

    def told(self, by: str, rate: float) -> dict[str, Any]:
        if not self._stacks:
            return {"silent": "no sample could be had of it"}
        return {
            "by": by,
            "rate": rate,
            "frames": [list(frame) for frame in self._frames],
            "stacks": [[where, list(numbers), count] for (where, numbers), count in self._stacks.items()],
        }


class _Spied:
    """py-spy at work on one worker."""

    def __init__(self, spy: str, folder: str, worker: Worker, seconds: float, rate: float) -> None:
        self._rate, self._pid = max(1, round(rate)), worker.pid
        self._path = os.path.join(folder, f"profile_{worker.rank}_{os.getpid()}")
        words = [
            *(spy, "record", "--pid", str(worker.pid), "--duration", str(max(1, round(seconds)))),
            *("--rate", str(self._rate), "--format", "raw", "--output", self._path),
            *("--idle", "--threads", "--subprocesses", "--full-filenames"),
            # Without a pause of the worker: a sample that is not whole is left out.
            "--nonblocking",
        ]
        self._process: subprocess.Popen[str] | None = None
        if worker.pid:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )

    def end(self, deadline: float) -> dict[str, Any]:
        """The profile.

        Raises:
            OSError: py-spy has failed; with its own words.
        """
        if self._process is None:
            return {"silent": "it has not started, or is no Python program"}
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
    """Of each stack in py-spy's raw format: where it is, its frames, how often it was met.

    process 7:"python t.py";process 9:"python t.py";thread (9): MainThread;<module> (t.py:12);load (data.py:4) 17

    A command line may hold anything, line ends and semicolons too: what counts is behind the last name of a thread.
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


def _by_signals(folder: str, workers: dict[int, Worker], seconds: float, rate: float) -> dict[int, dict[str, Any]]:
    rate = min(rate, _MOST_BY_SIGNAL)
    counted = {rank: StackCounts() for rank in workers}
    taken = dict.fromkeys(workers, 0)
    begun = time.monotonic()
    number = 0
    with open(os.path.join(folder, "lock"), "a") as lock:
        while (now := time.monotonic()) < begun + seconds:
            # Nobody else reads the same answers meanwhile, and who wants to gets the next turn.
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
    """One sample of each worker's main thread, and of those of the processes that it has forked; who has answered."""
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
    """The dump of the main thread of a worker's process, or of one below it; None where there is none to be had."""
    state = process_state.state_of(pid)
    return None if state is None else worker.asked_of(pid, state, only_main=True)


def _wait_for(dumps: list[Dump]) -> None:
    """Return once all are done, or the time for a sample is up."""
    deadline = time.monotonic() + _SAMPLE_S
    while time.monotonic() < deadline:
        # Each is asked, so that an answer is taken in as soon as it is there.
        done = [dump.is_done() for dump in dumps]
        if all(done):
            return
        time.sleep(_LOOK_S)


def _outermost_first(thread: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(frame["function"], frame["file"], frame["line"]) for frame in reversed(thread["frames"])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
