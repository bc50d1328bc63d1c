"""A worker's connection to a PMIx server, which is this test: how long it stays open."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from tests.helpers import wait_until

MAIN = Path(paceline.__file__).parent / "worker/__main__.py"
CONNECT = """
import os, socket, sys, time
host, port = os.environ["PMIX_SERVER_URI4"].rpartition("/")[2].split(":")
server = socket.create_connection((host, int(port)))
server.sendall(b"hello")
assert server.recv(10) == b"welcome"
"""


class Server:
    """Takes one connection. top: folder of the run."""

    def __init__(self, top: Path) -> None:
        self.attempt = top / "attempts/1"
        self.attempt.mkdir(parents=True)
        self._top = top
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []

    def start(self, script: str) -> socket.socket:
        """The connection of rank 0 of two, once both have spoken."""
        (self._top / "train.py").write_text(CONNECT + script)
        slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_GTIDS": "0"}
        pmix = {
            "PMIX_RANK": "0",
            "PMIX_SERVER_URI4": f"pmix-server.7;tcp4://127.0.0.1:{self._listener.getsockname()[1]}",
        }
        run = {
            "PACELINE_RUN_DIR": str(self._top),
            "PACELINE_ATTEMPT": "1",
            "PACELINE_WORLD_SIZE": "2",
            "WORLD_SIZE": "2",
        }
        process = subprocess.Popen(
            [sys.executable, str(MAIN), "--srun", "--", "train.py"],
            cwd=self._top,
            env={**os.environ, "PYTHONPATH": str(MAIN.parents[2]), **slurm, **pmix, **run},
        )
        self._processes.append(process)
        self._listener.settimeout(120)
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        connection.settimeout(120)
        assert connection.recv(10) == b"hello"
        connection.sendall(b"welcome")
        return connection

    def close(self) -> None:
        for connection in (self._listener, *self._connections):
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def is_open(connection: socket.socket) -> bool:
    """Whether nothing has come on it, not even its end."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    finally:
        connection.setblocking(True)
        connection.settimeout(120)


@pytest.mark.parametrize("end", ["os._exit(7)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_worker_stays_connected_to_pmix_until_all_workers_have_ended(server: Server, end: str):
    connection = server.start(f"time.sleep(0.2)\n{end}\n")
    wait_until((server.attempt / "end_0.json").exists, "the worker's end is reported")
    assert is_open(connection)
    (server.attempt / "end_1.json").write_text("{}")
    assert connection.recv(1) == b""


def test_worker_that_disconnects_from_pmix_ends_without_waiting_for_other_workers(server: Server):
    connection = server.start("server.close()\nwhile not os.path.exists('heard'): time.sleep(0.01)\n")
    assert connection.recv(1) == b""
    (server.attempt.parents[1] / "heard").touch()
    wait_until((server.attempt / "end_0.json").exists, "the worker's end is reported")


def test_worker_detects_a_closed_pmix_server(server: Server):
    connection = server.start("assert server.recv(10) == b''\nopen('gone', 'w').close()\n")
    connection.close()
    wait_until((server.attempt.parents[1] / "gone").exists, "the worker has heard")
