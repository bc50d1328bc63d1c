"""The commands of `paceline exec`: people run them beside a worker while it runs, and ask for them by files in the run's folder.

    exec/<id>/request.json   {"argv", "rank", "terminal", "term"}; the folder appears once it is whole. {"stacks": {"native"}}
                             asks for a look at all workers in place of a command (`paceline.runs.stacks`), and {"profile":
                             {"seconds", "rate"}} for samples of their stacks (`paceline.runs.profile`)
    exec/<id>/in_<n>.json    what the asking program passes on
    exec/<id>/alive          changes as long as the asking program is there
    exec/<id>/answer.json    {"output"}: the name of the file of its output, or {"error"}: why it was not started
    attempts/<k>/exec_<id>.jsonl   its output, on its way back as logs are

On the node `paceline.remote.agent.execute` serves it, as a process of the node's like any other: it is gone when the run is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.job.plan import Launch, ProcessExit
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.supervisor.in_containers import beside_worker
from paceline.supervisor.looks import LIMIT_S, Looks
from paceline.system.files import names_in, write_json
from paceline.targets import Nodes

#: How long the asking program may be silent. It says every second that it is there.
_SILENCE_S = 15.0
#: How long it has, once the command has ended, to read the last of the output and to remove what is left.
_READ_S = 10.0
_LOOK_S = 0.05


@dataclass
class _Running:
    """A command that runs. sent: how much of what comes was given to a node that does not see this folder."""

    id: str
    node_rank: int
    pid: int
    heard: float
    alive: bytes = b""
    sent: int = 0
    ended: float | None = None


class ExecCommands:
    """The commands of one attempt. shells: of each node, as the workers have them. is_running: whether a rank's worker is
    there. looks: what answers a request for stacks."""

    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        nodes: Nodes,
        shells: Sequence[Any],
        is_running: Callable[[int], bool],
        looks: Looks,
    ) -> None:
        self._launch, self._folder, self._nodes, self._shells = launch, folder, nodes, shells
        self._is_running, self._looks = is_running, looks
        #: The outputs of what was asked of `looks`, while somebody may read them -> when they were written.
        self._told: dict[str, float] = {}
        self._is_apart = launch.run_dir != folder.path
        self._running: dict[str, _Running] = {}
        self._refused: set[str] = set()
        self._next = 0.0

    def look(self) -> None:
        """Start what is asked for, pass on what has come, and end what nobody waits for."""
        now = time.monotonic()
        # The supervisor calls this in every turn of its loop, far more often than the folder need be listed.
        if now < self._next:
            return
        self._next = now + _LOOK_S
        for name in self._asked():
            if name not in self._running and name not in self._told and name not in self._refused:
                self._begin(name)
        for one in list(self._running.values()):
            self._look_after(one)
        for name, written in list(self._told.items()):
            if not (self._folder.exec_requests / name).exists() or now - written > _READ_S:
                del self._told[name]
                self._forget(name)

    def ended(self, ended: ProcessExit) -> None:
        """Take in that a process of the nodes' has ended, perhaps one of these."""
        for one in self._running.values():
            if (one.pid, one.node_rank) == (ended.pid, ended.node_rank):
                one.ended = time.monotonic()

    def close(self) -> None:
        """Remove all files of theirs at the attempt's end. The processes went with the nodes' others."""
        for name in (*self._running, *self._told):
            self._forget(name)
        self._running.clear()
        self._told.clear()
        shutil.rmtree(self._folder.exec_requests, ignore_errors=True)

    def _asked(self) -> list[str]:
        return [name for name in names_in(self._folder.exec_requests) if not name.startswith(".")]

    def _begin(self, name: str) -> None:
        folder = self._folder.exec_requests / name
        try:
            request = _own_request(folder)
        except (OSError, ValueError) as error:
            # No answer: it would be written where somebody else's link leads.
            self._refused.add(name)
            say(f"the request {str(folder)!r} is not followed (paceline exec): {error}")
            return
        try:
            if "stacks" in request:
                native = bool(request["stacks"].get("native"))
                self._begin_look(name, LIMIT_S, lambda tell: self._looks.begin(tell, native=native))
            elif "profile" in request:
                seconds, rate = float(request["profile"]["seconds"]), float(request["profile"]["rate"])
                self._begin_look(
                    name, seconds + LIMIT_S, lambda tell: self._looks.begin_profile(tell, seconds=seconds, rate=rate)
                )
            else:
                self._start(name, request)
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Remembered, or each look would try it again.
            self._refused.add(name)
            with contextlib.suppress(OSError):
                write_json(folder / "answer.json", {"error": str(error)})

    def _begin_look(self, name: str, limit_s: float, begin: Callable[[Callable[[dict[str, Any]], None]], None]) -> None:
        """Look at all workers; what is found is told as the output of a command would be. begin: is given what is to be called
        with it."""
        output = self._make_output(name)
        # From now on it is not new; when its asker is gone, it is forgotten.
        self._told[name] = time.monotonic() + limit_s + 2 * LIMIT_S

        def tell(found: dict[str, Any]) -> None:
            if name not in self._told:
                return
            import base64  # people seldom ask

            text = base64.b64encode(json.dumps(found).encode()).decode()
            with contextlib.suppress(OSError), open(output, "a", encoding="utf-8") as file:
                file.write(json.dumps({"out": text}) + "\n" + json.dumps({"exit": 0}) + "\n")
            self._told[name] = time.monotonic()

        begin(tell)
        self._answer(name)

    def _output(self, name: str) -> Path:
        return self._folder.exec_output(self._launch.attempt, name)

    def _make_output(self, name: str) -> Path:
        """The file of a command's output, before anybody writes to it: readable for its owner alone from the first byte on."""
        os.close(os.open(self._output(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return self._output(name)

    def _answer(self, name: str) -> None:
        """Tell the asking program where the output is."""
        output = str(self._output(name).relative_to(self._folder.path))
        write_json(self._folder.exec_requests / name / "answer.json", {"output": output})

    def _forget(self, name: str) -> None:
        self._output(name).unlink(missing_ok=True)
        shutil.rmtree(self._folder.exec_requests / name, ignore_errors=True)

    def _start(self, name: str, request: dict[str, Any]) -> None:
        rank, argv = int(request["rank"]), [str(word) for word in request["argv"]]
        if not self._is_running(rank):
            raise ValueError(f"rank {rank} has ended, or not started yet")
        place = self._launch.places[rank]
        channel = f"{self._launch.run_dir}/exec/{name}"
        there = RunFolder(self._launch.run_dir).exec_output(self._launch.attempt, name)
        if self._is_apart:
            self._put(place.node_rank, f"{channel}/request.json", self._folder.exec_requests / name / "request.json")
        self._make_output(name)
        command = beside_worker(self._launch, self._shells, rank, "execute", channel, str(there))
        started = self._nodes.start(command, self._launch.work_dir, self._shells[place.node_rank])
        self._running[name] = _Running(id=name, node_rank=place.node_rank, pid=started.pid, heard=time.monotonic())
        say(f"beside rank {rank}: {argv[0]!r} was started (paceline exec)")
        self._answer(name)

    def _look_after(self, one: _Running) -> None:
        folder, now = self._folder.exec_requests / one.id, time.monotonic()
        if one.ended is not None:
            # The asking program removes its folder when it has read the end; one that was killed never will.
            if not folder.exists() or now - one.ended > _READ_S:
                del self._running[one.id]
                self._forget(one.id)
            return
        with contextlib.suppress(OSError):
            alive = (folder / "alive").read_bytes()
            # Whether it has changed, not when: the asking program may be on a machine with another clock.
            if alive != one.alive:
                one.alive, one.heard = alive, now
        if not folder.exists() or now - one.heard > _SILENCE_S:
            self._hang_up(one)
        elif self._is_apart:
            while (path := folder / f"in_{one.sent}.json").exists():
                self._put(one.node_rank, f"{self._launch.run_dir}/exec/{one.id}/{path.name}", path)
                one.sent += 1

    def _hang_up(self, one: _Running) -> None:
        """End a command that nobody waits for any more.

        The signal is not enough: in a container it reaches the engine's client alone. So the program that serves the command
        is told as well, by a file, or by the request's folder being gone.
        """
        one.ended = time.monotonic()
        self._nodes.signal(one.pid, one.node_rank, signal.SIGHUP)
        gone = self._folder.exec_requests / one.id / f"in_{one.sent}.json"
        with contextlib.suppress(OSError):
            if self._is_apart:
                gone.parent.mkdir(parents=True, exist_ok=True)
                write_json(gone, {"gone": True})
                self._put(one.node_rank, f"{self._launch.run_dir}/exec/{one.id}/{gone.name}", gone)
            else:
                shutil.rmtree(gone.parent, ignore_errors=True)

    def _put(self, node_rank: int, path: str, source: Path) -> None:
        put: Callable[[int, str, bytes], None] | None = getattr(self._nodes, "put", None)
        if put is None:
            raise ValueError("this compute target can't pass on what is typed to its nodes")
        put(node_rank, path, source.read_bytes())


def _own_request(folder: Path) -> dict[str, Any]:
    """Return the request in a folder that only the run's owner can have made.

    In a workspace that several users write to, anybody may put a link here, to a folder of the owner's with a file of that name.

    Raises:
        OSError: a part of the path is a link, or another user can write to it.
        ValueError: it is no JSON object.
    """
    fds: list[int] = []
    try:
        for path in (folder.parent, folder.name, "request.json"):
            kind = os.O_RDONLY if path == "request.json" else os.O_RDONLY | os.O_DIRECTORY
            # NONBLOCK: a FIFO would hold up the supervisor.
            flags = kind | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fds.append(os.open(path, flags, dir_fd=fds[-1] if fds else None))
            found = os.fstat(fds[-1])
            is_shut = stat.S_ISREG(found.st_mode) or (stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077)
            if found.st_uid != os.geteuid() or not is_shut:
                raise PermissionError(f"{str(path)!r} belongs to another user, or is open to others")
        with open(fds[-1], "rb", closefd=False) as file:
            request = json.load(file)
    finally:
        for fd in fds:
            os.close(fd)
    if not isinstance(request, dict):
        raise ValueError("it is no JSON object")
    return request
