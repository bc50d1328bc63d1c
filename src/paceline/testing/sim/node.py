"""A simulated node: the real agent, with simulated processes, disk and network."""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.remote.agent.agent import Agent
from paceline.remote.agent.mirror import LOOK_S, Mirror
from paceline.remote.agent.send_queue import URGENT, SendQueue
from paceline.remote.wire import PING, Header, frame, ping_s
from paceline.testing.sim.faults import RESEND_S, NodeBehavior
from paceline.testing.sim.worker import SimCommands

#: Paths on a simulated disk begin with this prefix. Each node replaces it by the path of its own folder.
DISK = "/paceline-sim"
#: Names of the requests that write to the node's disk.
_WRITES = ("file", "tree", "mkdirs", "link")
#: Seconds for which the node collects frames to send in one message.
_TOGETHER_S = 0.0005
#: Seconds after which the loop reads from its connections, even if other work is overdue.
_SLICE_S = 0.05
#: Size of a simulated disk in bytes.
_DISK_BYTES = 10**12


class Loop:
    """An event loop, which calls simulated nodes' functions at given times."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        #: Two heaps of functions to call: first the urgent functions, then all other functions.
        self._due: tuple[list[tuple[float, int, Callable[[], None]]], ...] = ([], [])
        self._count = itertools.count()

    def after(self, delay_s: float, work: Callable[[], None], *, urgent: bool = False) -> None:
        """Call `work` after a delay. Urgent work precedes other work that is due."""
        heapq.heappush(self._due[not urgent], (self.now() + delay_s, next(self._count), work))

    def work_off(self) -> float | None:
        """Call due functions for a while. Return seconds until the next, or None."""
        until = self.now() + _SLICE_S
        while (now := self.now()) <= until:
            for due in self._due:
                if due and due[0][0] <= now:
                    heapq.heappop(due)[2]()
                    break
            else:
                return min((max(0.0, due[0][0] - now) for due in self._due if due), default=None)
        return 0.0


class SimNode:
    """A simulated node, with its connection to the supervisor.

    folder: The folder of the node's simulated disk; None if the node sees the supervisor's files.
    on_want: Called with True while bytes wait for the socket to accept them, then with False.
    """

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        loop: Loop,
        behavior: NodeBehavior,
        *,
        seed: int,
        cores: int,
        folder: str | None,
        silence_s: float,
        on_want: Callable[[bool], None] = lambda wants: None,
    ) -> None:
        self.name, self.folder, self.cores = f"sim{number}", folder, cores
        self.is_full = self.is_over = self.is_silent = False
        self._sock, self._loop, self._behavior, self._silence_s = sock, loop, behavior, silence_s
        self._chance = random.Random(f"{seed} {number}")
        self._on_want = on_want
        self._unsent = bytearray()
        #: Frames of the message that the node collects; times of the latest message to the supervisor, and of the latest from it.
        self._outgoing: list[bytes] = []
        self._last_out = self._last_in = 0.0
        self._heard = self._sent = loop.now()
        self._is_due = {"look": False, "reap": False}
        self.commands = SimCommands(self)
        settings = {"silence_s": silence_s, "library": _library(), "folder": DISK}
        self._out = SimOut(self)
        self.agent = SimAgent(self._out, settings, self)
        self._out.put(_about(self))
        loop.after(ping_s(silence_s), self._tick, urgent=True)
        for at_s, work in (
            (behavior.silent_s, self._fall_silent),
            (behavior.killed_s, self.leave),
            (behavior.full_s, self._fill_disk),
        ):
            if at_s is not None:
                loop.after(at_s, work)

    # --- methods for the connection to the supervisor

    def receive(self) -> None:
        """Read bytes from the supervisor. The agent gets them after the network's delay."""
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.leave()
        elif not self.is_silent:
            self._heard = self._loop.now()
            self._last_in = self._deliver(self._last_in, lambda: self._take(data))

    def send(self, data: bytes) -> None:
        """Send bytes to the supervisor. Bytes of the same moment form one message."""
        now = self._loop.now()
        if not self._outgoing or now - self._sent > _TOGETHER_S:
            batch: list[bytes] = []
            self._outgoing = batch
            self._last_out = self._deliver(self._last_out, lambda: self._write(batch))
            self._sent = now
        self._outgoing.append(data)

    def flush(self) -> None:
        """Write bytes that the socket has not accepted yet."""
        if self.is_over or self.is_silent:
            return
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.leave()
            return
        self._on_want(bool(self._unsent))

    def leave(self) -> None:
        """Close the connection, and end the node's agent and processes."""
        if not self.is_over:
            self.is_over = True
            self.commands.kill_all()
            self._sock.close()

    def _deliver(self, last: float, work: Callable[[], None]) -> float:
        """Call `work` when a message arrives, not before `last`. Return the arrival time."""
        behavior = self._behavior
        delay_s = behavior.latency_s * (1 + self._chance.random() / 2)
        if behavior.resent and self._chance.random() < behavior.resent:
            delay_s += RESEND_S
        now = self._loop.now()
        arrives = max(now + delay_s, last)
        self._loop.after(arrives - now, work)
        return arrives

    def _take(self, data: bytes) -> None:
        if not self.is_over:
            self.agent.take(data)
            if self.agent.is_leaving:
                self._loop.after(self._behavior.latency_s * 2 + 0.01, self.leave)

    def _write(self, batch: list[bytes]) -> None:
        self._unsent += b"".join(batch)
        if batch is self._outgoing:
            self._outgoing = []
        self.flush()

    def _tick(self) -> None:
        if self.is_over:
            return
        now, pause_s = self._loop.now(), ping_s(self._silence_s)
        if now - self._sent >= pause_s * 0.9:
            self._sent = now
            self._loop.after(self._behavior.latency_s, lambda: self._write([PING]), urgent=True)
        if now - self._heard > self._silence_s:
            # A busy machine may delay this process. Read arrived messages before the supervisor counts as silent.
            self.receive()
        if now - self._heard > self._silence_s:
            self.leave()
        self._loop.after(pause_s, self._tick, urgent=True)

    # --- methods that make the node fail

    def _fall_silent(self) -> None:
        self.is_silent = True

    def _fill_disk(self) -> None:
        self.is_full = True

    # --- methods that the simulated processes call

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        self._loop.after(delay_s, work)

    def start_delay(self) -> float:
        return self._behavior.start_s * (0.5 + self._chance.random() / 2)

    def note_written(self) -> None:
        self._soon("look", LOOK_S * self._behavior.factor, self.agent.look)

    def note_end(self) -> None:
        self._soon("reap", 0.0, self.agent.reap)

    def look_now(self) -> None:
        """Let the agent send the run's new log lines and files now."""
        self._loop.after(0.0, self.agent.look)

    def _soon(self, name: str, delay_s: float, work: Callable[[], None]) -> None:
        if not self._is_due[name]:
            self._is_due[name] = True

            def do() -> None:
                self._is_due[name] = False
                if not self.is_over:
                    work()

            self._loop.after(delay_s, do)

    def load(self) -> dict[str, object]:
        """Return invented resource use of the node and its workers."""
        workers = self.commands.ranks()
        ranks = {
            str(rank): {"pid": pid, "cpu_percent": round(90 + 10 * self._chance.random(), 1)} for rank, pid in workers
        }
        return {
            "cpu_percent": 100.0 * len(workers) / self.cores,
            "memory_gib": 2.0,
            "memory_total_gib": 64.0,
            "ranks": ranks,
        }


class SimOut(SendQueue):
    """A simulated agent's send queue, which passes frames to the simulated network."""

    def __init__(self, node: SimNode) -> None:
        super().__init__(-1, 1.0)
        self._node = node

    def put(self, header: Header, data: bytes = b"", *, kind: int = URGENT, wait: bool = False) -> None:
        if self._node.is_over:
            if wait:
                raise BrokenPipeError("the link is closed")
            return
        self._node.send(frame(header, data))


class SimMirror(Mirror):
    """A sender of a run's new files, in the node's event loop."""

    def __init__(self, header: Header, out: SendQueue, node: SimNode) -> None:
        super().__init__(
            header["path"], header["attempt"], header["have"], header["takes_files"], out, header["log_limit"]
        )
        self.node = node

    def start(self) -> None:
        self.node.look_now()

    def join(self, timeout: float | None = None) -> None:
        pass

    def tell(self, header: Header) -> None:
        super().tell(header)
        self.node.look_now()


class SimAgent(Agent):
    """The real agent, with invented answers to requests about processes and the machine."""

    def __init__(self, out: SimOut, settings: dict[str, Any], node: SimNode) -> None:
        # The base class needs a socket to a process that ends the workers. A simulated node has no such process, so close it.
        super().__init__(out, socket.socket(socket.AF_UNIX), settings)
        self._guardian.close()
        self._node, self._commands = node, node.commands

    @property
    def is_leaving(self) -> bool:
        return self._leaving

    def look(self) -> None:
        """Send the supervisor new log lines and files of the run."""
        if self._mirror is not None and not self._node.is_over:
            try:
                self._mirror.step()
            except BrokenPipeError:
                pass

    def reap(self) -> None:
        """Send the supervisor the exits of simulated processes."""
        self._reap()

    def _hear(self, header: Header, data: bytes) -> None:
        if self._node.is_full and header.get("op") in _WRITES:
            self._fail(header["id"], OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), header.get("path")))
            return
        super()._hear(_replaced(header, DISK, self._node.folder) if self._node.folder else header, data)

    def _fail(self, request: int, error: Exception) -> None:
        path = getattr(error, "filename", None)
        if self._node.folder and isinstance(error, OSError) and isinstance(path, str):
            error = OSError(error.errno, error.strerror, path.replace(self._node.folder, DISK))
        super()._fail(request, error)

    def _new_mirror(self, header: Header) -> Mirror:
        return SimMirror(header, self._out, self._node)

    def _op_signal(self, header: Header, data: bytes) -> Header:
        sent = [self._node.commands.signal(pid, number) for pid in header["pids"] for number in header["numbers"]]
        return {"ok": any(sent)}

    def _op_alive(self, header: Header, data: bytes) -> Header:
        return {"ok": self._node.commands.is_alive(header["pid"])}

    def _op_ending(self, header: Header, data: bytes) -> Header:
        return {"ok": False}

    def _op_kill_all(self, header: Header, data: bytes) -> Header:
        self._node.commands.kill_all()
        self._reap()
        return {"left": 0}

    def _op_end_run(self, header: Header, data: bytes) -> Header:
        return {"left": 0}

    def _op_load(self, header: Header, data: bytes) -> Header:
        return {"found": self._node.load()}

    def _op_disk(self, header: Header, data: bytes) -> Header:
        return {"found": (0 if self._node.is_full else _DISK_BYTES, _DISK_BYTES, 1)}

    def _op_oom_kills(self, header: Header, data: bytes) -> Header:
        return {"found": 0}

    def _op_scratch(self, header: Header, data: bytes) -> Header:
        # No simulated process uses the folder or the socket for the remote shell, so create neither.
        self._scratch.append(header["path"])
        return {"socket": f"{header['path']}/agent"}

    def _op_file(self, header: Header, data: bytes) -> Header:
        return {} if os.path.dirname(header["path"]) in self._scratch else self._files.op_file(header, data)


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return value.replace(old, new) if old in value else value
    if isinstance(value, dict):
        return {key: _replaced(one, old, new) for key, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, old, new) for one in value]
    return value


def _library() -> str:
    import paceline

    return os.path.dirname(os.path.dirname(os.path.abspath(paceline.__file__)))


def _about(node: SimNode) -> Header:
    return {
        **{"op": "hello", "host": node.name, "user": "sim", "home": "/home/sim", "cores": node.cores, "gpus": []},
        "python": [sys.executable, list(sys.version_info[:3])],
        "interfaces": {"lo": ("127.0.0.1", 8)},
        "env": {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/home/sim", "HOSTNAME": node.name},
        **{"pid": 999, "time": time.time(), "boot_id": node.name, "library": _library(), "folder": DISK},
    }
