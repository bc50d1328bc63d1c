"""Every check of `checks/` on ranks that have no MPI: plain processes, over Gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.collectives.gloo_world import Ranks
from tests.compat.horovod.conftest import CHECKS, MODULES

_WORLD = Path(__file__).with_name("world.py")


@pytest.fixture(scope="module", params=[2, 3])
def found(request, tmp_path_factory):
    """(rank, check) -> what failed; the number of ranks; and what they have printed."""
    folder = tmp_path_factory.mktemp(f"gloo-world-of-{request.param}")
    world = Ranks(request.param, _WORLD, folder, *MODULES, cwd=folder).wait()
    failed = {}
    for rank in range(request.param):
        path = folder / f"rank_{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            failed[rank, record["check"]] = record["failed"]
    return failed, request.param, world.told()


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_every_rank_over_gloo(found, check):
    failed, ranks, told = found
    for rank in range(ranks):
        assert (rank, check) in failed, f"rank {rank} did not come to it; the world's end:\n{told}"
        assert not failed[rank, check], failed[rank, check]
