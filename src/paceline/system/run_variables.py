"""Read a run's environment variables: ranks set by launchers such as torchrun, and resize requests.

Every Python process below a worker loads this module, so it imports little. docs/decisions/0018-elastic.md explains resizing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping


#: Variable with "<rank>/<world size>" of a process that joined a process group without a launcher (`worker.nested`).
VARIABLE = "PACELINE_NESTED_RANK"
#: Variable with the worker's output file or pipe: "<device>:<inode>".
OUTPUT_VARIABLE = "PACELINE_WORKER_OUTPUT"

#: Variable with the folder of the run that `paceline.init` started in this process or in a parent process.
TRACKED_VARIABLE = "PACELINE_TRACKED_RUN"

#: Variable with the minimum number of nodes; set only in workers of elastic runs.
MIN_NODES_VARIABLE = "PACELINE_ELASTIC_MIN_NODES"
MAX_NODES_VARIABLE = "PACELINE_ELASTIC_MAX_NODES"  # variable with the maximum number of nodes
#: Variable with the path of a file that exists once the supervisor wants to continue with more nodes.
REQUEST_VARIABLE = "PACELINE_ELASTIC_REQUEST"
#: Exit code of a worker that has saved its checkpoint after a request to resize. Codes up to 78 are those of sysexits.h.
EXIT_RESIZE = 79

#: Variable with the number of a worker's first process group: 0, or more if it replaces a lost worker (on_failure="replace").
GENERATION_VARIABLE = "PACELINE_GENERATION"


def nested_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return (rank, world size) if a launcher in the user's script started this process.

    Return None for a worker itself. The launcher may be torchrun, accelerate, deepspeed or Lightning. Each worker of a
    run may start a launcher, so the ranks of several launchers are interleaved:

        worker 0: ranks 0 2 4
        worker 1: ranks 1 3 5
    """
    found = by_launcher(environ)
    if found is None:
        # Only Paceline sets this variable, and never in a run's own workers, so this process is not a run's worker.
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
    """Return (rank, world size, local rank) from a launcher's variables; None without them."""
    # Lightning sets no RANK, only LOCAL_RANK and NODE_RANK.
    local = environ.get("LOCAL_RANK", "") if environ.get("NODE_RANK", "0") == "0" else ""
    torch = environ.get("RANK") or local, environ.get("WORLD_SIZE", ""), environ.get("LOCAL_RANK", "")
    mpi = tuple(environ.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("RANK", "SIZE", "LOCAL_RANK"))
    own = environ.get("PACELINE_RANK", ""), environ.get("PACELINE_WORLD_SIZE", "")
    # The run's own launcher sets these variables too. A torchrun that a worker has started sets another run id.
    is_of_run = environ.get("TORCHELASTIC_RUN_ID") in (None, environ.get("PACELINE_RUN_ID"))
    for rank, size, local in (torch, mpi):
        is_own = (rank, size) == own and is_of_run
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) != 1 and not is_own:
            return int(rank), int(size), int(local if local.isdecimal() else rank)
    return None


def launched_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the (rank, world size) of a process outside a run.

    torchrun, mpirun or srun set the numbers. Without a launcher, the result is (0, 1).
    """
    if (found := by_launcher(environ)) is not None:
        return found[:2]
    for rank, size in (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("PMI_RANK", "PMI_SIZE")):
        numbers = environ.get(rank, ""), environ.get(size, "")
        if all(map(str.isdecimal, numbers)) and int(numbers[0]) < int(numbers[1]):
            return int(numbers[0]), int(numbers[1])
    return 0, 1


def launch_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return a text that identifies a launch on all its ranks, such as torchrun's address."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return " ".join(environ.get(name, "") for name in names)


def is_resize_requested() -> bool:
    """Return whether this attempt must end at its next checkpoint, to add nodes.

    Ranks may see the supervisor's request at different times, so the ranks must agree on a common step to end at.
    """
    path = os.environ.get(REQUEST_VARIABLE)
    return path is not None and os.path.exists(path)
