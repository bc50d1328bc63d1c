"""Simulate the processes of a node: workers, node preparation, and programs that examine workers."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.job.plan import NodeSetup
from paceline.remote.agent.commands import Commands
from paceline.remote.wire import Frame, Header
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json
from paceline.testing.sim.events import EventsError, WorkerEvent, read_events

#: Seconds that a simulated worker takes to end after SIGTERM.
_TERM_S = 0.05


class WorkersNode(Protocol):
    """The methods of a simulated node that its simulated processes call."""

    name: str
    is_full: bool

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        """Schedule a call of `work` after this delay."""

    def start_delay(self) -> float:
        """Return how many seconds the next worker takes to start."""

    def note_written(self) -> None:
        """Send the supervisor new lines soon, because a file has grown."""

    def note_end(self) -> None:
        """Let the node's agent report that a simulated process has ended."""


@functools.lru_cache(maxsize=64)
def _events(text: bytes, name: str) -> tuple[WorkerEvent, ...]:
    return read_events(text, name)


@functools.lru_cache(maxsize=4096)
def _script(folder: RunFolder) -> Path:
    job = read_json(folder.job)["job"]
    return folder.snapshot / str(job["entry_script"])


class SimCommands(Commands):
    """The processes of one simulated node."""

    def __init__(self, host: WorkersNode) -> None:
        super().__init__()
        self._host = host
        self._next_pid = 1000
        self._workers: dict[int, SimWorker] = {}
        self._ended: list[Header] = []

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, log: str, tag: str) -> int:
        """Simulate the start of a worker or a short program."""
        self._next_pid += 1
        pid = self._next_pid
        names = [word.rpartition("/paceline/")[2] for word in argv]
        # A command without a rank starts a spare (a Python process that waits for work), not a worker.
        if "worker/__main__.py" in names and "PACELINE_RANK" in env:
            worker = SimWorker(self._host, pid, list(argv), env, log, functools.partial(self._note_end, pid, tag))
            self._workers[pid] = worker
            self._host.after(self._host.start_delay(), worker.start)
        elif "paceline.node" in argv:
            verb, run_dir, rank = argv[argv.index("paceline.node") + 1 :][:3]
            _prepare(verb, RunFolder(Path(run_dir)), int(rank))
            self._note_end(pid, tag, 0)
        elif names[-4:-3] and names[-4] in ("observe/node/look.py", "observe/node/sampler.py"):
            self._examine(argv[-3], json.loads(argv[-1]))
            self._note_end(pid, tag, 0)
        else:
            raise FileNotFoundError(2, "simulated nodes have no such program", argv[0])
        return pid

    def start_worker(
        self, argv: Sequence[str], *, spare: str, is_spare: bool, env: Mapping[str, str], **values: Any
    ) -> tuple[int, str]:
        return self.start(argv, env=env, **values), "simulated nodes have no warm spares" if spare else ""

    def run(self, request: int, argv: Sequence[str], data: bytes) -> int:
        raise FileNotFoundError(2, "simulated nodes have no such program", argv[0])

    def reap(self) -> tuple[list[Header], list[Frame]]:
        ended, self._ended = self._ended, []
        return ended, []

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to a worker. Return whether the worker exists."""
        worker = self._workers.get(pid)
        if worker is not None and number == signal.SIGKILL:
            worker.end(128 + number)
        elif worker is not None and number == signal.SIGTERM:
            self._host.after(_TERM_S, functools.partial(worker.end, 128 + number))
        return worker is not None

    def is_alive(self, pid: int) -> bool:
        return pid in self._workers

    def ranks(self) -> list[tuple[int, int]]:
        """Return (rank, pid) of each worker."""
        return [(worker.rank, pid) for pid, worker in self._workers.items()]

    def kill_all(self) -> None:
        """Kill all workers."""
        for worker in list(self._workers.values()):
            worker.end(128 + signal.SIGKILL)

    def _note_end(self, pid: int, tag: str, code: int) -> None:
        self._workers.pop(pid, None)
        self._ended.append({"op": "end", "pid": pid, "code": code, "time": time.time(), "peak": 0, "tag": tag})
        self._host.note_end()

    def _examine(self, output: str, asked: Mapping[str, object]) -> None:
        asked_ranks = asked["ranks"]
        assert isinstance(asked_ranks, list)
        here = {worker.rank: worker for worker in self._workers.values()}
        ranks = {
            str(rank): here[rank].facts() if rank in here else {"silent": "its process has ended"}
            for rank in asked_ranks
        }
        with open(output, "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "ranks": ranks, "notes": []}) + "\n")
        self._host.note_written()


def _prepare(verb: str, folder: RunFolder, rank: int) -> None:
    path = {"prepare": folder.prepared, "clean": folder.cleaned, "remove": folder.cleaned}.get(verb, folder.stored)(
        rank
    )
    path.parent.mkdir(exist_ok=True)
    # Write the file that `paceline.node` writes for a job without an environment and data: this Python will run the script.
    path.write_text(json.dumps({"prepared": NodeSetup(python=sys.executable).to_json(), "inputs": [], "outputs": []}))


class SimWorker:
    """One simulated worker. `on_end` is called with its exit code."""

    def __init__(
        self,
        host: WorkersNode,
        pid: int,
        argv: list[str],
        env: Mapping[str, str],
        log: str,
        on_end: Callable[[int], None],
    ) -> None:
        self.rank, self.pid = int(env["PACELINE_RANK"]), pid
        self._host, self._log, self._on_end = host, log, on_end
        self._folder, self._attempt = RunFolder(Path(env["PACELINE_RUN_DIR"])), int(env["PACELINE_ATTEMPT"])
        self._script = argv[argv.index("--") + 1]
        self._values = {"rank": self.rank, "size": env["PACELINE_WORLD_SIZE"], "node": host.name}
        self._stack, self._has_ended, self._count = "", False, 0
        # Create the log before the worker starts, as the real agent does.
        self._append(log, "")

    def start(self) -> None:
        """Write the worker's start report, then schedule the events of its script."""
        if self._has_ended:
            return
        attempt = self._folder.attempt(self._attempt)
        report = {"pid": self.pid, "host": self._host.name, "time": time.time()}
        self._put(attempt / f"start_{self.rank}.json", report)
        try:
            script = _script(self._folder)
            events = _events(script.read_bytes(), script.name)
        except (EventsError, OSError) as error:
            self._append(self._log, f"{error}\n")
            self.end(1)
            return
        for event in events:
            if event.ranks is None or self.rank in event.ranks:
                self._host.after(event.at_s, functools.partial(self._play, event, 0))

    def end(self, code: int, error: str = "") -> None:
        """End the worker with an exit code and an exception's text, if any."""
        if self._has_ended:
            return
        self._has_ended = True
        if error:
            self._append(self._log, f"{error}\n")
            kind = error.partition(":")[0]
            text = {"message": error, "extraInfo": {"py_callstack": error, "timestamp": str(int(time.time()))}}
            report = {"message": text, "exception": error, "type": kind, "exit_code": code, "is_memory": False}
            self._put(self._folder.worker_error(self._attempt, self.rank), {**report, "time": time.time()})
        self._on_end(code)

    def facts(self) -> dict[str, object]:
        """Return an invented report on the worker for stack dumps and profiles."""
        place, _, function = self._stack.partition(" ")
        file, _, line = (place or f"{self._script}:1").rpartition(":")
        number = int(line) if line.isdecimal() else 1
        frame = {"file": file, "line": number, "function": function or "<module>"}
        return {
            **{"pid": self.pid, "parent": 1, "state": "S", "wchan": "", "cpu_s": 0.0, "io_bytes": 0, "tracer": 0},
            "command": f"python {self._script}",
            "threads": [{"name": "main", "current": True, "frames": [frame]}],
            **{"by": "faulthandler", "board": [], "children": []},
            **{"rate": 10.0, "frames": [[frame["function"], file, number]], "stacks": [["main", [0], 10]]},
        }

    def _play(self, event: WorkerEvent, number: int) -> None:
        if self._has_ended:
            return
        if event.action == "exit":
            self.end(int(event.value), event.error)
            return
        if self._host.is_full:
            self.end(1, "OSError: [Errno 28] No space left on device")
            return
        if event.action == "line":
            self._append(self._log, event.what.format(**self._values, n=number) + "\n")
        elif event.action == "metric":
            entry = {"name": event.what, "value": event.value, "time": round(time.time(), 6), "step": number}
            self._append(str(self._folder.metric_log(self.rank, self._attempt)), json.dumps(entry) + "\n")
        else:
            self._stack = event.what
        if event.every_s and event.at_s + (number + 1) * event.every_s < event.until_s:
            self._host.after(event.every_s, functools.partial(self._play, event, number + 1))

    def _append(self, path: str, text: str) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
        self._host.note_written()

    def _put(self, path: Path, value: Mapping[str, object]) -> None:
        # Write a temporary file and rename it, as a real worker does, so that no reader finds an incomplete file.
        beside = f"{path}.{self.pid}"
        with open(beside, "w", encoding="utf-8") as file:
            file.write(json.dumps(value))
        os.replace(beside, path)
        self._host.note_written()
