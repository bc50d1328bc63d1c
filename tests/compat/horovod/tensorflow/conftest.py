"""Worlds of ranks with TensorFlow that run all checks once; each test then reads what came of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.horovod.conftest import run_on_ranks
from tests.compat.horovod.tensorflow.world import checks_of

_ALL = ("collectives", "semantics", "gradients", "graphs", "reduction", "training", "state")
#: Number of ranks -> what runs on so many: with more than two, what looks at the number. A process with TensorFlow takes
#: seconds to start.
MODULES = {1: _ALL, 2: _ALL, 3: ("collectives", "semantics", "gradients"), 4: ("collectives", "semantics", "training")}
#: What also has to hold with tf_keras in the place of Keras 3.
LEGACY_MODULES = ("legacy",)
_WORLD = Path(__file__).with_name("world.py")


def every_check(modules: tuple[str, ...]) -> list[str]:
    return [f"{module}.{check}" for module in modules for check in checks_of(module)]


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """A function that fails as the check did on any of so many ranks."""
    worlds: dict[tuple[int, bool], tuple[dict[tuple[int, str], str], str]] = {}

    def look(ranks: int, check: str, *, legacy: bool = False) -> None:
        key = ranks, legacy
        if key not in worlds:
            folder = tmp_path_factory.mktemp(f"tensorflow-of-{ranks}{'-legacy' * legacy}")
            variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1" if legacy else "0"}
            modules = LEGACY_MODULES if legacy else MODULES[ranks]
            try:
                end = run_on_ranks(ranks, _WORLD, str(folder), *modules, **variables).stderr[-3000:]
            except subprocess.TimeoutExpired as error:
                # Kept, so that not every test of this world waits for it again.
                end = str(error)
            found = {}
            for rank in range(ranks):
                path = folder / f"rank_{rank}.jsonl"
                for line in path.read_text().splitlines() if path.exists() else ():
                    record = json.loads(line)
                    found[rank, record["check"]] = record["failed"]
            worlds[key] = found, end
        found, stderr = worlds[key]
        failed = {rank: found[rank, check] for rank in range(ranks) if found.get((rank, check))}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        missing = [rank for rank in range(ranks) if (rank, check) not in found]
        assert not missing, f"ranks {missing} did not come to it; the world's end:\n{stderr}"

    return look
