"""Worlds of ranks that run all checks once; each test then reads what came of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest

from tests.engines.conftest import require_engine
from tests.helpers import free_port
from tests.parallel.world import lacking
from tests.ranks import Worlds, clean_environment, launcherless_environment
from tests.warm import Process, program

_WORLD = Path(__file__).with_name("world.py")
#: The module that the forked ranks of all tests in this folder have loaded before they start.
LOADED = "tests.parallel.loaded"


@dataclass(frozen=True)
class Ended:
    """One rank's end. returncode: 124 where the time was up."""

    returncode: int
    output: str


def run_on_ranks(
    size: int, folder: Path, *command: str, timeout_s: float = 5400.0, also: str | None = None
) -> list[Ended]:
    """How each of so many ranks of this Python program ended; none outlives the call. also: see `program`."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [folder / f"output_{rank}.txt" for rank in range(size)]
    deadline = time.monotonic() + timeout_s
    codes: list[int] = []
    processes: list[Process] = []
    try:
        for rank in range(size):
            with outputs[rank].open("w") as output:
                environment = launcherless_environment(rank, size, port)
                processes.append(program(rank, also=also).start(command, environment, output.fileno()))
        for process in processes:
            try:
                codes.append(process.wait(max(deadline - time.monotonic(), 0.01)))
            except subprocess.TimeoutExpired:
                codes.append(124)
    finally:
        for process in processes:
            process.kill()
    return [Ended(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]


def run_alone(output: Path, *command: str, timeout_s: float = 280.0) -> str:
    """Return what this Python program prints as a process without a launcher. Fail unless it ends with 0."""
    with output.open("w") as file:
        process = program(also=LOADED).start(command, clean_environment(), file.fileno(), output.parent)
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    assert code == 0, output.read_text()
    return output.read_text()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """torch's threads spin while they wait for each other: small tensors take 100 times as long on busy cores."""
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], None]:
    """A function that fails as the check (`module.check_...`) did on any of so many ranks."""
    require_engine("torch", find_spec("torch"))
    worlds = Worlds(tmp_path_factory)
    asked = [
        cast(pytest.Function, item).callspec.params
        for item in request.session.items
        if "check" in getattr(item, "fixturenames", ())
    ]

    def look(size: int, check: str) -> None:
        needed = lacking(check.partition(".")[0])
        require_engine(needed or "", needed is None)
        # Start the ranks once, with all checks that the selected tests need.
        names = [
            one["check"] for one in asked if one.get("size") == size and not lacking(one["check"].partition(".")[0])
        ]

        def start(folder: Path) -> str:
            ended = run_on_ranks(size, folder, str(_WORLD), str(folder), *names, also=LOADED)
            return "\n".join(f"rank {rank} ({end.returncode}): {end.output[-1500:]}" for rank, end in enumerate(ended))

        worlds.look(f"on-{size}", size, check, start)

    return look
