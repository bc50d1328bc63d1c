from __future__ import annotations

from pathlib import Path

import pytest
from tests.collectives.test_torch_world import mpirun, need_mpi

DEATH = """
import os, signal, numpy
from paceline import collectives
engine = collectives.start()
array = numpy.ones(1 << 22, numpy.float32)
engine.allreduce("first", array).wait()
if engine.rank == 1:
    engine.allreduce("second", array)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    engine.allreduce("third", array).wait(30)
except collectives.ShutDownError as error:
    print("told:", error, flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_operation_gives_what_numpy_gives(ranks, tmp_path):
    need_mpi()
    done = mpirun(ranks, Path(__file__).with_name("engine_checks.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == ranks


def test_a_killed_rank_raises_on_the_other(tmp_path):
    need_mpi()
    script = tmp_path / "death.py"
    script.write_text(DEATH)
    done = mpirun(2, script, cwd=tmp_path)
    assert done.returncode != 0
    assert "told: rank 1 (process" in done.stdout, done.stdout + done.stderr
