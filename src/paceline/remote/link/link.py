"""A link to an agent on a node, with which the supervisor runs commands and transfers files."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.job.plan import Command
from paceline.remote.link.bootstrap import Ends, bootstrap
from paceline.remote.link.connection import AgentConnection
from paceline.remote.link.link_files import LinkFiles
from paceline.remote.link.messages import Hello, LinkError, Pending
from paceline.remote.wire import SILENCE_S, Header


@dataclass(frozen=True)
class CommandEnd:
    """The result of a command of `Link.run`. A `returncode` of 128+n means signal n."""

    returncode: int
    stdout: bytes
    stderr: bytes


class StartedEnd(NamedTuple):
    """The exit of a command of `Link.start`.

    Attributes:
        code: Exit code as in a shell, 128+n for signal n.
        time: Time of the exit in seconds since the epoch.
        peak_bytes: Peak memory of the command.
    """

    pid: int
    code: int
    time: float
    peak_bytes: int


class Link(LinkFiles):
    """A thread-safe link to one agent.

    The methods raise LinkError if the node is lost, and OSError if the agent reports an error.
    """

    hello: Hello

    def __init__(self, ends: Ends, name: str, silence_s: float) -> None:
        super().__init__()
        self.name, self.silence_s = name, silence_s
        self._connection = AgentConnection(ends, name, silence_s, self._hear, self._note_lost)
        self._said_hello = threading.Event()
        self._ends: list[StartedEnd] = []
        #: Guards `_ends`, the exits of commands: a thread of the hub adds them, and the supervisor's thread takes them.
        self._lock = threading.Lock()
        #: Callbacks: `on_rsh` gets each frame of the remote shell, and `on_tagged_end` the exit of each command with a tag.
        self.on_rsh: Callable[[Header], None] = lambda header: None
        self.on_tagged_end: Callable[[Header], None] = lambda header: None
        #: Called after the exit of a command without a tag (`ends` returns these exits), and after the node's loss.
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
        """Open a link over the standard streams of a program such as ssh.

        name: The node's name, for error messages.
        library_dir: The folder that contains the package `paceline`.
        folder: The folder on the node for the library; `~` is the home folder there.
        shared_library: Whether to look for the library at `library_dir` on the node first.
        env: Environment variables of the program; None for this process's variables.
        silence_s: Seconds without a message after which each end of the link considers the other end lost.

        Raises:
            LinkError: The agent does not start; the error has the program's output.
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
        """Open a link over the streams of a Python that `bootstrap_words` started.

        ends: These streams. The other arguments are as for `open`.
        """
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
        # `bootstrap` may have read too many bytes after its last answer. These bytes begin the first frame.
        link.begin(first)
        link.wait_for_hello(ends, timeout_s)
        return link

    def begin(self, first: bytes = b"") -> None:
        """Start to exchange messages. `first`: bytes that were already read."""
        self._connection.start(first)

    def wait_for_hello(self, ends: Ends, timeout_s: float) -> None:
        """Wait until the agent has sent `hello`, the description of its node.

        Raises:
            LinkError: The agent is gone, or sends nothing in time. The link is closed before the error is raised.
        """
        deadline = time.monotonic() + timeout_s
        # Wait in short steps, because the loss of the link does not set this event.
        while not self._said_hello.wait(0.1) and not self.lost and time.monotonic() < deadline:
            pass
        if not self._said_hello.is_set():
            lost = self.lost or f"{self.name}: its agent does not say hello."
            self.close()
            raise LinkError(lost, ends.stderr(), ends.exit_code())

    def _note_lost(self) -> None:
        # Look up `on_end` only now, because `AgentNodes` sets it after the link was opened.
        self.on_end()

    @property
    def lost(self) -> str | None:
        """The reason why this node counts as lost, or None."""
        return self._connection.lost

    @property
    def is_stuck(self) -> bool:
        """Whether a request timed out and nothing has arrived since."""
        return self._connection.is_stuck

    # --- commands on the node

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float = 60.0) -> CommandEnd:
        """Run a short command with the agent's environment variables until its end.

        Raises:
            LinkError: The node is lost, or the command took longer than `timeout_s` and was killed.
        """
        pending = self._connection.requests.new()
        self._connection.out.put({"op": "run", "id": pending.number, "argv": list(argv)}, input)
        try:
            answer, data = self._connection.wait_for(pending, shlex.join(argv), timeout_s)
        except LinkError:
            # This thread no longer waits for the command, so let the agent kill the command.
            self._connection.out.put({"op": "stop", "request": pending.number})
            raise
        # `data` has the command's standard output, followed by its standard error.
        return CommandEnd(answer["code"], data[: answer["out"]], data[answer["out"] :])

    def call(self, function: str, given: Any, *, timeout_s: float = 20.0) -> Any:
        """Call the library's function `module:name` in the agent's process.

        `given` and the result are JSON values. The function may block. It must not start processes, because the agent
        would report their exits to the supervisor.
        """
        answer, _ = self._connection.ask("call", timeout_s=timeout_s, function=function, given=given)
        return answer["found"]

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, log: str, exact: bool = False, tag: str = ""
    ) -> int:
        """Start a command on the node. Return its pid.

        log: The file on the node to which the command writes.
        env, exact: The command gets the variables `env`. Unless `exact`, it gets the agent's other variables too.
        tag: With a tag, the callback `on_tagged_end` gets the exit of the command. With "", `ends` returns the exit.
        """
        return self._start(argv, env, cwd=cwd, log=log, exact=exact, tag=tag)[0]

    def start_worker(self, command: Command, env: Mapping[str, str], cwd: str) -> tuple[int, str]:
        """Start a worker, or an idle process that forks later workers.

        Returns:
            The pid, and "". If an idle process could not fork the worker, the second value is the reason.
        """
        spare = {"spare": command.spare, "is_spare": command.is_spare}
        return self._start(command.argv, env, cwd=cwd, log=str(command.log), exact=True, **spare)

    def _start(self, argv: Sequence[str], env: Mapping[str, str], **values: object) -> tuple[int, str]:
        request = {"argv": list(argv), "env": dict(env), "tag": "", "spare": "", "is_spare": False, **values}
        answer, _ = self._connection.ask("start", b"", timeout_s=20.0, **request)
        return int(answer["pid"]), str(answer["cold"])

    def send(self, op: str, values: Mapping[str, object]) -> Pending:
        """Send a request without waiting. Return the pending request, for `answer`."""
        return self._connection.send(op, values)

    def answer(self, pending: Pending, op: str, timeout_s: float) -> Header:
        """Wait for the answer to a request of `send`, and return its header."""
        return self._connection.answer(pending, op, timeout_s)[0]

    def all_answers(self, *asked: tuple[str, Mapping[str, object], bytes], timeout_s: float = 120.0) -> list[Header]:
        """Send requests, given as (name, values, data). Return the answers' headers.

        Raises:
            OSError: The error of the first request that failed. The other requests were sent too.
        """
        sent = [(op, self._connection.send(op, values, data)) for op, values, data in asked]
        return [self.answer(pending, op, timeout_s) for op, pending in sent]

    def signal(self, pid: int, number: int, *, run_id: str = "", wait: bool = True) -> bool:
        """Send a signal to a descendant of the agent. Return False if it is gone.

        run_id: The id of a run whose processes may be signaled too, even if an engine has started them.
        wait: Wait for the agent's answer; otherwise return True immediately.
        """
        if not wait:
            self.signal_all([pid], [number], run_id=run_id)
            return True
        asked = self.send("signal", {"pids": [pid], "numbers": [int(number)], "run_id": run_id})
        return bool(self.answer(asked, "signal", 3.0)["ok"])

    def signal_all(self, pids: Sequence[int], numbers: Sequence[int], *, run_id: str) -> None:
        """Send signals, as `signal` does, to several processes without waiting."""
        numbers = list(map(int, numbers))
        self._connection.out.put({"op": "signal", "pids": list(pids), "numbers": numbers, "run_id": run_id})

    def is_alive(self, pid: int) -> bool:
        """Return whether a process exists on the node."""
        return bool(self._connection.ask("alive", timeout_s=3.0, pid=pid)[0]["ok"])

    def ends(self) -> list[StartedEnd]:
        """Return the ended commands whose logs have become complete since the last call."""
        with self._lock:
            found, self._ends = self._ends, []
            return found

    def kill_session(self, pid: int) -> None:
        """Kill the processes that remain in the session of an ended command."""
        self._connection.ask("kill_session", timeout_s=5.0, pid=pid)

    def adopt(self, run_id: str) -> None:
        """Kill a run's processes on the node, now and again when the agent ends."""
        self._connection.ask("adopt", timeout_s=10.0, run_id=run_id)

    def end_run(self, run_id: str) -> int:
        """Kill leftover processes of an ended run on the node. Return how many survive."""
        return int(self._connection.ask("end_run", timeout_s=10.0, run_id=run_id)[0]["left"])

    def answer_rsh(self, number: int, code: int, text: str = "") -> None:
        """Answer a request of `rsh.py` with its command's exit code and error text."""
        self._connection.out.put({"op": "rsh_done", "number": number, "code": code, "text": text})

    def begin_close(self) -> Pending:
        """Send the agent the request to exit. Return the request, for `close`."""
        # Set `is_closing` before sending the request: the agent exits right after its answer, and this is no loss of the node.
        self._connection.is_closing = True
        return self._connection.send("close", {})

    def close(self, wait_s: float = 6.0, *, asked: Pending | None = None) -> None:
        """End the agent and all processes that it has started. Idempotent.

        asked: The result of `begin_close`, if it was called.
        """
        try:
            # Don't wait long for a stuck node, because 0.1 s suffice to send the request.
            self._connection.answer(asked or self.begin_close(), "close", 0.1 if self.is_stuck else wait_s)
        except (LinkError, OSError):
            # The agent did not answer, so close the connection without another long wait for the agent.
            wait_s = 0.1
        self._connection.close(wait_s)
        # Close the replica (the local copy) last: until the connection is closed, received files are written into it.
        if self._replica is not None:
            self._replica.close(self._rank)

    # --- received frames, handled in order in the filer's thread

    def _hear(self, header: Header, data: bytes) -> None:
        op = header.get("op")
        if op == "file":
            self._file(header, data)
        elif op == "end":
            if header["tag"]:
                self.on_tagged_end(header)
            else:
                with self._lock:
                    self._ends.append(StartedEnd(header["pid"], header["code"], header["time"], header["peak"]))
                # Release the lock before this call: the callback may call `ends`, which takes the lock.
                self.on_end()
        elif op == "hello":
            # Set `hello` before the event: `open` wakes up on the event, and its caller reads `hello` at once.
            self.hello = Hello.from_frame(header)
            self._said_hello.set()
        elif op in ("rsh", "rsh_gone"):
            self.on_rsh(header)
