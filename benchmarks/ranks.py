"""Benchmarks on several processes: a script starts itself again under mpirun, and reads what its rank 0 has found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import program, scratch

MARK = "--rank"


def figures(ranks: int, *options: str) -> dict[str, Any]:
    """What rank 0 of the calling script, started on so many processes, has given to `tell`."""
    with scratch() as shared:
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
            # What a worker of a run over MPI finds.
            "THP_MEM_ALLOC_ENABLE": "1",
        }
        mpirun = [program("mpirun"), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks)]
        script = str(Path(sys.argv[0]).resolve())
        subprocess.run([*mpirun, sys.executable, script, *options, MARK, str(shared)], env=environment, check=True)
        found = json.loads((shared / "figures.json").read_text())
        assert isinstance(found, dict)
        return found


def is_rank() -> bool:
    """Whether this process is one of those that `figures` has started."""
    return MARK in sys.argv


def tell(found: dict[str, Any]) -> None:
    """Leave the figures for the process that has started the ranks. Called by rank 0."""
    (folder() / "figures.json").write_text(json.dumps(found))


def with_gloo() -> Any:
    """horovod.torch, initialised; beside it torch.distributed's default group, which is Gloo's. One thread each."""
    import torch
    import torch.distributed as dist

    import paceline.compat

    paceline.compat.install("horovod")
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", init_method=f"file://{folder()}/meeting", rank=hvd.rank(), world_size=hvd.size())
    return hvd


def timed(barrier: Callable[[], object], call: Callable[[], object], calls: int) -> float:
    """Seconds that one of so many calls takes, begun by all ranks together."""
    barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def then(step: Callable[[], object], barrier: Callable[[], object]) -> Callable[[], None]:
    """The step, after which all ranks wait for one another: what any exchange makes them do, however fast it is."""

    def both() -> None:
        step()
        barrier()

    return both


def folder() -> Path:
    """The folder of these ranks, in which they can meet."""
    return Path(sys.argv[sys.argv.index(MARK) + 1])
