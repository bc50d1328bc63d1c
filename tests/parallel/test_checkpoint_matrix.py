"""From every layout to every other: three steps, a checkpoint, three steps more equal six steps of a plain loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import require_engine
from tests.parallel.checkpoint_world import LAYOUTS
from tests.parallel.conftest import run_on_ranks

#: In float64; AdamW divides what is left of rounding by its own size, so it is not nothing.
LIMIT = 1e-10
_WORLD = Path(__file__).with_name("checkpoint_world.py")
_SIZES = sorted({size for size, _ in LAYOUTS.values()})


@pytest.fixture(scope="session")
def distances(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, float]]:
    """How far apart the two ends are, of "<layout> saves" after three steps, of "<layout> -> <other>" after six."""
    require_engine("torch", find_spec("torch"))
    found: dict[str, Any] = {}

    def look(pair: str) -> dict[str, float]:
        if not found:
            folder = tmp_path_factory.mktemp("checkpoints")
            for phase in ("save", "load"):
                for size in _SIZES:
                    arguments = [str(_WORLD), str(folder), phase]
                    ended = run_on_ranks(size, folder / f"{phase}_{size}", *arguments, timeout_s=200)
                    bad = [f"rank {rank}: {end.output[-2000:]}" for rank, end in enumerate(ended) if end.returncode]
                    if bad:
                        found["error"] = "\n".join(bad)
                        break
                    found.update(json.loads((folder / f"{phase}_{size}.json").read_text()))
                if "error" in found:
                    break
        assert pair in found, found.get("error", f"{pair} was not tried")
        return found[pair]  # type: ignore[no-any-return]

    return look


@pytest.mark.timeout(600)
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("of", LAYOUTS)
def test_what_one_layout_saves_another_goes_on_from(
    of: str, to: str, distances: Callable[[str], dict[str, float]]
) -> None:
    apart = distances(f"{of} -> {to}")
    assert apart["steps"] == 6
    assert apart["loss"] <= LIMIT
    assert apart["parameters"] <= LIMIT


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_is_equal_to_the_plain_loop(layout: str, distances: Callable[[str], dict[str, float]]) -> None:
    apart = distances(f"{layout} saves")
    assert apart["steps"] == 3
    assert apart["loss"] <= LIMIT
    assert apart["parameters"] <= LIMIT
