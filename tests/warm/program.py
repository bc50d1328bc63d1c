"""Load libraries, then fork a process for each script that a client requests at a socket (`hand_over.ask`).

The program ends at the end of its standard input, and so with the process that started it.

    client                      this program                     fork
    request, descriptors  ──>   fork ─────────────────────────>  runs the script with these descriptors
                          <──   its pid
    closes the connection ──>   kills the fork, with its group
                          <──   its exit code, at its end
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import select
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

# Import from this folder, because the package would load modules that only clients need.
from as_main import run
from hiding import Hiding


def serve(path: str) -> dict[str, Any]:
    """Fork for each request until standard input ends. Returns in each fork, with the request."""
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd of a fork -> its pid, the connection to its client
    listener = listen(path)
    try:
        while True:
            connections = {connection.fileno(): pid for pid, connection in running.values()}
            ready: list[Any] = select.select([0, listener, *running, *connections], [], [])[0]
            if 0 in ready:
                break
            for fd in set(ready) & set(connections):
                # The client has closed the connection or ended, so kill its fork.
                kill(connections[fd])
            for fd in set(ready) & set(running):
                pid, connection = running.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                send_number(connection, os.waitstatus_to_exitcode(status))
                connection.close()
            if listener in ready:
                connection, _ = listener.accept()
                fds = receive(connection)
                if not fds:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for open_socket in (listener, connection, *(client for _, client in running.values())):
                        open_socket.close()
                    # The forks in `running` are children of the parent process, and not of this fork.
                    running.clear()
                    os.setpgid(0, 0)
                    return take_over(fds)
                # Both processes call setpgid, because a client may signal the group as soon as it has the pid.
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)
                for fd in fds:
                    os.close(fd)
                running[os.pidfd_open(pid)] = (pid, connection)
                send_number(connection, pid)
    finally:
        for pid, _ in running.values():
            kill(pid)
            os.waitpid(pid, 0)
    # Exit at once, because the interpreter would free every loaded object first.
    os._exit(0)


def listen(path: str) -> socket.socket:
    """Return a listening socket at this path."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The file gets its final name once the socket listens, so a client that sees the name can connect.
    listener.bind(f"{path}~")
    listener.listen(64)
    os.rename(f"{path}~", path)
    return listener


def receive(connection: socket.socket) -> list[int]:
    """Return the descriptors of a request: its file first, then the script's own.

    The list is empty if the client was killed before it sent them, as mpirun kills the other ranks.
    """
    try:
        return socket.recv_fds(connection, 64, 253)[1]
    except ConnectionError:
        return []


def take_over(fds: list[int]) -> dict[str, Any]:
    """Read the request in a fork, give the script's descriptors their numbers, and close all others."""
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        request: dict[str, Any] = marshal.load(file)
    numbers = request["fds"]
    free = max(*fds, *numbers) + 1
    moved = [os.dup2(fd, free + place) for place, fd in enumerate(fds[1:])]
    os.closerange(0, free)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    return request


def send_number(connection: socket.socket, number: int) -> None:
    """Send a pid or an exit code, unless the client has ended."""
    with contextlib.suppress(OSError):
        connection.send(str(number).encode())


def kill(pid: int) -> None:
    """Kill a fork and its process group."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def detach() -> None:
    """Continue in a process that is no descendant of the test, and print its pid."""
    if pid := os.fork():
        print(pid, flush=True)
        os._exit(0)
    # The reader of the pid waits for the end of standard output, so close it.
    os.dup2(2, 1)


if __name__ == "__main__":
    if sys.argv[-1] == "--apart":
        sys.argv.pop()
        detach()
    # Leave the parent's group: a signal to it, as from `timeout`, would end this process before it has killed its forks.
    os.setsid()
    # A fork replaces this entry by the folder of its script. The script must not find modules named `as_main` and
    # `hiding`.
    sys.path[0] = str(Path(__file__).parents[2])
    for name in ("as_main", "hiding"):
        del sys.modules[name]
    hiding = Hiding()
    with warnings.catch_warnings():
        # Ignore only the warnings of these imports, because each script sets its own filters.
        warnings.simplefilter("ignore")
        for name in sys.argv[2:]:
            hiding.load(name)
    # Garbage collections in forks skip frozen objects. Touching their memory pages would copy the pages.
    gc.collect()
    gc.freeze()
    # As in pytest's processes (tests/conftest.py): garbage collection took a fourth of the CPU time of all ranks.
    gc.set_threshold(10_000, 50, 1_000)
    request = serve(sys.argv[1])
    # Each process needs its own seed, as if it had loaded numpy itself.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if request["hides"]:
        hiding.hide()
    run(request)
