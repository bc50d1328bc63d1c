"""The rank of a process that a program inside a run has started as one of several: by torchrun, accelerate, deepspeed,
Lightning, or as a process of its own.

Standard library alone, and little of it: every Python process below a worker loads this.
"""

from __future__ import annotations

import os

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping

#: "<rank>/<world size>", set once a process without a launcher's variables has joined a process group (`worker.nested`).
VARIABLE = "PACELINE_NESTED_RANK"
#: Names the file, or the pipe, that the worker writes into: "<device>:<inode>".
OUTPUT_VARIABLE = "PACELINE_WORKER_OUTPUT"


def nested_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the rank and the world size that a launcher inside the run gave this process; None for a worker of the run."""
    # Lightning sets no RANK.
    local = environ.get("LOCAL_RANK", "") if environ.get("NODE_RANK", "0") == "0" else ""
    torch = environ.get("RANK") or local, environ.get("WORLD_SIZE", "")
    mpi = environ.get("OMPI_COMM_WORLD_RANK", ""), environ.get("OMPI_COMM_WORLD_SIZE", "")
    joined = environ.get(VARIABLE, "").partition("/")
    own = environ.get("PACELINE_RANK", ""), environ.get("PACELINE_WORLD_SIZE", "")
    # The run's own launcher gives its own names: torchrun below a worker of as many ranks has another run id.
    is_of_run = environ.get("TORCHELASTIC_RUN_ID") in (None, environ.get("PACELINE_RUN_ID"))
    for rank, size in (torch, mpi, joined[::2]):
        if rank.isdigit() and size.isdigit() and int(rank) < int(size) != 1 and not ((rank, size) == own and is_of_run):
            return int(rank), int(size)
    return None
