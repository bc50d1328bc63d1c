"""Worlds of ranks that run all checks of a module once; each test then reads what came of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conftest import require_engine

_WORLD = Path(__file__).with_name("world.py")


@dataclass(frozen=True)
class Ended:
    """One rank's end. returncode: 124 where the time was up."""

    returncode: int
    output: str


def ranks_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for this rank, and nothing else of a launcher's."""
    prefixes = ("OMPI_", "PMIX_", "PRTE_", "SLURM_", "PACELINE_", "TORCHELASTIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return clean | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_on_ranks(
    size: int, folder: Path, *command: str, timeout_s: float = 350.0, variables: Mapping[str, str] | None = None
) -> list[Ended]:
    """How each of so many ranks of this Python program ended; none outlives the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [(folder / f"output_{rank}.txt").open("w+") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=outputs[rank],
            stderr=subprocess.STDOUT,
            env=ranks_environment(rank, size, port) | dict(variables or {}),
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + timeout_s
    codes = []
    try:
        for process in processes:
            try:
                codes.append(process.wait(max(deadline - time.monotonic(), 0.01)))
            except subprocess.TimeoutExpired:
                codes.append(124)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ended = []
    for code, output in zip(codes, outputs, strict=True):
        output.seek(0)
        ended.append(Ended(code, output.read()))
        output.close()
    return ended


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], None]:
    """A function that fails as the check (`module.check_...`) did on any of so many ranks."""
    require_engine("torch", find_spec("torch"))
    worlds: dict[tuple[int, str], tuple[dict[tuple[int, str], str], str]] = {}

    def look(size: int, check: str) -> None:
        module = check.partition(".")[0]
        if (size, module) not in worlds:
            folder = tmp_path_factory.mktemp(f"{module}-on-{size}")
            ended = run_on_ranks(size, folder, str(_WORLD), str(folder), module)
            found = {}
            for rank in range(size):
                path = folder / f"rank_{rank}.jsonl"
                for line in path.read_text().splitlines() if path.exists() else ():
                    record = json.loads(line)
                    found[rank, record["check"]] = record["failed"]
            text = "\n".join(f"rank {rank} ({end.returncode}): {end.output[-1500:]}" for rank, end in enumerate(ended))
            worlds[size, module] = found, text
        found, text = worlds[size, module]
        failed = {rank: found[rank, check] for rank in range(size) if found.get((rank, check))}
        assert not failed, "\n".join(f"rank {rank}: {trace}" for rank, trace in failed.items())
        missing = [rank for rank in range(size) if (rank, check) not in found]
        assert not missing, f"ranks {missing} did not come to it; the world's end:\n{text}"

    return look
