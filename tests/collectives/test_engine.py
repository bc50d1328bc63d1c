from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.torch_mpi.test_world import mpirun, mpirun_text, need_mpi

DEATH = """
import os, signal, numpy
from paceline import collectives
engine = collectives.start()
array = numpy.ones(1 << 24, numpy.float32)
engine.allreduce("first", array).wait()
if engine.rank == 1:
    engine.allreduce("second", array)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    engine.allreduce("third", array).wait(120)
except collectives.ShutDownError as error:
    print("told:", error, flush=True)
"""

#: In this program, one rank dies before a shared-memory sum in which the other ranks wait for it.
DEATH_AT_A_MEETING = """
import os, signal, numpy
from paceline import collectives
from paceline.collectives.transport import SharedSegments
engine = collectives.start()
arrays = [numpy.ones(1000, numpy.float32) for _ in range(8)]
def together(step):
    handles = [engine.allreduce(f"{step}.{index}", array) for index, array in enumerate(arrays)]
    return [handle.wait(120)[0] for handle in handles]
assert together(0) == [2.0] * 8
def die(segments, dtype):
    os.kill(os.getpid(), signal.SIGKILL)
assert engine._sets.loops[0].negotiation.performer._reducer._fusion.has_shared_memory
if engine.rank == 1:
    SharedSegments.meet = die
try:
    together(1)
except collectives.ShutDownError as error:
    print("told:", error, flush=True)
"""


#: This program sums short integers by MPI. Paceline uses MPI between machines, and for arrays larger than its shared memory.
SHORT_INTEGERS = """
import numpy
from mpi4py import MPI
from paceline.collectives.mpi_transport import MpiTransport
transport = MpiTransport(MPI.COMM_WORLD)
for dtype in ("int8", "uint8", "int16", "uint16"):
    array = numpy.full(200, numpy.iinfo(dtype).max - 3, dtype)
    wanted = array + array
    transport.allreduce(array, target := numpy.empty_like(array), "sum")
    assert (target == wanted).all(), (dtype, target[0], wanted[0])
    transport.reducescatter(array, part := numpy.empty(100, dtype), [100, 100], "sum")
    assert (part == wanted[:100]).all(), (dtype, part[0], wanted[0])
    transport.allreduce(array, array, "sum")
    assert (array == wanted).all(), (dtype, array[0], wanted[0])
"""


@pytest.mark.promise("sums-integers-wrap-around-numpy")
def test_overflowing_integer_sums_over_mpi_wrap_around_as_in_numpy(tmp_path):
    # Regression: for arrays of a few elements or more, sums by Open MPI's AVX code stopped at the largest integer,
    # instead of wrapping around.
    need_mpi()
    done = mpirun_text(2, SHORT_INTEGERS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# test_properties.py runs random operations on two and on four ranks. So `make test` uses three ranks here.
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.proof), 3, pytest.param(4, marks=pytest.mark.proof)]
)
def test_every_collective_operation_equals_numpy(ranks, tmp_path):
    need_mpi()
    done = mpirun(ranks, Path(__file__).with_name("engine_checks.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == ranks


@pytest.mark.promise("rank-killed-told-others")
@pytest.mark.parametrize("death", [DEATH, DEATH_AT_A_MEETING], ids=["in MPI", "at a meeting"])
def test_killed_rank_raises_an_error_on_the_other_rank(death, tmp_path):
    need_mpi()
    if death == DEATH_AT_A_MEETING and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a core for each of two ranks")
    done = mpirun_text(2, death, tmp_path)
    assert done.returncode != 0
    assert "told: rank 1 (process" in done.stdout, done.stdout + done.stderr
