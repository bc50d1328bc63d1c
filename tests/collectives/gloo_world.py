"""Ranks as plain processes that find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as below torchrun."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import time
from pathlib import Path

from tests.engines.conftest import require_engine
from tests.helpers import free_port
from tests.ranks import launcherless_environment
from tests.warm import program

ROOT = Path(__file__).parents[2]


class Ranks:
    """Processes of one world that run a script, with torch loaded already. outputs, codes: by rank, once `wait` is over."""

    def __init__(self, number: int, *command: object, cwd: Path, **variables: str) -> None:
        require_engine("torch", importlib.util.find_spec("torch"))
        self.port = free_port()
        common = {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        }
        # `wait` closes these files.
        self._files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(number)]  # noqa: SIM115
        self.processes = [
            program(rank).start(
                list(map(str, command)),
                launcherless_environment(rank, number, self.port) | common | variables,
                file.fileno(),
                cwd,
            )
            for rank, file in enumerate(self._files)
        ]
        self.outputs: list[str] = []
        self.codes: list[int] = []

    def wait(self, timeout_s: float = 240) -> Ranks:
        """Itself, once every rank has ended; the ones that have not by then are killed."""
        end_s = time.monotonic() + timeout_s
        late = None
        try:
            for rank, process in enumerate(self.processes):
                late = rank
                self.codes.append(process.wait(max(0.1, end_s - time.monotonic())))
            late = None
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process, file in zip(self.processes, self._files, strict=True):
                process.kill()
                file.seek(0)
                self.outputs.append(file.read())
                file.close()
        if late is not None:
            raise AssertionError(f"rank {late} has not ended; so far:\n" + self.told())
        return self

    def told(self) -> str:
        return "\n".join(f"rank {rank}: {output[-3000:]}" for rank, output in enumerate(self.outputs))
