"""The supervisor's part in the remote shell between nodes (`paceline.agent.rsh`)."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.agent.rsh import SOCKET_VARIABLE
from paceline.errors import TargetError
from paceline.plan import Node
from paceline.targets.agents.link import Link


def make_remote_shell(link: Link, scratch: str, socket: str, python: str) -> tuple[str, ...]:
    """Put a program on a node that takes `HOST COMMAND...`, and give what starts it: PRRTE knows no quotes, so there is no
    space in its path. socket: where the node's agent hears it."""
    path = f"{scratch}/rsh"
    command = shlex.join([python, f"{link.hello.library}/paceline/agent/rsh.py"])
    text = f'#!/bin/sh\n{SOCKET_VARIABLE}={shlex.quote(socket)}\nexport {SOCKET_VARIABLE}\nexec {command} "$@"\n'
    link.put_file(path, text.encode(), 0o700)
    return ("/bin/sh", path)


class RshCalls:
    """Starts what a node asks for on another, and tells it how that ended. log: where its output goes, on each node."""

    def __init__(self, links: Sequence[Link], nodes: Sequence[Node], environment: Mapping[str, str], log: str) -> None:
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
        link = self._find(host)
        if link is None:
            names = ", ".join(node.name for node in self._nodes)
            asking.answer_rsh(number, 255, f"{host!r} is no node of this run; its nodes are {names}.")
            return
        self._calls[tag] = (asking, number, link, 0)
        try:
            pid = link.start(
                ["/bin/sh", "-c", header["command"]],
                env=self._environment,
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

    def _find(self, host: str) -> Link | None:
        for node, link in zip(self._nodes, self._links, strict=True):
            if host in (node.name, node.address):
                return link
        for link in self._links:
            if host in (link.hello.host, link.hello.host.partition(".")[0]):
                return link
        return None
