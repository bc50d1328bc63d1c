"""The doctor's all-reduce on a node, by whatever the scripts' own interpreter has: torch over Gloo, or mpi4py.

Sent as text to `python -` for Gloo, started by mpirun for MPI. The imports are by name, because this program belongs to
the interpreter that scripts run in, and Paceline itself needs none of them.

    python - gloo {"rank": 0, "size": 2, "address": ..., "port": ..., "interface": ..., "elements": 1048576,
                   "timeout_s": ...}
    mpirun ... python reduce_on_node.py mpi {"elements": 1048576}
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import socket
import sys
import time
from typing import Any

MARK = "PACELINE-DOCTOR "
#: The first one makes the connections.
_ROUNDS = 3


def gloo(asked: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of the fastest all-reduce among `size` ranks, after its sum was found right."""
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
    # The store's server must outlive every rank's last use of it.
    distributed.barrier()
    return {"ms": min(times), "size": size, "hosts": [socket.gethostname()]}


def mpi(asked: dict[str, Any]) -> dict[str, Any] | None:
    """As `gloo`, on rank 0; None on the other ranks."""
    module = importlib.import_module("mpi4py.MPI")
    numbers = importlib.import_module("array")
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


if __name__ == "__main__":
    # What lies in the working directory must not pass for torch.
    sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
    answer = {"gloo": gloo, "mpi": mpi}[sys.argv[1]](json.loads(sys.argv[2]))
    if answer is not None:
        sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()
    if sys.argv[1] == "gloo":
        # Gloo's threads may wait for a peer that has gone already.
        os._exit(0)
