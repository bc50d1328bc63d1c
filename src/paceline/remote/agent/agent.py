"""The agent of a node, which handles requests, runs commands, and exits when the link closes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import select
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.observe.node.load import LoadMeter
from paceline.remote.agent import machine
from paceline.remote.agent.commands import Commands
from paceline.remote.agent.files import FileRequests, remove
from paceline.remote.agent.machine import disk_of, oom_kills
from paceline.remote.agent.mirror import Mirror
from paceline.remote.agent.rsh import Relay
from paceline.remote.agent.send_queue import LIVE, SendQueue
from paceline.remote.wire import Frames, Header, WireError, ping_s
from paceline.system import processes

#: Seconds to wait until killed processes have disappeared.
_GONE_S = 5.0


def serve(read_fd: int, write_fd: int, guardian: socket.socket, settings: dict[str, Any]) -> int:
    """Run the agent of this node until the link closes. Return the exit code."""
    return Agent(SendQueue(write_fd, ping_s(settings["silence_s"])), guardian, settings).run(read_fd)


class Agent:
    """A node's agent, which serves the supervisor's requests.

    settings: `silence_s` is the number of seconds without a message after which the supervisor counts as lost.
    out: The queue of messages to the supervisor.
    """

    def __init__(self, out: SendQueue, guardian: socket.socket, settings: dict[str, Any]) -> None:
        self._out, self._guardian, self._settings = out, guardian, settings
        self._frames = Frames()
        self._commands = Commands()
        self._files = FileRequests(self._out, self._fail)
        self._mirror: Mirror | None = None
        self._relay = Relay(self._out)
        self._meter: LoadMeter | None = None
        self._scratch: list[str] = []
        #: Id of the run. The agent manages all processes of this run, even those that an engine like Slurm has started.
        self._run_id: str | None = None
        self._leaving = False

    def run(self, read_fd: int) -> int:
        """Serve requests until the link closes, then kill all commands. Return the exit code."""
        # This pipe wakes poll() when a child ends. A full pipe wakes poll() anyway, so further bytes can be dropped.
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._out.start()
        self._out.put(machine.about(self._settings))
        heard = time.monotonic()
        try:
            while not self._leaving:
                ready = self._poll([read_fd, wake, self._guardian.fileno(), *self._relay.fds()])
                if wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                # Reap before reading requests, which may ask about a command that has just ended.
                self._reap()
                self._relay.look(ready)
                if self._mirror is not None and self._mirror.has_failed:
                    return 1
                if self._guardian.fileno() in ready:
                    return 1  # the parent process, which cleans up after this agent, is dead
                if read_fd in ready:
                    data = os.read(read_fd, 1 << 18)
                    if not data:
                        return 0
                    heard = time.monotonic()
                    self.take(data)
                elif time.monotonic() - heard > self._settings["silence_s"] and read_fd not in self._poll([read_fd]):
                    return 1
        except (OSError, WireError):
            return 1
        finally:
            self._leave()
        return 0

    def _poll(self, fds: list[int]) -> set[int]:
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(ping_s(self._settings["silence_s"]) * 1000 / 2)}

    def _leave(self) -> None:
        # First end the thread that sends the run's files, because it must not wait until a closed link accepts data.
        if self._mirror is not None:
            self._mirror.close()
        processes.kill_descendants(os.getpid(), wait_s=_GONE_S)
        self._kill(self._adopted)
        self._files.drop()
        for path in self._scratch:
            shutil.rmtree(path, ignore_errors=True)
        self._out.finish()
        self._out.join(1.0)

    def _reap(self) -> None:
        ends, replies = self._commands.reap()
        for header in ends:
            # Let the mirror thread, which sends the run's files, report the exit after it has sent the command's last output.
            if self._mirror is not None:
                self._mirror.tell(header)
            else:
                self._out.put(header, kind=LIVE)
        for header, data in replies:
            self._out.put(header, data)

    # --- requests of the supervisor

    def take(self, data: bytes) -> None:
        """Parse received bytes, and handle each request that is now complete."""
        for header, content in self._frames.feed(data):
            self._hear(header, content)

    def _hear(self, header: Header, data: bytes) -> None:
        name = header.get("op", "")
        handle: Callable[[Header, bytes], Header | None] | None = getattr(self, f"_op_{name}", None)
        handle = handle or getattr(self._files, f"op_{name}", None)
        if handle is None:
            if "id" in header:
                self._fail(header["id"], OSError(errno.ENOSYS, f"unknown request {name!r}"))
            return
        try:
            found = handle(header, data)
        except (OSError, ValueError) as error:
            if "id" in header:
                self._fail(header["id"], error)
            return
        if found is not None and "id" in header:
            self._out.put({"re": header["id"], **found})

    def _fail(self, request: int, error: Exception) -> None:
        number = getattr(error, "errno", None) or errno.EIO
        text = getattr(error, "strerror", None) or str(error)
        path = getattr(error, "filename", None)
        path = os.fsdecode(path) if isinstance(path, (str, bytes)) else None
        self._out.put({"re": request, "error": [number, text, path]})

    def _op_ping(self, header: Header, data: bytes) -> None:
        return None

    def _op_start(self, header: Header, data: bytes) -> Header:
        return self._start(header, {**({} if header["exact"] else os.environ), **header["env"]})

    def _start(self, header: Header, env: dict[str, str]) -> Header:
        values = {name: header[name] for name in ("argv", "spare", "is_spare", "log", "tag")}
        pid, cold = self._commands.start_worker(**values, env=env, cwd=header["cwd"] or None)
        return {"pid": pid, "cold": cold}

    def _op_start_all(self, header: Header, data: bytes) -> Header:
        started: list[Header] = []
        cold: set[str] = set()
        for one in header["commands"]:
            # A spare is a pre-started Python process. If a command finds the spare busy, start later commands without it at once.
            spare = "" if one["spare"] in cold else one["spare"]
            try:
                told = self._start({**header, **one, "spare": spare, "tag": ""}, {**header["env"], **one["env"]})
                started.append(told)
                cold |= {spare} if told["cold"] else set()
            except OSError as error:
                path = error.filename
                text = error.strerror or str(error)
                named = path if isinstance(path, str) else None
                started.append({"error": [error.errno or errno.EIO, text, named]})
        return {"started": started}

    def _op_run(self, header: Header, data: bytes) -> None:
        self._commands.run(header["id"], header["argv"], data)

    def _op_call(self, header: Header, data: bytes) -> None:
        # Call the function in a thread, because it may wait for a lock, and the agent has to serve the link meanwhile.
        threading.Thread(target=self._call, args=(header,), name="paceline-call", daemon=True).start()

    def _call(self, header: Header) -> None:
        module, _, name = header["function"].partition(":")
        try:
            found = getattr(importlib.import_module(module), name)(header["given"])
        except Exception as error:  # catch all errors, because every request needs an answer
            self._fail(header["id"], error)
        else:
            self._out.put({"re": header["id"], "found": found})

    def _op_stop(self, header: Header, data: bytes) -> None:
        self._commands.stop(header["request"])

    def _op_signal(self, header: Header, data: bytes) -> Header:
        # Pids are reused, so signal only this agent's descendants, and the run's processes in containers.
        ours = set(self._ours())
        if not ours.issuperset(header["pids"]):
            ours.update(processes.belonging("PACELINE_RUN_ID", header["run_id"]))
        pids = [pid for pid in header["pids"] if pid in ours]
        sent = [processes.send(pid, number) for pid in pids for number in header["numbers"]]
        return {"ok": any(sent)}

    def _op_alive(self, header: Header, data: bytes) -> Header:
        return {"ok": processes.is_alive(header["pid"])}

    def _op_ending(self, header: Header, data: bytes) -> Header:
        return {"ok": any(map(processes.is_ending, header["pids"]))}

    def _op_kill_session(self, header: Header, data: bytes) -> Header:
        processes.kill_session(header["pid"])
        return {}

    def _op_kill_all(self, header: Header, data: bytes) -> Header:
        return {"left": self._kill(lambda: [pid for pid in self._ours() if pid not in self._commands.spares])}

    def _op_adopt(self, header: Header, data: bytes) -> Header:
        """Kill all processes of a run on this node, immediately and at the agent's end."""
        self._run_id = header["run_id"]
        return {"left": self._kill(self._adopted)}

    def _op_end_run(self, header: Header, data: bytes) -> Header:
        return {"left": self._kill(lambda: processes.belonging("PACELINE_RUN_ID", header["run_id"]))}

    def _ours(self) -> list[int]:
        return [*processes.descendants(os.getpid()), *self._adopted()]

    def _adopted(self) -> list[int]:
        return [] if self._run_id is None else processes.belonging("PACELINE_RUN_ID", self._run_id)

    def _kill(self, which: Callable[[], list[int]]) -> int:
        """Kill the processes that `which` returns. Return how many are left after five seconds."""
        deadline = time.monotonic() + _GONE_S
        while (left := which()) and time.monotonic() < deadline:
            for pid in left:
                processes.send(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.005)
        self._reap()
        return len(left)

    def _op_close(self, header: Header, data: bytes) -> Header:
        self._leaving = True
        return {}

    def _op_remove(self, header: Header, data: bytes) -> Header:
        if self._mirror is not None and self._mirror.top == header["path"]:
            self._mirror.close()
            self._mirror.join(1.0)
            self._mirror = None
        remove(header["path"])
        return {}

    def _op_disk(self, header: Header, data: bytes) -> Header:
        return {"found": disk_of(header["path"])}

    def _op_load(self, header: Header, data: bytes) -> Header:
        if self._meter is None:
            self._meter = LoadMeter(tuple(header["gpus"]) or None)
        return {"found": self._meter.look(header.get("workers"))}

    def _op_oom_kills(self, header: Header, data: bytes) -> Header:
        return {"found": oom_kills()}

    def _op_free_ports(self, header: Header, data: bytes) -> Header:
        return {"found": machine.free_ports(header["count"])}

    def _op_scratch(self, header: Header, data: bytes) -> Header:
        """Create a temporary folder, with the socket at which `rsh.py` requests remote commands."""
        path = header["path"]
        with contextlib.suppress(FileExistsError):  # another agent on the same machine has created the folder
            # First report the path to the guardian process, then create the folder: the guardian removes it after a crash.
            self._guardian.sendall(os.fsencode(path) + b"\0")
            self._scratch.append(path)
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            raise PermissionError(errno.EACCES, "belongs to another user, or others can write to it", path)
        # Use a random name, because agents on several hosts may share the folder and have the same pid.
        self._relay.listen(os.path.join(path, f"agent-{os.urandom(4).hex()}"))
        return {"socket": self._relay.path}

    def _op_rsh_done(self, header: Header, data: bytes) -> None:
        self._relay.answer(header["number"], header["code"], header["text"])

    # --- sending the run's files to the supervisor

    def _op_mirror(self, header: Header, data: bytes) -> Header:
        if self._mirror is not None and self._mirror.top == header["path"]:
            self._mirror.attempt, self._mirror.takes_files = header["attempt"], header["takes_files"]
            return {}
        if self._mirror is not None:
            self._mirror.close()
            self._mirror.join(1.0)
        self._mirror = self._new_mirror(header)
        self._mirror.start()
        return {}

    def _new_mirror(self, header: Header) -> Mirror:
        return Mirror(
            header["path"], header["attempt"], header["have"], header["takes_files"], self._out, header["log_limit"]
        )

    def _op_again(self, header: Header, data: bytes) -> None:
        if self._mirror is not None:
            self._mirror.send_again(header["file"])

    def _op_flush(self, header: Header, data: bytes) -> Header | None:
        if self._mirror is None:
            return {}
        self._mirror.tell({"re": header["id"], "all": True, "last": header.get("last", False)})
        return None
