"""The guardian: the agent's parent process, which cleans up when the agent ends in any way.

Guardian and agent watch each other through a socket pair, which the kernel closes when one of them ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys

from paceline.system import processes


def be_agent(read_fd: int, write_fd: int, settings: dict[str, object]) -> None:
    """Fork this process into a guardian and an agent. Never return.

    read_fd, write_fd: The link to the supervisor, which only the agent uses.
    settings: `silence_s`: seconds after which a silent supervisor counts as lost. `library`: the folder with the package
        `paceline`. `folder`: Paceline's own folder on this node.
    """
    # Remove the run's variables from the environment. Otherwise this process would count as a process of the run.
    for name in processes.RUN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(processes.with_home(os.environ))
    # Drop signals of an engine such as Slurm: the agent ends with its link. Don't use SIG_IGN, which commands inherit.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    processes.become_subreaper()
    # Fork now: the guardian and the agent both need the handlers above, and no other thread runs yet.
    guardians, agents = socket.socketpair()
    agent = os.fork()
    if agent == 0:
        guardians.close()
        code = 1
        try:
            from paceline.remote.agent.agent import serve

            processes.become_subreaper()
            code = serve(read_fd, write_fd, agents, settings)
        except BaseException:
            import traceback

            # `os._exit` prints no traceback, so print it here. The supervisor quotes the end of standard error.
            traceback.print_exc()
        finally:
            os._exit(code)
    agents.close()
    _let_go(read_fd, write_fd)
    os._exit(_guard(agent, guardians))


def _guard(agent: int, agents: socket.socket) -> int:
    """Wait until the process `agent` ends, then kill its processes and remove its folders."""
    heard = b""
    while True:
        data = agents.recv(1 << 16)
        if not data:
            break
        heard += data
    # The agent has closed its socket, but its process may still run, so kill it.
    processes.send(agent, signal.SIGKILL)
    processes.kill_descendants(os.getpid())
    for path in heard.split(b"\0")[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    return 0


def _let_go(*fds: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    for fd in (null, *fds):
        if fd > 2:
            os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
