"""Ranks as plain processes that find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as below torchrun."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.engines.conftest import require_engine
from tests.ranks import launcherless_environment

ROOT = Path(__file__).parents[2]


class Ranks:
    """Processes of one world. outputs, codes: by rank, once `wait` is over."""

    def __init__(self, number: int, *command: object, cwd: Path, **variables: str) -> None:
        require_engine("torch", importlib.util.find_spec("torch"))
        self.port = free_port()
        common = {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=cwd,
                env=launcherless_environment(rank, number, self.port) | common | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(number)
        ]
        self.outputs: list[str] = []
        self.codes: list[int] = []

    def wait(self, timeout_s: float = 240) -> Ranks:
        """Itself, once every rank has ended; the ones that have not by then are killed."""
        end_s = time.monotonic() + timeout_s
        try:
            for process in self.processes:
                self.outputs.append(process.communicate(timeout=max(1.0, end_s - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {len(self.outputs)} has not ended; so far:\n" + self.told()) from None
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    self.outputs.append(process.communicate()[0])
        self.codes = [process.returncode for process in self.processes]
        return self

    def told(self) -> str:
        return "\n".join(f"rank {rank}: {output[-3000:]}" for rank, output in enumerate(self.outputs))


def free_port() -> int:
    """Below the ports that the kernel gives to connections: one of those may be taken by the time ranks want to listen."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(20000, 32000))) as server,
        ):
            return int(server.getsockname()[1])
