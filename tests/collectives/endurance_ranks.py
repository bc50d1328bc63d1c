"""The program that test_endurance.py starts on each rank: so many steps, and what memory they have taken.

    mpirun -n 2 python endurance_ranks.py <steps> <folder for the reports>

A step reduces 8 tensors under the same names as always, one under a name of its own, gathers one of another length
each time, and now and then asks for what the ranks disagree about. HOROVOD_CACHE_CAPACITY=8 makes numbers void often.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc
from pathlib import Path

import numpy

from paceline import collectives

NAMES = 8
LOOKS = 20
LEAK = os.environ.get("PACELINE_TEST_LEAK") == "1"


def main(steps: int, folder: Path) -> None:
    engine = collectives.start()
    arrays = [numpy.ones(1 + 37 * index, numpy.float32) for index in range(NAMES)]
    kept = []
    resident: list[int] = []
    traced: list[int] = []
    for number in range(steps):
        step(engine, number, arrays)
        if LEAK:
            kept.append(bytearray(200))
        if (number + 1) % (steps // LOOKS) == 0:
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            if not tracemalloc.is_tracing():
                # Start tracing only now, because the start of the engine uses most of the memory.
                tracemalloc.start()
            traced.append(tracemalloc.get_traced_memory()[0])
    collectives.stop()
    (folder / f"rank_{engine.rank}.json").write_text(json.dumps({"resident": resident, "traced": traced}))


def step(engine: collectives.Engine, number: int, arrays: list[numpy.ndarray]) -> None:
    for array in arrays:
        array[:] = 1
    handles = [engine.allreduce(f"g{index}", array, out=array) for index, array in enumerate(arrays)]
    handles.append(engine.allreduce(f"once.{number}", numpy.ones(100, numpy.float32)))
    gathered = engine.allgather("g", numpy.full(number % 5 + engine.rank, number))
    if number % 10 == 0:
        try:
            engine.allreduce("wrong" if number % 20 else f"wrong.{number}", numpy.ones(2 + engine.rank)).wait(120)
        except collectives.MismatchError:
            pass
        else:
            raise AssertionError("the ranks disagree, and nothing was raised")
    for handle in handles:
        assert handle.wait(120).flat[0] == engine.size
    assert gathered.wait(120).size == sum(number % 5 + rank for rank in range(engine.size))
    if number % 50 == 0:
        engine.barrier().wait(120)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
