"""Each rank: operations in steps while the engine is tuned; prints what it has seen. Started by test_autotune."""

from __future__ import annotations

import json
import sys

import numpy

from paceline import collectives
from paceline.compat.horovod.common import autotune


def main(kind: str) -> None:
    engine = collectives.start()
    tuner = autotune.begin(engine)
    if tuner is None:
        print(json.dumps({"rank": engine.rank, "tuner": None}), flush=True)
        return collectives.stop()
    generator = numpy.random.default_rng(engine.rank)
    sizes = [1, 100, 5000, 70_000, 300_000]
    for step in range(400):
        handles = {}
        for number in generator.permutation(len(sizes)):
            array = numpy.full(sizes[number], float(engine.rank + 1 + step + number))
            handles[number] = engine.allreduce(f"t{number}", array, out=array)
        for number, handle in handles.items():
            expected = sum(rank + 1 + step + int(number) for rank in range(engine.size))
            result = handle.wait()
            assert (result == expected).all(), (step, number, result[:3], expected)
        if kind == "join" and step == 20:
            break
        # All ranks have to leave the loop after the same step.
        done = engine.allreduce("done", numpy.array([float(tuner.done)]), op="min").wait()[0]
        if done:
            break
    if kind == "join":
        if engine.rank == 0:
            for _ in range(60):
                engine.allreduce("alone", numpy.ones(10)).wait()
        engine.join().wait()
    engine.barrier().wait()
    point = [tuner.point.fusion_bytes, tuner.point.cycle_s]
    settings = [engine.settings.fusion_bytes, engine.settings.cycle_s]
    print(json.dumps({"rank": engine.rank, "tuner": tuner.done, "point": point, "settings": settings}), flush=True)
    collectives.stop()


if __name__ == "__main__":
    main(sys.argv[1])
