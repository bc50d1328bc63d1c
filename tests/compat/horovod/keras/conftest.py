"""Worlds of ranks with one Keras each that run all checks once; each test then reads what came of its own."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.horovod.conftest import run_on_ranks
from tests.compat.horovod.keras.world import checks_of
from tests.engines.conftest import require_engine

_WORLD = Path(__file__).with_name("world.py")
#: For every Keras.
_COMMON = ("training", "values", "callbacks", "saving", "elastic")
#: By Keras: what it needs, its variables, what a script imports, and the modules of its checks.
KINDS = {
    "keras-tensorflow": (
        ("keras", "tensorflow"),
        {"KERAS_BACKEND": "tensorflow"},
        "horovod.keras",
        ("keras3", "graphs"),
    ),
    "keras-torch": (("keras", "torch"), {"KERAS_BACKEND": "torch"}, "horovod.keras", ("keras3",)),
    "tf_keras": (
        ("tf_keras", "tensorflow"),
        {"TF_USE_LEGACY_KERAS": "1"},
        "horovod.tensorflow.keras",
        ("keras2", "graphs"),
    ),
}


def checks(kind: str) -> list[str]:
    """The names of all checks for this Keras."""
    return [f"{module}.{check}" for module in (*_COMMON, *KINDS[kind][3]) for check in checks_of(module)]


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], None]:
    """A function that fails as the check did on any of so many ranks."""
    worlds: dict[tuple[str, int, str], tuple[dict[tuple[int, str], str], str]] = {}

    def look(kind: str, ranks: int, check: str) -> None:
        needs, variables, module, own = KINDS[kind]
        for need in needs:
            require_engine(need, importlib.util.find_spec(need))
        # Two worlds for each, so that neither takes too long.
        part = own if check.partition(".")[0] in own else _COMMON
        key = kind, ranks, part[0]
        if key not in worlds:
            folder = tmp_path_factory.mktemp(f"{kind}-of-{ranks}-{part[0]}")
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "0"}
            done = run_on_ranks(ranks, _WORLD, str(folder), module, *part, **(quiet | variables))
            found = {}
            for rank in range(ranks):
                path = folder / f"rank_{rank}.jsonl"
                for line in path.read_text().splitlines() if path.exists() else ():
                    record = json.loads(line)
                    found[rank, record["check"]] = record["failed"]
            worlds[key] = found, done.stderr[-3000:]
        found, stderr = worlds[key]
        failed = {rank: found[rank, check] for rank in range(ranks) if found.get((rank, check))}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        missing = [rank for rank in range(ranks) if (rank, check) not in found]
        assert not missing, f"ranks {missing} did not come to it; the world's end:\n{stderr}"

    return look
