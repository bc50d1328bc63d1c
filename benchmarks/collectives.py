"""The engine against bare mpi4py, and against torch's Gloo. Start it with mpirun; rank 0 prints a JSON object.

OMP_NUM_THREADS=1 mpirun --map-by slot:OVERSUBSCRIBE --bind-to none -n 2 python benchmarks/collectives.py [gloo]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy

from paceline import collectives
from paceline.collectives import mpi

STEP_SIZES = [int(1e3 * 10 ** (3 * index / 199)) // 4 for index in range(200)]  # 1 kB to 1 MB


def median_ms(call: Callable[[], object], comm, repeats: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        comm.Barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 4)


def one(engine, array) -> None:
    engine.allreduce("t", array, out=array, op="average").wait()


def mpi_in_place():
    from mpi4py import MPI

    return MPI.IN_PLACE


def main() -> None:
    comm = mpi.world().Dup()
    engine = collectives.start()
    found: dict[str, object] = {"ranks": engine.size, "cores": os.cpu_count()}
    for kib in (4, 1024, 16 * 1024, 64 * 1024):
        array = numpy.ones(kib * 256, numpy.float32)
        out = numpy.empty_like(array)
        repeats = 10 if kib > 4096 else 100
        # In place is what the engine does, and mostly, not always, the faster one.
        bare = min(
            median_ms(partial(comm.Allreduce, array, out), comm, repeats),
            median_ms(partial(comm.Allreduce, mpi_in_place(), array), comm, repeats),
        )
        array[:] = 1
        ours = median_ms(partial(one, engine, array), comm, repeats)
        found[f"{kib} KiB"] = {"bare_ms": bare, "engine_ms": ours, "engine over bare": round(bare / ours, 3)}
    arrays = [numpy.ones(size, numpy.float32) for size in STEP_SIZES]

    def step() -> None:
        handles = [engine.allreduce(f"g{i}", a, out=a, op="average") for i, a in enumerate(arrays)]
        for handle in handles:
            handle.wait()

    found["200 tensors ms"] = median_ms(step, comm, 20)
    tiny = [numpy.ones(1, numpy.float32) for _ in range(200)]

    def negotiation() -> None:
        handles = [engine.allreduce(f"n{i}", a, out=a) for i, a in enumerate(tiny)]
        for handle in handles:
            handle.wait()

    found["200 tensors of 4 bytes ms"] = median_ms(negotiation, comm, 50)
    comm.Barrier()
    before, start = time.process_time(), time.monotonic()
    time.sleep(3)
    found["idle CPU share"] = round((time.process_time() - before) / (time.monotonic() - start), 5)
    if "gloo" in sys.argv:
        found["gloo"] = gloo(comm, arrays)
    if engine.rank == 0:
        print(json.dumps(found, indent=1), flush=True)
    collectives.stop()


def gloo(comm, arrays) -> dict[str, float]:
    """The same with torch.distributed: single tensors, and DDP's buckets of 25 MiB."""
    import socket

    import torch
    from torch import distributed

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.bcast(probe.getsockname()[1])
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size)
    found = {}
    for kib in (4, 1024, 16 * 1024, 64 * 1024):
        tensor = torch.ones(kib * 256)
        found[f"{kib} KiB ms"] = median_ms(partial(distributed.all_reduce, tensor), comm, 10 if kib > 4096 else 50)
    tensors = [torch.from_numpy(array) for array in arrays]
    buckets: list[list[torch.Tensor]] = [[]]
    for tensor in tensors:
        if sum(t.nbytes for t in buckets[-1]) + tensor.nbytes > 25 << 20:
            buckets.append([])
        buckets[-1].append(tensor)

    def step() -> None:
        flat = [torch.cat(bucket) for bucket in buckets]
        for work in [distributed.all_reduce(tensor, async_op=True) for tensor in flat]:
            work.wait()
        for bucket, whole in zip(buckets, flat, strict=True):
            mean = whole.div_(comm.size)
            for tensor, part in zip(bucket, mean.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part)

    found["200 tensors ms"] = median_ms(step, comm, 20)
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
