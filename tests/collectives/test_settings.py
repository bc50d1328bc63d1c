from __future__ import annotations

import pytest

from paceline.collectives.settings import EngineSettings
from paceline.system import processes


@pytest.mark.parametrize(
    ("cores", "ranks", "environ", "cycle_s"),
    [
        (2, 2, {"OMP_NUM_THREADS": "1"}, 0.02),
        (4, 2, {"OMP_NUM_THREADS": "1"}, 0.001),
        (4, 2, {}, 0.001),
        (4, 2, {"OMP_NUM_THREADS": "2"}, 0.02),
        (6, 2, {"OMP_NUM_THREADS": "2"}, 0.001),
        (4, 2, {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0"}, 0.001),
        (4, 2, {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}, 0.02),
        (2, 2, {"OMP_NUM_THREADS": "2,1"}, 0.02),
        (2, 2, {"HOROVOD_CYCLE_TIME": "5"}, 0.005),
        (64, 2, {"HOROVOD_CYCLE_TIME": "0"}, 0.0),
    ],
)
def test_what_is_submitted_is_gathered_for_longer_where_computing_takes_all_cores(
    monkeypatch, cores, ranks, environ, cycle_s
):
    monkeypatch.setattr(processes, "core_count", lambda: cores)
    assert EngineSettings.from_environment(environ).chosen(ranks, environ).gathering_s == cycle_s
