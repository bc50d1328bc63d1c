"""The doctor's all-reduce on a node, by torch's Gloo or by mpi4py.

A Python on the node gets this program as text (`paceline.remote.foreign_python`), or mpirun starts it as a file. It
imports torch and mpi4py by `importlib`, since only the scripts' interpreter has these packages.

    gloo {"rank": 0, "size": 2, "address": ..., "port": ..., "interface": ..., "elements": 1048576, "timeout_s": ...}
    mpi  {"elements": 1048576}
"""

from __future__ import annotations

import datetime
import importlib
import os
import socket
import time
from typing import Any

#: Number of rounds. The first round takes longer, because it creates the connections.
_ROUNDS = 3


def gloo(asked: dict[str, Any]) -> dict[str, Any]:
    """Time all-reduces by Gloo. Return the fastest as {"ms", "size": world size, "hosts"}."""
    # Set the variable before the import of torch, which reads it.
    os.environ["OMP_NUM_THREADS"] = "1"
    if asked["interface"]:
        os.environ["GLOO_SOCKET_IFNAME"] = asked["interface"]
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    rank, size = asked["rank"], asked["size"]
    limit = datetime.timedelta(seconds=asked["timeout_s"])
    store = distributed.TCPStore(asked["address"], asked["port"], size, rank == 0, timeout=limit)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    times = []
    for _ in range(_ROUNDS):
        values = torch.full((asked["elements"],), float(rank + 1))
        start = time.monotonic()
        distributed.all_reduce(values)
        times.append((time.monotonic() - start) * 1e3)
        _check(float(values[0]), float(values[-1]), size)
    # Rank 0 serves torch's key-value store, so it must not end before the other ranks have used the store.
    distributed.barrier()
    return {"ms": min(times), "size": size, "hosts": [socket.gethostname()]}


def mpi(asked: dict[str, object]) -> dict[str, object] | None:
    """Time all-reduces by mpi4py. On rank 0 return the same dict as `gloo`, else None."""
    module = importlib.import_module("mpi4py.MPI")
    numbers = importlib.import_module("array")
    # mpi4py initializes MPI on import, and finalizes it when the program ends.
    world = module.COMM_WORLD
    mine = numbers.array("f", [float(world.rank + 1)]) * asked["elements"]
    times = []
    for _ in range(_ROUNDS):
        values = numbers.array("f", mine)
        start = time.monotonic()
        world.Allreduce(module.IN_PLACE, values)
        times.append((time.monotonic() - start) * 1e3)
        _check(values[0], values[-1], world.size)
    hosts = world.gather(socket.gethostname())
    return {"ms": min(times), "size": world.size, "hosts": hosts} if world.rank == 0 else None


def _check(first: float, last: float, size: int) -> None:
    wanted = size * (size + 1) / 2
    if (first, last) != (wanted, wanted):
        raise ArithmeticError(f"the sum over {size} ranks is {first} and {last}, not {wanted}")
