"""Worlds of ranks that run checks in turn; each test then reads the result of its own check.

A check is a function `check_*` of a module in a folder `checks/`. A program that is started on every rank of a world calls
`run_checks`; a fixture keeps a `Worlds`, which starts each world once and reads the files of its ranks.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from paceline.system import processes

#: Prefixes of variables that a launcher of the tests may have set.
LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "HOROVOD_", "PACELINE_", "TORCHELASTIC_")

#: Variables for mpirun of Open MPI: it may run as root, and ranks that wait leave their core to other ranks.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without a launcher's variables; for ranks, which have one thread each."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # mpirun ends at once if no home folder is set.
    return processes.with_home(clean) | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def launcherless_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank, and nothing else of a launcher's."""
    return clean_environment() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def checks_in(folder: Path, module: str) -> list[str]:
    """The names of the module's checks, in the order in which they stand. Read, not imported."""
    tree = ast.parse((folder / f"{module}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def run_checks(folder: Path, rank: int, checks: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Run the checks on this rank, and write down the result of each, with its elapsed time and processor time.

    A failed one ends the process at once: the other ranks may be waiting for this one, and can't be told to skip it.
    """
    for name, check in checks:
        failed, begin_s, begin_cpu_s = "", time.monotonic(), time.process_time()
        try:
            check()
        except BaseException:
            failed = traceback.format_exc()
        spent = {
            "seconds": round(time.monotonic() - begin_s, 2),
            "cpu_seconds": round(time.process_time() - begin_cpu_s, 2),
        }
        record = {"check": name, "failed": failed, **spent}
        with (folder / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if failed:
            os._exit(3)


def read_checks(folder: Path, size: int) -> dict[tuple[int, str], str]:
    """Return (rank, check) -> error, or "" if it passed; only of the checks that the ranks have reached."""
    found = {}
    for rank in range(size):
        path = folder / f"rank_{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            found[rank, record["check"]] = record["failed"]
    return found


class Worlds:
    """Each world is started when a test first asks for it, once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._seen: dict[str, tuple[dict[tuple[int, str], str], str]] = {}

    def look(self, world: str, size: int, check: str, start: Callable[[Path], str]) -> None:
        """Fail if the check failed on any rank, or if a rank did not reach it.

        start: runs the program on so many ranks, with this folder for the reports; returns its output.
        """
        if world not in self._seen:
            folder = self._folders.mktemp(world)
            try:
                end = start(folder)
            except subprocess.TimeoutExpired as error:  # otherwise each check would wait for this timeout again
                end = str(error)
            self._seen[world] = read_checks(folder, size), end[-6000:]
        found, end = self._seen[world]
        failed = {rank: found[rank, check] for rank in range(size) if found.get((rank, check))}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        missing = [rank for rank in range(size) if (rank, check) not in found]
        assert not missing, f"ranks {missing} did not come to it; the world's end:\n{end}"
