"""If any process dies or the network is cut, no process remains on a node, and the supervisor learns of it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest

from paceline.remote.link import LinkError, bootstrap_words
from paceline.remote.link.bootstrap import Ends
from paceline.remote.link.connection import AgentConnection
from paceline.remote.wire import frame
from paceline.system import processes
from tests.helpers import start_python, wait_until

#: Seconds without a message after which a link counts as lost, in place of the default of 15 s.
QUICK_S = 12.0
#: A shell command whose child has left its session and its parent. The file `pids` has both pids.
FAMILY = "setsid sh -c 'setsid sleep 600 & echo $! >> pids'; echo $$ >> pids; mv pids started; exec sleep 600"


def start_family(link, folder: Path) -> list[int]:
    """The pids of a command and of its runaway child."""
    link.start(["sh", "-c", FAMILY], env={}, cwd=str(folder), log=str(folder / "log"))
    return wait_for_family(folder)


def wait_for_family(folder: Path) -> list[int]:
    wait_until((folder / "started").exists, "the command")
    return [int(line) for line in (folder / "started").read_text().split()]


def wait_for_end(pids: list[int]) -> None:
    wait_until(lambda: not any(map(processes.is_alive, pids)), f"the end of {pids}")


def test_killed_supervisor_leaves_no_processes_and_files_on_the_node(tmp_path, short_path, library):
    code = f"""
import sys, time
from pathlib import Path
from paceline.remote.link import Link, bootstrap_words
link = Link.open(bootstrap_words(sys.executable), name="node-0", library_dir=Path({str(library)!r}),
                 folder={str(tmp_path / "node")!r}, shared_library=True)
link.make_scratch({str(short_path / "scratch")!r})
link.start(["sh", "-c", {FAMILY!r}], env={{}}, cwd={str(tmp_path)!r}, log={str(tmp_path / "log")!r})
print(link.hello.pid, flush=True)
time.sleep(600)
"""
    supervisor = start_python(code)
    assert supervisor.stdout is not None
    agent = int(supervisor.stdout.readline())
    pids = wait_for_family(tmp_path)
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    wait_for_end([*pids, agent])
    wait_until(lambda: not (short_path / "scratch").exists(), "the end of the scratch folder")


def test_killed_agent_leaves_no_processes_and_its_node_is_reported_lost(open_link, tmp_path, short_path):
    link = open_link()
    link.make_scratch(str(short_path / "scratch"))
    pids = start_family(link, tmp_path)
    os.kill(link.hello.pid, signal.SIGKILL)
    wait_for_end(pids)
    wait_until(lambda: link.lost, "the loss")
    assert link.lost == "node-0: its agent is gone."
    wait_until(lambda: not (short_path / "scratch").exists(), "the end of the scratch folder")
    with pytest.raises(LinkError, match="node-0: its agent is gone"):
        link.run(["true"])


def test_killing_the_parent_process_of_the_agent_ends_the_agent_and_its_workers(open_link, tmp_path):
    link = open_link()
    pids = start_family(link, tmp_path)
    status = Path(f"/proc/{link.hello.pid}/stat").read_text()
    os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_for_end([*pids, link.hello.pid])
    wait_until(lambda: link.lost, "the loss")


@pytest.mark.promise("node-hears-nothing-supervisor-ends")
def test_partitioned_agent_ends_its_processes(open_link, tmp_path):
    """A relay between the two that is stopped passes nothing on and closes nothing, as a pulled cable does."""
    relay = tmp_path / "relay"
    relay.write_text(RELAY)
    words = [sys.executable, str(relay), str(tmp_path / "relay.pid"), *bootstrap_words(sys.executable)]
    link = open_link(words=words, silence_s=QUICK_S)
    link._connection._silence_s = 600  # otherwise this side would end the relay, and the agent with it
    pids = start_family(link, tmp_path)
    stopped = int((tmp_path / "relay.pid").read_text())
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_for_end([*pids, link.hello.pid])
        assert link.lost is None
    finally:
        processes.send(stopped, signal.SIGCONT)
    wait_until(lambda: link.lost, "the loss")


def test_node_is_reported_lost_after_a_timeout_if_its_agent_is_stopped_by_sigstop(open_link, tmp_path):
    link = open_link(silence_s=QUICK_S)
    pids = start_family(link, tmp_path)
    os.kill(link.hello.pid, signal.SIGSTOP)
    assert link.signal(pids[0], 0, wait=False)
    with pytest.raises(LinkError, match=r"no answer to 'free_ports'|nothing heard for 12 s"):
        link.free_ports(1)
    wait_until(lambda: link.lost, "the loss")
    assert link.lost == "node-0: nothing heard for 12 s."
    # After SIGCONT, neither the agent nor any of its processes is left.
    processes.send(link.hello.pid, signal.SIGCONT)
    wait_for_end([*pids, link.hello.pid])


def test_lost_node_error_has_the_last_line_of_ssh(open_link, tmp_path):
    """`ssh` ends with 255 and a line on standard error once it notices."""
    text = f"({shlex.join(bootstrap_words(sys.executable))}) 3<&0 <&3; echo 'Timeout, server b not responding.' >&2; exit 255"
    link = open_link(words=["sh", "-c", text])
    os.kill(link.hello.pid, signal.SIGKILL)
    wait_until(lambda: link.lost, "the loss")
    assert link.lost == "node-0: its agent is gone (exit code 255): Timeout, server b not responding."


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame({"op": "end"}, b"abc")[:-1], "its agent is gone in the middle of a frame."),
        (b"Connection reset by a proxy\n", "what came is not an agent's: a header of "),
    ],
)
def test_truncated_frame_means_a_lost_node(data, why):
    mine, theirs = socket.socketpair()
    fd = mine.detach()
    heard: list = []
    talk = AgentConnection(Ends(fd, fd), "node-0", 300, lambda header, content: heard.append(header))
    talk.start(b"")
    pending = talk.requests.new()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError, match=why):
            talk.wait_for(pending, "anything", 60)
    talk.close(5)
    assert heard == []


def test_agent_and_its_processes_keep_running_after_sigterm_sigint_or_sighup_to_the_agent(open_link, tmp_path):
    """Slurm tells a whole step before its time is up; what to do then is the supervisor's to say."""
    link = open_link()
    pids = start_family(link, tmp_path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(link.hello.pid, number)
    assert link.run(["echo", "here"]).stdout == b"here\n"
    assert all(map(processes.is_alive, pids))


RELAY = """
import os, select, subprocess, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
agent = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
ways = {0: agent.stdin.fileno(), agent.stdout.fileno(): 1}
while ways:
    for fd in select.select(list(ways), [], [])[0]:
        data = os.read(fd, 65536)
        if not data:
            sys.exit(0)
        os.write(ways[fd], data)
"""
