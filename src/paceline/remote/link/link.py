"""One agent on one node, as its supervisor sees it."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.remote.link.bootstrap import Ends, bootstrap
from paceline.remote.link.connection import AgentConnection
from paceline.remote.link.link_files import LinkFiles
from paceline.remote.link.messages import Hello, LinkError
from paceline.remote.wire import SILENCE_S


@dataclass(frozen=True)
class CommandEnd:
    """A command that was waited for. returncode: as a shell gives it, 128+n for signal n."""

    returncode: int
    stdout: bytes
    stderr: bytes


class StartedEnd(NamedTuple):
    """A command that was started and has ended. code: as a shell gives it; time: in seconds since the epoch; peak_bytes: what it
    had in memory at most.
    """

    pid: int
    code: int
    time: float
    peak_bytes: int


class Link(LinkFiles):
    """One agent. Thread-safe. Every call raises `LinkError` where the node is lost, and OSError for what it met with."""

    hello: Hello

    def __init__(self, ends: Ends, name: str, silence_s: float) -> None:
        super().__init__()
        self.name, self.silence_s = name, silence_s
        self._connection = AgentConnection(ends, name, silence_s, self._hear)
        self._said_hello = threading.Event()
        self._ends: list[StartedEnd] = []
        #: Guards `_ends`, which the connection's filer fills and the supervisor empties.
        self._lock = threading.Lock()
        #: Called with frames of the remote shell, and with the ends of commands that were started with a tag.
        self.on_rsh: Callable[[dict[str, Any]], None] = lambda header: None
        self.on_tagged_end: Callable[[dict[str, Any]], None] = lambda header: None
        #: Called when there is something new among `ends`.
        self.on_end: Callable[[], None] = lambda: None

    @classmethod
    def open(
        cls,
        argv: Sequence[str],
        *,
        name: str,
        library_dir: Path,
        folder: str,
        shared_library: bool = False,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        silence_s: float = SILENCE_S,
    ) -> Link:
        """A link over the standard streams of a program, such as `ssh host ...` of `bootstrap_words`.

        name: of the node, for messages. library_dir: holds `paceline`. folder: on the node, for the library; `~` is
        expanded there. shared_library: the node may see `library_dir` itself. env: of the program; None for ours.
        silence_s: seconds without a word after which each side takes the other for lost.

        Raises:
            LinkError: there is no agent; with what the program has said.
        """
        return cls.over(
            Ends.of_program(argv, os.environ if env is None else env, name),
            name=name,
            library_dir=library_dir,
            folder=folder,
            shared_library=shared_library,
            timeout_s=timeout_s,
            silence_s=silence_s,
        )

    @classmethod
    def over(
        cls,
        ends: Ends,
        *,
        name: str,
        library_dir: Path,
        folder: str,
        shared_library: bool = False,
        timeout_s: float = 30.0,
        silence_s: float = SILENCE_S,
    ) -> Link:
        """A link whose ends are there; the others as for `open`."""
        link = cls(ends, name, silence_s)
        settings = {
            "shared": str(library_dir) if shared_library else None,
            "folder": folder,
            "agent": {"silence_s": silence_s},
        }
        try:
            first = bootstrap(ends, name, library_dir, settings, timeout_s)
        except BaseException:
            link._connection.give_up()
            raise
        # What `bootstrap` has read behind the last answer is the beginning of the frames.
        link._connection.start(first)
        deadline = time.monotonic() + timeout_s
        # In short waits: a link that is lost sets no event.
        while not link._said_hello.wait(0.1) and not link.lost and time.monotonic() < deadline:
            pass
        if not link._said_hello.is_set():
            lost = link.lost or f"{name}: its agent does not say hello."
            link.close()
            raise LinkError(lost, ends.stderr(), ends.exit_code())
        return link

    @property
    def lost(self) -> str | None:
        """Why this node counts as lost, None while it does not."""
        return self._connection.lost

    @property
    def is_stuck(self) -> bool:
        """True if an answer did not come in time and nothing has come since: asking for more only takes time."""
        return self._connection.is_stuck

    # --- commands

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float = 60.0) -> CommandEnd:
        """Run a short command in the agent's environment, wait for it, and return how it ended; after `timeout_s` it is killed.

        Raises:
            LinkError: also where time was up.
        """
        pending = self._connection.requests.new()
        self._connection.out.put({"op": "run", "id": pending.number, "argv": list(argv)}, input)
        try:
            answer, data = self._connection.wait_for(pending, shlex.join(argv), timeout_s)
        except LinkError:
            # Nobody waits for it any more: the agent is to kill the command.
            self._connection.out.put({"op": "stop", "request": pending.number})
            raise
        # One frame carries both outputs, standard output first.
        return CommandEnd(answer["code"], data[: answer["out"]], data[answer["out"] :])

    def call(self, function: str, given: Any, *, timeout_s: float = 20.0) -> Any:
        """Call a function of the library there, in the agent's process, and return its answer: `module:name` of one JSON value.

        It may block, and must start no process: the agent would take its end for that of a command.
        """
        answer, _ = self._connection.ask("call", timeout_s=timeout_s, function=function, given=given)
        return answer["found"]

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        log: str,
        exact: bool = False,
        tag: str = "",
    ) -> int:
        """The pid of a command that was started; its output goes to the file `log` there.

        Its environment: the agent's own (not if `exact`), over that `env`. tag: its end is not among `ends`, but told to
        `on_tagged_end`.
        """
        answer, _ = self._connection.ask(
            "start", timeout_s=20.0, argv=list(argv), env=dict(env), cwd=cwd, log=log, exact=exact, tag=tag
        )
        return int(answer["pid"])

    def signal(self, pid: int, number: int, *, run_id: str = "", wait: bool = True) -> bool:
        """Send a signal to a process that the agent, or what it has started, has started; False where there is none.

        run_id: of a run whose processes count too, whoever has started them. wait: for the answer; else True.
        """
        if not wait:
            self._connection.out.put({"op": "signal", "pid": pid, "number": int(number), "run_id": run_id})
            return True
        return bool(self._connection.ask("signal", timeout_s=3.0, pid=pid, number=int(number), run_id=run_id)[0]["ok"])

    def is_alive(self, pid: int) -> bool:
        """True if there is such a process on the node."""
        return bool(self._connection.ask("alive", timeout_s=3.0, pid=pid)[0]["ok"])

    def ends(self) -> list[StartedEnd]:
        """The commands that have ended, each once.

        What a command has written in a mirrored folder is here before its end is.
        """
        with self._lock:
            found, self._ends = self._ends, []
            return found

    def kill_all(self) -> None:
        """Kill all that the agent has started."""
        self._connection.ask("kill_all", timeout_s=5.0)

    def adopt(self, run_id: str) -> None:
        """Let the agent take for its own what an engine starts of the run on its node; what is there already is killed."""
        self._connection.ask("adopt", timeout_s=10.0, run_id=run_id)

    def end_run(self, run_id: str) -> int:
        """Kill what is left on the node of a run that has ended; return the number of processes that still live."""
        return int(self._connection.ask("end_run", timeout_s=10.0, run_id=run_id)[0]["left"])

    def answer_rsh(self, number: int, code: int, text: str = "") -> None:
        """End a request of the remote shell."""
        self._connection.out.put({"op": "rsh_done", "number": number, "code": code, "text": text})

    def close(self, wait_s: float = 6.0) -> None:
        """End the agent and all that it has started; harmless the second time."""
        # First: the agent goes as soon as it has answered, and must not count as lost.
        self._connection.is_closing = True
        try:
            # A node that is stuck gets no more time than it takes to send the request.
            self._connection.ask("close", timeout_s=0.1 if self.is_stuck else wait_s)
        except (LinkError, OSError):
            # It did not answer, so it is not waited for a second time when the connection closes.
            wait_s = 0.1
        self._connection.close(wait_s)
        # After the connection, whose filer has put into place what still came.
        if self._replica is not None:
            self._replica.close(self._rank)

    # --- what comes by itself, in order, in a thread of its own

    def _hear(self, header: dict[str, Any], data: bytes) -> None:
        op = header.get("op")
        if op == "file":
            self._file(header, data)
        elif op == "end":
            if header["tag"]:
                self.on_tagged_end(header)
            else:
                with self._lock:
                    self._ends.append(StartedEnd(header["pid"], header["code"], header["time"], header["peak"]))
                # Not under the lock: what is called may ask for `ends`, which takes it.
                self.on_end()
        elif op == "hello":
            # Set before the event: `open` returns as soon as that is set, and its caller reads this.
            self.hello = Hello.from_frame(header)
            self._said_hello.set()
        elif op in ("rsh", "rsh_gone"):
            self.on_rsh(header)
