"""Thousands of steps, and a hundred lives of the engine, without growth.

1,000 steps; PACELINE_ENDURANCE_STEPS=10000, as `make proof` sets it, takes so many.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.torch_mpi.test_world import mpirun, mpirun_text, need_mpi

STEPS = int(os.environ.get("PACELINE_ENDURANCE_STEPS", "1000"))
#: Limit of the memory growth in the second half of the steps. A leak of one request or one name per step takes at least 200 bytes
#: per step. In 1,000 or 2,000 steps that is twice this limit, in 10,000 steps ten times.
MOST_TRACED_BYTES = min(100_000, 50 * STEPS)
MOST_RESIDENT_BYTES = min(2 << 20, STEPS << 10)
LEAKING_STEPS = STEPS // 5
PROGRAM = Path(__file__).with_name("endurance_ranks.py")

LIVES = """
import os, threading, time
from pathlib import Path
import numpy
from paceline import collectives
collectives.start().allreduce("a", numpy.ones(3)).wait(120)
collectives.stop()
seen = []
for life in range(100):
    engine = collectives.start()
    number = engine.add_process_set([0])
    handle = engine.allreduce("a", numpy.ones(1000)) if life % 2 else None
    assert engine.allreduce("b", numpy.ones(3)).wait(120)[0] == engine.size
    if handle is not None:
        assert handle.wait(120)[0] == engine.size
    collectives.stop()
    fds = len(os.listdir("/proc/self/fd"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    seen.append((threading.active_count(), fds, pages))
print("lives", seen[20], seen[-1], flush=True)
assert seen[-1][:2] == seen[20][:2], seen
assert (seen[-1][2] - seen[20][2]) * os.sysconf("SC_PAGE_SIZE") < 4 << 20, seen
"""


@pytest.mark.promise("engine-s-steps-take-memory")
@pytest.mark.timeout(900)
def test_memory_does_not_grow_in_the_second_half_of_many_steps(tmp_path, monkeypatch):
    need_mpi()
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "8")
    growth = _growth(tmp_path, STEPS)
    assert all(traced < MOST_TRACED_BYTES and resident < MOST_RESIDENT_BYTES for traced, resident in growth), growth


@pytest.mark.timeout(900)
def test_memory_growth_check_detects_a_deliberate_leak_in_every_step(tmp_path, monkeypatch):
    need_mpi()
    monkeypatch.setenv("PACELINE_TEST_LEAK", "1")
    growth = _growth(tmp_path, LEAKING_STEPS)
    # The deliberate leak takes 200 bytes in each step of the second half.
    assert all(traced > LEAKING_STEPS // 2 * 200 for traced, _ in growth), growth


def test_stopped_engine_leaves_no_thread_or_open_file(tmp_path):
    need_mpi()
    done = mpirun_text(2, LIVES, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("lives") == 2


def _growth(folder: Path, steps: int) -> list[tuple[int, int]]:
    """Of each rank, how many bytes more Python's objects and the process take at the end than in the middle."""
    done = mpirun(2, PROGRAM, steps, folder, cwd=folder, timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    growth = []
    for path in sorted(folder.glob("rank_*.json")):
        found = json.loads(path.read_text())
        middle = len(found["traced"]) // 2
        growth.append(
            (found["traced"][-1] - found["traced"][middle], found["resident"][-1] - found["resident"][middle])
        )
    assert len(growth) == 2
    return growth
