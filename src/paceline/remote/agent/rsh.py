"""A remote shell between a run's nodes that needs no ssh: requests go through the supervisor.

    mpirun, node 0 ── rsh.py HOST COMMAND... ── socket ── agent 0 ── link ── supervisor ── link ── agent of HOST: sh -c

Run as a program, this file takes a host and a command like ssh, and exits with the command's exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.remote.agent.send_queue import SendQueue

SOCKET_VARIABLE = "PACELINE_AGENT_SOCKET"


class Relay:
    """A forwarder of `rsh.py`'s requests (commands for other nodes) to the supervisor."""

    def __init__(self, out: SendQueue) -> None:
        self._out = out
        self.path = ""
        self._listener: socket.socket | None = None
        #: File descriptor -> (number of the request, socket of the requesting `rsh.py`, bytes received so far).
        self._asking: dict[int, tuple[int, socket.socket, bytes]] = {}
        self._count = 0

    def listen(self, path: str) -> None:
        if self._listener is None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen(64)
            self._listener, self.path = listener, path

    def fds(self) -> list[int]:
        """Return the file descriptors to poll for requests."""
        return [*([self._listener.fileno()] if self._listener else []), *self._asking]

    def look(self, ready: set[int]) -> None:
        """Accept connections of `rsh.py`, and read requests, at the `ready` file descriptors."""
        if self._listener is not None and self._listener.fileno() in ready:
            asking, _ = self._listener.accept()
            self._count += 1
            self._asking[asking.fileno()] = (self._count, asking, b"")
            return
        for fd in ready & set(self._asking):
            self._hear(fd)

    def answer(self, number: int, code: int, text: str) -> None:
        """Send `rsh.py` the command's exit code, and a text for its standard error."""
        for fd, (mine, asking, _) in list(self._asking.items()):
            if mine == number:
                del self._asking[fd]
                # Ignore errors, because the `rsh.py` that sent the request may have been killed before this answer.
                with contextlib.suppress(OSError), asking:
                    asking.sendall(json.dumps({"code": code, "text": text}).encode() + b"\n")

    def _hear(self, fd: int) -> None:
        number, asking, heard = self._asking[fd]
        try:
            data = asking.recv(1 << 16)
        except OSError:
            data = b""
        # `rsh.py` closes its socket only after it has the answer. So if data ends before the answer, `rsh.py` was killed.
        if not data:
            del self._asking[fd]
            asking.close()
            self._out.put({"op": "rsh_gone", "number": number})
            return
        heard += data
        self._asking[fd] = (number, asking, heard)
        if heard.endswith(b"\n"):
            try:
                request = json.loads(heard)
                asked = {"host": str(request["host"]), "command": str(request["command"])}
            except (ValueError, KeyError, TypeError):
                self.answer(number, 255, "that is not a request of rsh.py")
                return
            self._out.put({"op": "rsh", "number": number, **asked})


def main(argv: list[str]) -> int:
    """Run the command of `rsh.py HOST COMMAND...` on the host. Return its exit code.

    As with ssh, the words of the command are joined by spaces, and a shell on the host parses the text.
    """
    if len(argv) < 2:
        print("usage: rsh.py HOST COMMAND...", file=sys.stderr)
        return 255
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        print(
            f"rsh.py: {SOCKET_VARIABLE} is not set: this is for processes that an agent has started.", file=sys.stderr
        )
        return 255
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(path)
            agent.sendall(json.dumps({"host": argv[0], "command": " ".join(argv[1:])}).encode() + b"\n")
            heard = b""
            while not heard.endswith(b"\n"):
                data = agent.recv(1 << 16)
                if not data:
                    print("rsh.py: the agent of this node is gone.", file=sys.stderr)
                    return 255
                heard += data
    except OSError as error:
        print(f"rsh.py: the agent of this node can't be reached: {error}", file=sys.stderr)
        return 255
    answer: dict[str, Any] = json.loads(heard)
    if answer["text"]:
        print(answer["text"], file=sys.stderr)
    return int(answer["code"])


if __name__ == "__main__":
    # Python puts this file's folder first on sys.path, so no module in this folder may have the name of another module.
    sys.exit(main(sys.argv[1:]))
