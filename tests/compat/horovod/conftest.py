"""Worlds of ranks that run all checks once; each test then reads what came of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.horovod.world import checks_of
from tests.engines.conftest import require_engine
from tests.engines.lab import WHEEL, find_mpirun

MODULES = ("collectives", "semantics", "gradients", "optimizer", "training", "state", "elastic")
CHECKS = [f"{module}.{check}" for module in MODULES for check in checks_of(module)]
_WORLD = Path(__file__).with_name("world.py")


def run_on_ranks(ranks: int, program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program's end on so many ranks; one runs without any launcher."""
    mpirun = find_mpirun(WHEEL)
    require_engine(WHEEL, mpirun)
    command = [sys.executable, str(program), *arguments]
    if ranks > 1:
        command = [str(mpirun), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks), *command]
    prefixes = ("OMPI_", "PMIX_", "PRTE_", "HOROVOD_", "PACELINE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    environment = clean | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment | variables, check=False
    )


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], None]:
    """A function that fails as the check did on any of so many ranks."""
    worlds: dict[int, tuple[dict[tuple[int, str], str], str]] = {}

    def look(ranks: int, check: str) -> None:
        if ranks not in worlds:
            folder = tmp_path_factory.mktemp(f"world-of-{ranks}")
            done = run_on_ranks(ranks, _WORLD, str(folder), *MODULES)
            found = {}
            for rank in range(ranks):
                path = folder / f"rank_{rank}.jsonl"
                for line in path.read_text().splitlines() if path.exists() else ():
                    record = json.loads(line)
                    found[rank, record["check"]] = record["failed"]
            worlds[ranks] = found, done.stderr[-3000:]
        found, stderr = worlds[ranks]
        failed = {rank: found[rank, check] for rank in range(ranks) if found.get((rank, check))}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        missing = [rank for rank in range(ranks) if (rank, check) not in found]
        assert not missing, f"ranks {missing} did not come to it; the world's end:\n{stderr}"

    return look
