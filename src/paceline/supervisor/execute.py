"""The server of `paceline exec`, which runs commands beside a worker. A client requests each command by files.

    exec/<id>/request.json   {"argv", "rank", "terminal", "term", "relay"} requests a command, {"stacks": {"native"}}
                             stack dumps (`paceline.observe.stacks`), {"profile": {"seconds", "rate"}} a profile
                             (`paceline.observe.profile`). The client fills a folder, then renames it to exec/<id>.
    exec/<id>/in_<n>.json    messages of the client
    exec/<id>/alive          heartbeat of the client
    exec/<id>/answer.json    {"output"}: the name of the output's file, or {"error"}
    attempts/<k>/exec_<id>.jsonl   the output, transferred as logs are

On the node, `paceline.remote.agent.execute` runs the command. At the end of the run, Paceline ends the command too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.job.plan import Launch, ProcessExit
from paceline.observe.node.messages import WorkersReport
from paceline.observe.stack_dumps import LIMIT_S, Looks
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.supervisor.in_containers import beside_worker
from paceline.system.files import OwnFolder, names_in
from paceline.targets import Nodes

#: Seconds without a heartbeat from the client, which sends one every second, after which the client counts as dead.
_SILENCE_S = 15.0
#: Seconds after a command's end in which its client may still read the output and remove the request's folder.
_READ_S = 60.0
_LOOK_S = 0.05
#: Seconds of faster polling after a message, because tunnels send many messages; and the pause in seconds between these polls.
_BUSY_S, _BUSY_LOOK_S = 2.0, 0.01


@dataclass
class _Running:
    """A command of `paceline exec` that runs on a node.

    folder: The folder of the command's request.
    sent: Number of the client's messages that were forwarded to the node, if the node can't read `folder`.
    hung_up: Whether the supervisor has ended the command, because its client is gone.
    """

    id: str
    folder: OwnFolder
    node_rank: int
    pid: int
    heard: float
    alive: bytes = b""
    sent: int = 0
    ended: float | None = None
    hung_up: bool = False


class ExecCommands:
    """The server of `paceline exec` during one attempt.

    shells: The workers' environment variables on each node.
    is_running: Returns whether a rank's worker runs.
    looks: The object that makes the requested stack dumps and profiles.
    """

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
        #: Name of an answered request -> time when its answer was written.
        self._told: dict[str, float] = {}
        #: Name of an open request -> its folder.
        self._open: dict[str, OwnFolder] = {}
        self._is_apart = launch.run_dir != folder.path
        self._running: dict[str, _Running] = {}
        self._refused: set[str] = set()
        self._next = self._busy_until = 0.0

    def pause_s(self, longest_s: float) -> float:
        """Return the seconds, at most `longest_s`, until the next `look` must happen."""
        return min(longest_s, _BUSY_LOOK_S) if time.monotonic() < self._busy_until else longest_s

    def look(self) -> None:
        """Start requested commands, forward messages, and end commands whose client is gone."""
        now = time.monotonic()
        # The supervisor calls `look` on each tick, but the folder need not be listed so often.
        if now < self._next:
            return
        self._next = now + self.pause_s(_LOOK_S)
        for name in self._asked():
            if name not in self._running and name not in self._told and name not in self._refused:
                self._begin(name)
        for one in list(self._running.values()):
            self._look_after(one)
        for name, written in list(self._told.items()):
            if not self._open[name].is_there() or now - written > _READ_S:
                del self._told[name]
                self._forget(name)

    def ended(self, ended: ProcessExit) -> None:
        """Record the end of a process, if it is one of the commands."""
        for one in self._running.values():
            if (one.pid, one.node_rank) == (ended.pid, ended.node_rank):
                one.ended = time.monotonic()

    def close(self) -> None:
        """Remove all requests and outputs, once the commands' processes have ended."""
        for name in (*self._running, *self._told):
            self._forget(name)
        self._running.clear()
        self._told.clear()
        shutil.rmtree(self._folder.exec_requests, ignore_errors=True)

    def _asked(self) -> list[str]:
        return [name for name in names_in(self._folder.exec_requests) if not name.startswith(".")]

    def _begin(self, name: str) -> None:
        path = self._folder.exec_requests / name
        try:
            folder = OwnFolder(path, shut=True)
            try:
                request = json.loads(folder.read("request.json"))
                if not isinstance(request, dict):
                    raise ValueError("it is not a JSON object")
            except BaseException:
                folder.close()
                raise
        except (OSError, ValueError) as error:
            # Write no answer into this folder: another user may have put a link there.
            self._refused.add(name)
            say(f"the request {str(path)!r} is not followed (paceline exec): {error}")
            return
        self._open[name] = folder
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
            # Remember that this request was refused, because otherwise each tick would try the request again.
            self._refused.add(name)
            with contextlib.suppress(OSError):
                folder.write_json("answer.json", {"error": str(error)})
            self._told.pop(name, None)
            self._open.pop(name).close()

    def _begin_look(self, name: str, limit_s: float, begin: Callable[[Callable[[WorkersReport], None]], None]) -> None:
        """Take a stack dump or profile, and write it like a command's output.

        begin: Starts the dump or profile. Its argument is a function that receives the result.
        """
        output = self._make_output(name)
        # Treat the request as answered until its client has certainly gone, so that the dump is not started again.
        self._told[name] = time.monotonic() + limit_s + 2 * LIMIT_S

        def tell(found: WorkersReport) -> None:
            if name not in self._told:
                return
            import base64  # imported here because few runs need it

            text = base64.b64encode(json.dumps(found).encode()).decode()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            with contextlib.suppress(OSError), open(os.open(output, flags), "a", encoding="utf-8") as file:
                file.write(json.dumps({"out": text}) + "\n" + json.dumps({"exit": 0}) + "\n")
            self._told[name] = time.monotonic()

        begin(tell)
        self._answer(name)

    def _output(self, name: str) -> Path:
        return self._folder.exec_output(self._launch.attempt, name)

    def _make_output(self, name: str) -> Path:
        os.close(os.open(self._output(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return self._output(name)

    def _answer(self, name: str) -> None:
        output = str(self._output(name).relative_to(self._folder.path))
        self._open[name].write_json("answer.json", {"output": output})

    def _forget(self, name: str) -> None:
        self._output(name).unlink(missing_ok=True)
        folder = self._open.pop(name)
        folder.remove()
        folder.close()

    def _start(self, name: str, request: dict[str, Any]) -> None:
        rank, argv = int(request["rank"]), [str(word) for word in request["argv"]]
        if not self._is_running(rank):
            raise ValueError(f"rank {rank} has ended, or not started yet")
        place = self._launch.places[rank]
        channel = f"{self._launch.run_dir}/exec/{name}"
        there = RunFolder(self._launch.run_dir).exec_output(self._launch.attempt, name)
        if self._is_apart:
            self._put(place.node_rank, f"{channel}/request.json", json.dumps(request).encode())
            self._busy_until = time.monotonic() + _BUSY_S
        self._make_output(name)
        command = beside_worker(self._launch, self._shells, rank, "remote/agent/execute.py", channel, str(there))
        started = self._nodes.start(command, self._launch.work_dir, self._shells[place.node_rank])
        self._running[name] = _Running(
            id=name, folder=self._open[name], node_rank=place.node_rank, pid=started.pid, heard=time.monotonic()
        )
        say(f"beside rank {rank}: {argv[0]!r} was started (paceline exec)")
        self._answer(name)

    def _look_after(self, one: _Running) -> None:
        now = time.monotonic()
        if one.ended is not None:
            # A client removes its folder when it has read all output. After a hang-up, wait `_READ_S` before the output file is
            # deleted: the node may still send output, which would create a deleted file again.
            if (not one.hung_up and not one.folder.is_there()) or now - one.ended > _READ_S:
                del self._running[one.id]
                self._forget(one.id)
            return
        with contextlib.suppress(OSError):
            alive = one.folder.read("alive")
            # Compare the heartbeat's values instead of times, because the client's machine may have another clock.
            if alive != one.alive:
                one.alive, one.heard = alive, now
        if not one.folder.is_there() or now - one.heard > _SILENCE_S:
            self._hang_up(one)
        elif self._is_apart:
            with contextlib.suppress(OSError):  # no further message has arrived
                while True:
                    self._pass_on(one, one.folder.read(f"in_{one.sent}.json"))
                    one.sent += 1

    def _hang_up(self, one: _Running) -> None:
        """End a command whose client is gone.

        SIGHUP alone is not enough: in a container, the signal does not reach the command. So also send a message to
        the program that runs the command, or remove the request's folder. The program then ends the command.
        """
        one.ended, one.hung_up = time.monotonic(), True
        self._nodes.signal(one.pid, one.node_rank, signal.SIGHUP)
        with contextlib.suppress(OSError):
            if self._is_apart:
                self._pass_on(one, b'{"gone": true}')
            else:
                one.folder.remove()

    def _pass_on(self, one: _Running, data: bytes) -> None:
        self._busy_until = time.monotonic() + _BUSY_S
        self._put(one.node_rank, f"{self._launch.run_dir}/exec/{one.id}/in_{one.sent}.json", data)

    def _put(self, node_rank: int, path: str, data: bytes) -> None:
        put: Callable[[int, str, bytes], None] | None = getattr(self._nodes, "put", None)
        if put is None:
            raise ValueError("this compute target can't pass input on to its nodes")
        put(node_rank, path, data)
