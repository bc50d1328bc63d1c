"""The supervisor's part in the remote shell between nodes (`paceline.remote.agent.rsh`)."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import TargetError
from paceline.job.plan import REMOTE_SHELL_PYTHON, Command, Node
from paceline.remote.agent.rsh import SOCKET_VARIABLE
from paceline.remote.link.link import Link

#: How long Open MPI's part on a node may take to end after its mpirun.
_ENDING_S = 2.0


def make_remote_shell(link: Link, scratch: str, socket: str, python: str) -> tuple[str, ...]:
    """Put a program on a node that takes `HOST COMMAND...`, and give what starts it: PRRTE knows no quotes, so there is no
    space in its path. socket: where the node's agent hears it. python: what runs it, unless `REMOTE_SHELL_PYTHON` names
    another."""
    path = f"{scratch}/rsh"
    program = shlex.quote(f"{link.hello.library}/paceline/remote/agent/rsh.py")
    text = (
        f"#!/bin/sh\n{SOCKET_VARIABLE}={shlex.quote(socket)}\nexport {SOCKET_VARIABLE}\n"
        f'test -n "${REMOTE_SHELL_PYTHON}" || {REMOTE_SHELL_PYTHON}={shlex.quote(python)}\n'
        f'exec "${REMOTE_SHELL_PYTHON}" {program} "$@"\n'
    )
    link.put_file(path, text.encode(), 0o700)
    return ("/bin/sh", path)


class RshCalls:
    """Starts what a node asks for on another, and tells it how that ended. log: where its output goes, on each node.

    shells: node rank -> what takes the command line there, and its environment (`Command.shells`).
    """

    def __init__(self, links: Sequence[Link], nodes: Sequence[Node], environment: Mapping[str, str], log: str) -> None:
        self.shells: Mapping[int, Command] = {}
        self._links, self._nodes = links, nodes
        self._environment, self._log = environment, log
        #: tag -> who asked, the number of the request, and where it runs
        self._calls: dict[str, tuple[Link, int, Link, int]] = {}
        for link in links:
            link.on_rsh = self._hear_from(link)
            link.on_tagged_end = self._ended

    def _hear_from(self, asking: Link) -> Callable[[dict[str, Any]], None]:
        def hear(header: dict[str, Any]) -> None:
            # In a thread: the answer comes to the one that calls this.
            threading.Thread(target=self._call, args=(asking, header), name="paceline-rsh", daemon=True).start()

        return hear

    def _call(self, asking: Link, header: dict[str, Any]) -> None:
        number, tag = header["number"], f"{asking.name} {header['number']}"
        if header["op"] == "rsh_gone":
            self._hang_up(tag)
            return
        host = header["host"].rpartition("@")[2]
        rank = self._find(host)
        if rank is None:
            names = ", ".join(node.name for node in self._nodes)
            asking.answer_rsh(number, 255, f"{host!r} is no node of this run; its nodes are {names}.")
            return
        link, shell = self._links[rank], self.shells.get(rank)
        self._calls[tag] = (asking, number, link, 0)
        try:
            pid = link.start(
                [*(shell.argv if shell else ("/bin/sh", "-c")), header["command"]],
                env={**self._environment, **(shell.environment if shell else {})},
                defaults={},
                cwd="",
                log=self._log,
                tag=tag,
            )
        except (OSError, TargetError) as error:
            self._calls.pop(tag, None)
            asking.answer_rsh(number, 255, f"{host}: {error}")
            return
        if tag in self._calls:
            self._calls[tag] = (asking, number, link, pid)

    def _hang_up(self, tag: str) -> None:
        """The asking program was killed: what it has asked for gets what ssh's would, a hang-up."""
        if self.shells:
            # Or it has ended with mpirun's container, and what it has asked for is about to: a container that is being
            # removed can't take a signal.
            deadline = time.monotonic() + _ENDING_S
            while tag in self._calls and time.monotonic() < deadline:
                time.sleep(0.02)
        _, _, link, pid = self._calls.pop(tag, (None, 0, None, 0))
        if link is not None and pid:
            try:
                link.signal(pid, signal.SIGHUP)
            except (OSError, TargetError):
                pass  # it is gone with its node

    def _ended(self, header: dict[str, Any]) -> None:
        if call := self._calls.pop(header["tag"], None):
            asking, number, _, _ = call
            asking.answer_rsh(number, header["code"])

    def _find(self, host: str) -> int | None:
        """The node's rank."""
        for rank, node in enumerate(self._nodes):
            if host in (node.name, node.address):
                return rank
        for rank, link in enumerate(self._links):
            if host in (link.hello.host, link.hello.host.partition(".")[0]):
                return rank
        return None
