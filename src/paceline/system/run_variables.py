"""The rank of a process that a program inside a run has started as one of several: by torchrun, accelerate, deepspeed,
Lightning, or as a process of its own.

Standard library alone, and little of it: every Python process below a worker loads this.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping


#: "<rank>/<world size>", set once a process without a launcher's variables has joined a process group (`worker.nested`).
VARIABLE = "PACELINE_NESTED_RANK"
#: Names the file, or the pipe, that the worker writes into: "<device>:<inode>".
OUTPUT_VARIABLE = "PACELINE_WORKER_OUTPUT"

#: The fewest and the most nodes that the run may have: set in the workers of elastic runs alone.
MIN_NODES_VARIABLE = "PACELINE_ELASTIC_MIN_NODES"
MAX_NODES_VARIABLE = "PACELINE_ELASTIC_MAX_NODES"
#: Names a file that is there once the supervisor wants to go on with more nodes.
REQUEST_VARIABLE = "PACELINE_ELASTIC_REQUEST"
#: A worker ends so once its checkpoint is whole and it has seen the request. The codes to 78 are those of sysexits.h.
EXIT_RESIZE = 79


def nested_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return this process's rank in the run, and the size of its world, where a program inside the run gave it a rank.

    A run of several workers has numbers of its own for such ranks, for each worker may start a rank 1:

        worker 0: ranks 0 2 4       the first rank has its worker's number
        worker 1: ranks 1 3 5

    Returns:
        None for a worker of the run.
    """
    found = by_launcher(environ)
    if found is None:
        # Set by Paceline alone, so it never names a worker of the run.
        rank, _, size = environ.get(VARIABLE, "").partition("/")
        if not size:
            return None
        found = int(rank), int(size), int(rank)
    rank_there, world_size, local_rank = found
    workers = int(environ.get("PACELINE_WORLD_SIZE") or 1)
    if workers == 1:
        return rank_there, world_size
    return local_rank * workers + int(environ.get("PACELINE_RANK") or 0), world_size


def by_launcher(environ: Mapping[str, str] = os.environ) -> tuple[int, int, int] | None:
    """Return the rank, world size and local rank of the variables that a launcher inside the run has set; else None."""
    # Lightning sets no RANK.
    local = environ.get("LOCAL_RANK", "") if environ.get("NODE_RANK", "0") == "0" else ""
    torch = environ.get("RANK") or local, environ.get("WORLD_SIZE", ""), environ.get("LOCAL_RANK", "")
    mpi = tuple(environ.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("RANK", "SIZE", "LOCAL_RANK"))
    own = environ.get("PACELINE_RANK", ""), environ.get("PACELINE_WORLD_SIZE", "")
    # The run's own launcher gives its own names: torchrun below a worker of as many ranks has another run id.
    is_of_run = environ.get("TORCHELASTIC_RUN_ID") in (None, environ.get("PACELINE_RUN_ID"))
    for rank, size, local in (torch, mpi):
        if rank.isdigit() and size.isdigit() and int(rank) < int(size) != 1 and not ((rank, size) == own and is_of_run):
            return int(rank), int(size), int(local if local.isdigit() else rank)
    return None


def is_resize_requested() -> bool:
    """True if the supervisor wants this attempt to end at its next checkpoint, to go on with more nodes.

    Ranks of one world may be told a moment apart: they have to agree on what one of them has seen.
    """
    path = os.environ.get(REQUEST_VARIABLE)
    return path is not None and os.path.exists(path)
