"""Impossible calls are refused on the rank that makes them, with a message that names the possible ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.collectives.settings import EngineSettings
from paceline.system import processes

PROGRAM = """
import numpy, sys
from paceline import collectives
engine = collectives.start()
words, numbers = numpy.array(["a"]), numpy.ones(2, numpy.uint16)
for call in (
    lambda: engine.allreduce("a", numbers, op="mean"),
    lambda: engine.allreduce("a", words),
    lambda: engine.allreduce("a", numpy.ones(2, complex), op="max"),
    lambda: engine.allreduce("a", numbers, op="adasum"),
    lambda: engine.broadcast("a", numbers, root=1),
    lambda: engine.allgather("a", numpy.float32(1).reshape(())),
    lambda: engine.grouped_allreduce("a", []),
    lambda: engine.allreduce("a", numbers, process_set=7),
):
    try:
        call()
    except collectives.ArgumentError as error:
        print(error)
engine.allreduce("a", numbers, op="adasum", dtype="bfloat16").wait()
collectives.stop()
"""


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    pytest.importorskip("numpy")
    pytest.importorskip("mpi4py")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("number", "words"),
    list(
        enumerate(
            (
                "op='mean' is unknown. The operations are sum, average",
                "can't be reduced: give numbers",
                "they have no order",
                "op='adasum' is for floating-point arrays",
                "root=1 is not a rank of process set 0",
                "allgather",
                "got no arrays. Give at least one",
                "process set 7",
            )
        )
    ),
)
def test_collective_operation_refuses_an_invalid_argument_and_names_the_valid_values(
    refusals: list[str], number: int, words: str
) -> None:
    assert words in refusals[number]


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
def test_default_cycle_time_is_longer_if_ranks_use_all_cores(monkeypatch, cores, ranks, environ, cycle_s):
    monkeypatch.setattr(processes, "core_count", lambda: cores)
    assert EngineSettings.from_environment(environ).chosen(ranks, environ).gathering_s == cycle_s
