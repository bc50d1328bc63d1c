"""The checks of `checks/` that go another way there, on ranks that have no MPI: plain processes, over Gloo.

Two of them: on three the engine's own checks run over Gloo (tests/collectives/test_rendezvous.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collectives.gloo_world import Ranks
from tests.compat.horovod.conftest import GLOO_MODULES, every_check

_WORLD = Path(__file__).with_name("world.py")


@pytest.mark.promise("operations-same-over-mpi-over")
@pytest.mark.parametrize("check", every_check(GLOO_MODULES))
def test_horovod_compatibility_check_passes_on_every_rank_over_gloo(worlds, check):
    def start(folder: Path) -> str:
        return Ranks(2, _WORLD, folder, *GLOO_MODULES, cwd=folder).wait().told()

    worlds.look("torch-over-gloo-on-2", 2, check, start)
