"""The engine below `horovod` by itself: against bare mpi4py, at rest, and the cost of agreeing on 2, 4 and 8 processes.

python benchmarks/collectives.py
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import in_turn, median, report
from ranks import figures, is_rank, tell, timed

#: Bytes, calls in a block, rounds.
SIZES = ((16 << 20, 4, 15), (64 << 20, 2, 10))
RANKS = (2, 4, 8)
TENSORS = 200
IDLE_S = 5.0


def main() -> None:
    found = figures(2)
    for size, *_ in SIZES:
        out_s, in_place_s, ours_s = found[str(size)]
        bare_s = min(out_s, in_place_s)
        report(
            f"collectives_{size >> 20}m",
            f"engine's all-reduce of {size >> 20} MiB, 2 processes, over mpi4py's Allreduce",
            "at least 0.85 of its speed",
            bare_s / ours_s >= 0.85,
            ours_ms=ours_s * 1e3,
            bare_ms=bare_s * 1e3,
            ratio=bare_s / ours_s,
        )
    report(
        "collectives_idle",
        f"share of a processor that an idle engine takes in {IDLE_S:g} s, the largest of the ranks",
        "not to be measured: at most 0.001",
        found["idle"] <= 0.001,
        share=found["idle"],
    )
    costs = {ranks: figures(ranks, "negotiation") for ranks in RANKS}
    steps_ms = {f"ranks_{ranks}_ms": cost["step_s"] * 1e3 for ranks, cost in costs.items()}
    cpu_ms = {f"ranks_{ranks}_cpu_ms": cost["cpu_s"] * 1e3 for ranks, cost in costs.items()}
    # Time says little where more processes than cores share them: a rank's own processor time is what a step takes where each
    # has a core, and the first rank's is the most, for it hears all others.
    growth = costs[RANKS[-1]]["cpu_s"] / costs[RANKS[0]]["cpu_s"]
    report(
        "collectives_negotiation",
        f"a step of {TENSORS} tensors of 4 bytes, 2, 4 and 8 processes: time, and processor time of the rank that takes most",
        f"grows no faster than linearly: {RANKS[-1]} processes at most {RANKS[-1] // RANKS[0]} times as much as 2",
        growth <= RANKS[-1] / RANKS[0],
        **steps_ms,
        **cpu_ms,
        growth=growth,
        growth_of_all_ranks_together=costs[RANKS[-1]]["all_cpu_s"] / costs[RANKS[0]]["all_cpu_s"],
    )


def on_a_rank() -> None:
    from paceline import collectives
    from paceline.collectives import mpi

    comm = mpi.world().Dup()
    engine = collectives.start()
    found = _negotiation(engine, comm) if "negotiation" in sys.argv else _alone(engine, comm)
    if engine.rank == 0:
        tell(found)
    collectives.stop()


def _alone(engine: Any, comm: Any) -> dict[str, Any]:
    import numpy
    from mpi4py import MPI

    found: dict[str, Any] = {}
    for size, calls, rounds in SIZES:
        array, out = numpy.zeros(size // 4, numpy.float32), numpy.empty(size // 4, numpy.float32)
        sides: list[Callable[[], object]] = [
            lambda array=array, out=out: comm.Allreduce(array, out),
            lambda array=array: comm.Allreduce(MPI.IN_PLACE, array),
            lambda array=array: engine.allreduce("t", array, out=array).wait(),
        ]
        blocks = [lambda call=call, calls=calls: timed(comm.Barrier, call, calls) for call in sides]
        found[str(size)] = [median(times) for times in in_turn(rounds, *blocks)]
    comm.Barrier()
    time.sleep(0.5)
    cpu_s, begin_s = time.process_time(), time.monotonic()
    time.sleep(IDLE_S)
    share = (time.process_time() - cpu_s) / (time.monotonic() - begin_s)
    found["idle"] = comm.allreduce(share, MPI.MAX)
    return found


def _negotiation(engine: Any, comm: Any) -> dict[str, Any]:
    import numpy
    from mpi4py import MPI

    arrays = [numpy.ones(1, numpy.float32) for _ in range(TENSORS)]

    def step() -> None:
        handles = [engine.allreduce(f"t.{index}", array, out=array) for index, array in enumerate(arrays)]
        for handle in handles:
            handle.wait()

    steps_s, cpus_s = [], []
    for _ in range(12):
        cpu_s = time.process_time()
        steps_s.append(timed(comm.Barrier, step, 10))
        cpus_s.append((time.process_time() - cpu_s) / 10)
    cpu_s = statistics.median(cpus_s)
    return {
        "step_s": statistics.median(steps_s),
        "cpu_s": comm.allreduce(cpu_s, MPI.MAX),
        "all_cpu_s": comm.allreduce(cpu_s),
    }


if __name__ == "__main__":
    assert os.environ["OMP_NUM_THREADS"] == "1"
    on_a_rank() if is_rank() else main()
