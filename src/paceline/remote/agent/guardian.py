"""The agent's parent: when the agent is gone, however it went, nothing of what it has started or made in passing stays.

The two watch each other through a pair of sockets, which the kernel closes with their processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from typing import Any

from paceline.system import processes


def be_agent(read_fd: int, write_fd: int, settings: dict[str, Any]) -> None:
    """Part into a guardian and an agent on this link; never returns.

    settings: `silence_s`, `library`, `folder`.
    """
    # Of whoever started this: not the run's own, by which what a killed supervisor has left is found and spared.
    for name in processes.RUN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(processes.with_home(os.environ))
    # What ends the agent is the link's end alone. An engine signals all that it has started (srun before a time limit),
    # and workers then have their grace period. Handlers, for what is ignored stays ignored in commands.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    processes.become_subreaper()
    # After the handlers, which the fork hands on; before any thread is there, for a fork copies only the one that forks.
    guardians, agents = socket.socketpair()
    agent = os.fork()
    if agent == 0:
        guardians.close()
        code = 1
        try:
            from paceline.remote.agent.agent import Agent

            processes.become_subreaper()
            code = Agent(read_fd, write_fd, agents, settings).run()
        except BaseException:
            # To standard error, which the link's other end keeps the last of. `_exit` skips what the parent has registered.
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    agents.close()
    _let_go(read_fd, write_fd)
    os._exit(_guard(agent, guardians))


def _guard(agent: int, agents: socket.socket) -> int:
    """Hear from the agent which files to remove, until it is gone; then clean up. The exit code of the process."""
    heard = b""
    while True:
        data = agents.recv(1 << 16)
        if not data:
            break
        heard += data
    # Closed, but perhaps not yet ended.
    processes.send(agent, signal.SIGKILL)
    processes.kill_descendants(os.getpid())
    for path in heard.split(b"\0")[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    return 0


def _let_go(*fds: int) -> None:
    """Leave the link to the agent, so that both sides see its end."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    for fd in (null, *fds):
        if fd > 2:
            os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
