"""From every layout to every other: three steps, a checkpoint, three steps more equal six steps of a plain loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import require_engine
from tests.parallel.checkpoint.matrix_world import LAYOUTS
from tests.parallel.conftest import run_on_ranks

#: The largest allowed difference in float64. AdamW divides rounding errors by their own size, so they do not vanish.
LIMIT = 1e-10
_WORLD = Path(__file__).with_name("matrix_world.py")
#: `make test` uses each kind of layout and each number of workers once. Each layout continues from the checkpoint of
#: the layout two places before it, which is of another kind. checks/checkpoint.py tests that a layout continues from
#: its own checkpoint. `make proof` tests all pairs of layouts.
_COVERING = ("one", "data 2", "shard 4", "tensor 2", "pipe 4", "data 2 pipe 2", "shard 2 tensor 2")
_NEXT = dict(zip(_COVERING, (*_COVERING[2:], *_COVERING[:2]), strict=True))
#: Test parameters: the layout that saves, and the layout that continues.
PAIRS = [
    pytest.param(of, to, marks=[] if _NEXT.get(of) == to else [pytest.mark.proof]) for of in LAYOUTS for to in LAYOUTS
]
SAVING = [pytest.param(of, marks=[] if of in _COVERING else [pytest.mark.proof]) for of in LAYOUTS]
_SIZES = sorted({size for size, _ in LAYOUTS.values()})


@pytest.fixture(scope="session")
def distances(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, float]]:
    """How far apart the two ends are, of "<layout> saves" after three steps, of "<layout> -> <other>" after six."""
    require_engine("torch", find_spec("torch"))
    found: dict[str, Any] = {}
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = [f"{one['of']} -> {one['to']}" for one in params if {"of", "to"} <= one.keys()]
    asked += [f"{one['layout']} saves" for one in params if one.get("layout") in LAYOUTS]

    def look(pair: str) -> dict[str, float]:
        if not found:
            folder = tmp_path_factory.mktemp("checkpoints")

            def run(size: int) -> str:
                """Return the error of the world of this size."""
                command = (str(_WORLD), str(folder), json.dumps(asked))
                ended = run_on_ranks(size, folder / f"world_{size}", *command, timeout_s=900)
                return "\n".join(
                    f"rank {rank}: {end.output[-2000:]}" for rank, end in enumerate(ended) if end.returncode
                )

            with ThreadPoolExecutor(len(_SIZES)) as threads:
                found["error"] = "\n".join(filter(None, threads.map(run, _SIZES)))
            for path in folder.glob("found_*.json"):
                found.update(json.loads(path.read_text()))
        assert pair in found, found["error"] or f"{pair} was not tried"
        return found[pair]  # type: ignore[no-any-return]

    return look


@pytest.mark.promise("checkpoint-layout-loads-into-other")
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(("of", "to"), PAIRS)
def test_training_resumed_from_a_checkpoint_on_another_layout_has_the_same_losses(
    of: str, to: str, distances: Callable[[str], dict[str, float]]
) -> None:
    apart = distances(f"{of} -> {to}")
    assert apart["steps"] == 6
    assert apart["loss"] <= LIMIT
    assert apart["parameters"] <= LIMIT


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("layout", SAVING)
def test_parallel_training_that_saves_checkpoints_equals_plain_training_within_the_tolerance(
    layout: str, distances: Callable[[str], dict[str, float]]
) -> None:
    apart = distances(f"{layout} saves")
    assert apart["steps"] == 3
    assert apart["loss"] <= LIMIT
    assert apart["parameters"] <= LIMIT
