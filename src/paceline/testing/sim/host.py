"""Simulate some hundred nodes in this process: `python -m paceline.testing.sim.host JSON`.

The supervisor passes the file descriptors of the nodes' connections over a socket, which is the standard input. When
all connections have ended, the process removes the folders of the nodes' simulated disks, and exits.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys

from paceline.system.processes import raise_open_files
from paceline.testing.sim.faults import BATCH, NodeBehavior
from paceline.testing.sim.node import Loop, SimNode


def main(argv: list[str]) -> int:
    settings = json.loads(argv[0])
    # Ignore signals to the supervisor's process group, because the simulated nodes must outlive the supervisor.
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda *_: None)
    raise_open_files()
    loop, poll = Loop(), select.epoll()
    nodes: dict[int, SimNode] = {}
    disk = settings["disk"]
    try:
        for number, sock in _connections(settings["numbers"]):
            fd = sock.fileno()
            sock.setblocking(False)
            folder = f"{disk}/{number}" if disk else None
            if folder:
                os.makedirs(folder)
            nodes[fd] = SimNode(
                number,
                sock,
                loop,
                NodeBehavior(**settings["behaviors"][str(number)]),
                seed=settings["seed"],
                cores=settings["cores"],
                folder=folder,
                silence_s=settings["silence_s"],
                on_want=functools.partial(_want, poll, fd),
            )
            poll.register(fd, select.EPOLLIN)
        gc.freeze()
        _serve(loop, poll, nodes)
    finally:
        if disk:
            for number in settings["numbers"]:
                shutil.rmtree(f"{disk}/{number}", ignore_errors=True)
    return 0


def _serve(loop: Loop, poll: select.epoll, nodes: dict[int, SimNode]) -> None:
    while True:
        left_s = loop.work_off()
        # Drop ended nodes. Don't unregister their descriptors: the descriptors are closed, so epoll has dropped them.
        for fd in [fd for fd, node in nodes.items() if node.is_over]:
            del nodes[fd]
        if not nodes:
            return
        for fd, events in poll.poll(left_s, 1024):
            node = nodes[fd]
            if events & select.EPOLLOUT:
                node.flush()
            if events & ~select.EPOLLOUT and not node.is_over:
                node.receive()


def _want(poll: select.epoll, fd: int, wants: bool) -> None:
    poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wants else 0))


def _connections(numbers: list[int]) -> list[tuple[int, socket.socket]]:
    found: list[socket.socket] = []
    with socket.socket(fileno=0) as control:
        while len(found) < len(numbers):
            _, fds, _, _ = socket.recv_fds(control, 16, BATCH)
            if not fds:
                raise SystemExit("the supervisor is gone")
            found += [socket.socket(fileno=fd) for fd in fds]
    return list(zip(numbers, found, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
