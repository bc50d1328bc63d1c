"""The supervisor's side of the remote shell between nodes (`paceline.remote.agent.rsh`)."""

from __future__ import annotations

import itertools
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import TargetError
from paceline.job.plan import REMOTE_SHELL_PYTHON, Command, Node
from paceline.remote.agent.rsh import SOCKET_VARIABLE
from paceline.remote.link.link import Link
from paceline.remote.wire import Header

#: Seconds that Open MPI's daemon on a node may take to end after mpirun has ended.
_ENDING_S = 2.0


def make_remote_shell(link: Link, scratch: str, socket: str, python: str) -> tuple[str, ...]:
    """Install a remote shell on a node.

    Return its command line, to which mpirun adds the words `HOST COMMAND...`. Paths in the command line must have no
    space, since mpirun's launcher PRRTE does not support quotes.

    scratch: The temporary folder on the node, in which the script `rsh` is created.
    socket: Path of the agent's socket on the node.
    python: The interpreter, unless the variable `REMOTE_SHELL_PYTHON` names another.
    """
    path = f"{scratch}/rsh"
    program = shlex.quote(f"{link.hello.library}/paceline/remote/agent/rsh.py")
    text = (
        f"#!/bin/sh\n{SOCKET_VARIABLE}={shlex.quote(socket)}\nexport {SOCKET_VARIABLE}\n"
        f'test -n "${REMOTE_SHELL_PYTHON}" || {REMOTE_SHELL_PYTHON}={shlex.quote(python)}\n'
        f'exec "${REMOTE_SHELL_PYTHON}" {program} "$@"\n'
    )
    link.put_file(path, text.encode(), 0o700)
    return ("/bin/sh", path)


class _Call:
    """A command that a program on one node runs on another node."""

    def __init__(self, asking: Link, number: int) -> None:
        self.asking, self.number = asking, number
        self.link: Link | None = None
        self.pid = 0
        #: Whether the requesting program has ended. If so, the command gets SIGHUP once the command's pid is known.
        self.is_hung_up = False


class RshCalls:
    """A server that runs commands on nodes when other nodes request it.

    log: Path of a file on each node, to which the commands on this node write their output.
    shells: Node rank -> the shell and environment for command lines on that node (`Command.shells`).

        link of the requesting node   frame "rsh"       -> record the call; a thread starts its command on the other node
                                      frame "rsh_gone"  -> a thread sends SIGHUP to the command
        link of the other node        frame "end"       -> send the exit code to the requesting node

    Each link has a thread, so these frames arrive in any order. A command may end before the answer to its start
    arrives. The requesting program may be killed before that answer arrives. The thread that removes a call from
    `_calls`, under the lock, also finishes the call.
    """

    def __init__(self, links: Sequence[Link], nodes: Sequence[Node], environment: Mapping[str, str], log: str) -> None:
        self.shells: Mapping[int, Command] = {}
        self._links, self._nodes = links, nodes
        self._environment, self._log = environment, log
        self._lock = threading.Lock()
        #: Tag of a call -> the call. A tag combines the node that requests the call with the number of its request.
        self._calls: dict[str, _Call] = {}
        for link in links:
            link.on_rsh = self._hear_from(link)
            link.on_tagged_end = self._ended

    def _hear_from(self, asking: Link) -> Callable[[Header], None]:
        def hear(header: Header) -> None:
            tag = f"{asking.name} {header['number']}"
            if header["op"] == "rsh":
                # Record the call first: the thread for the end of the requesting program may run before `_start`.
                with self._lock:
                    self._calls[tag] = _Call(asking, header["number"])
            work, given = (self._hang_up, (tag,)) if header["op"] == "rsh_gone" else (self._start, (tag, header))
            # Use another thread, because `work` waits for an answer, and this thread may have to receive that answer.
            threading.Thread(target=work, args=given, name="paceline-rsh", daemon=True).start()

        return hear

    def _start(self, tag: str, header: Header) -> None:
        call = self._calls[tag]
        host = header["host"].rpartition("@")[2]
        rank = self._find(host)
        if rank is None:
            names = ", ".join(node.name for node in self._nodes)
            self._answer(tag, 255, f"{host!r} is not a node of this run; its nodes are {names}.")
            return
        link, shell = self._links[rank], self.shells.get(rank)
        try:
            pid = link.start(
                [*(shell.argv if shell else ("/bin/sh", "-c")), header["command"]],
                env={**self._environment, **(shell.environment if shell else {})},
                cwd="",
                log=self._log,
                tag=tag,
            )
        except (OSError, TargetError) as error:
            self._answer(tag, 255, f"{host}: {error}")
            return
        with self._lock:
            call.link, call.pid = link, pid
            # The call is missing from the table if its command has ended already.
            late = self._calls.pop(tag, None) if call.is_hung_up else None
        if late is not None:
            _hang_up(link, pid)

    def _hang_up(self, tag: str) -> None:
        if self.shells:
            # The end of mpirun's container also ends its commands. Wait until they have ended: sending them a signal would fail.
            deadline = time.monotonic() + _ENDING_S
            while tag in self._calls and time.monotonic() < deadline:
                time.sleep(0.02)
        with self._lock:
            call = self._calls.get(tag)
            if call is None:
                return
            call.is_hung_up = True
            if call.link is None:
                return  # `_start` sends the SIGHUP when it knows the pid
            del self._calls[tag]
        _hang_up(call.link, call.pid)

    def _ended(self, header: Header) -> None:
        self._answer(header["tag"], header["code"])

    def _answer(self, tag: str, code: int, text: str = "") -> None:
        with self._lock:
            call = self._calls.pop(tag, None)
        if call is not None:
            call.asking.answer_rsh(call.number, code, text)

    def _find(self, host: str) -> int | None:
        own = ((link.hello.host, link.hello.host.partition(".")[0]) for link in self._links)
        names = itertools.chain(enumerate((node.name, node.address) for node in self._nodes), enumerate(own))
        return next((rank for rank, of_node in names if host in of_node), None)


def _hang_up(link: Link, pid: int) -> None:
    try:
        link.signal(pid, signal.SIGHUP)
    except (OSError, TargetError):
        pass  # the node is lost, and so its command has ended
