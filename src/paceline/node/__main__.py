"""Run `python -m paceline.node VERB RUN_DIR NODE_RANK [option ...]`.

VERB: prepare (environment, image, data), check or store (outputs), remove (containers), clean (containers and links to cached
data) or rescue (training states in memory). --apart: the node has its own folder for the run, and creates the workers' folder
in it. --nodes N: number of nodes of this attempt of an elastic run. --spare PATH, --lost RANKS (for rescue): path prefix of the
files of warm spares (processes that fork workers), and ranks of the lost nodes.

The program prints progress to standard output, and writes the result or the failure to a JSON file in the run's folder.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.errors import (
    EngineError,
    EnvironmentBuildError,
    EnvironmentSpecError,
    LauncherError,
    PacelineError,
    TransferError,
)
from paceline.job.job import Job
from paceline.node import output
from paceline.node.output import check_outputs, store_outputs
from paceline.node.prepare import prepare
from paceline.remote.staging.stage_in import as_here
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.system.files import is_full, write_json

if __name__ == "__main__":
    # Loaded modules stay until the end, so let no garbage collection scan them before `main`, which enables it again.
    gc.disable()


def main(argv: list[str]) -> int:
    gc.freeze()
    gc.enable()
    verb, folder, node_rank = argv[0], RunFolder(Path(argv[1])), int(argv[2])
    record = store.stored(folder)
    assert record.job is not None, "only submitted runs have nodes"
    job = record.job
    # Only `prepare` and `rescue` need the number of nodes. To check or store outputs, the supervisor calls this program for one
    # node, and one node may be fewer than the job's minimum.
    if "--nodes" in argv and verb in ("prepare", "rescue"):
        job = job.resized(int(argv[argv.index("--nodes") + 1]))
    work: dict[str, tuple[Callable[[], dict[str, object]], Path]] = {
        "prepare": (lambda: prepare(job, folder, node_rank, apart="--apart" in argv), folder.prepared(node_rank)),
        "check": (lambda: check_outputs(job.inputs, as_here(folder)), folder.stored(node_rank)),
        "store": (lambda: store_outputs(job, folder, node_rank), folder.stored(node_rank)),
        "remove": (lambda: remove_containers(job, folder), folder.cleaned(node_rank)),
        "clean": (lambda: clean(job, folder), folder.cleaned(node_rank)),
        "rescue": (lambda: _rescue(job, folder, node_rank, argv), folder.rescued(node_rank)),
    }
    make, path = work[verb]
    try:
        result = make()
    # Signals are not caught: a signal ends the process without a result, and the supervisor reports the signal's name.
    except Exception as error:
        result = {"failure": _failure(error)}
    finally:
        output.close()
    # Write the result last: the supervisor reads it after the end of this process.
    path.parent.mkdir(exist_ok=True)
    write_json(path, result)
    return 1 if "failure" in result else 0


def _rescue(job: Job, folder: RunFolder, node_rank: int, argv: list[str]) -> dict[str, object]:
    from paceline.node.states import rescue

    spare, lost = (argv[argv.index(name) + 1] for name in ("--spare", "--lost"))
    ranks = [int(word) for word in lost.split(",") if word]
    return rescue(job, folder, node_rank, spare.replace("%", str(node_rank)), ranks)


def _failure(error: Exception) -> dict[str, str]:
    """Return the cause and message of an exception, for the failure report."""
    if isinstance(error, (EnvironmentBuildError, EnvironmentSpecError)):
        return {"cause": "environment", "message": str(error)}
    if isinstance(error, (LauncherError, EngineError)) and not isinstance(error, TransferError):
        return {"cause": "launcher", "message": str(error)}
    if isinstance(error, PacelineError):
        return {"cause": "data", "message": str(error)}
    if isinstance(error, OSError) and is_full(error):
        where = f" ({error.filename!r})" if error.filename else ""
        return {"cause": "disk", "message": f"The disk is full{where}. Free some space and submit again."}
    import traceback

    traceback.print_exc()
    return {
        "cause": "internal",
        "message": f"An error of Paceline's own: {type(error).__name__}: {error}. Please report it with this log.",
    }


def clean(job: Job, folder: RunFolder) -> dict[str, object]:
    """Remove a run's containers and its links to cached data."""
    remove_containers(job, folder)
    if any(not reference.is_output for reference in job.inputs):
        from paceline.data.transfer.cache import DataCache

        # Remove only the run's folder of links to cached files. The cached files stay for other runs.
        DataCache().drop_views(folder.run_id)
    return {}


def remove_containers(job: Job, folder: RunFolder) -> dict[str, object]:
    """Remove containers of the run that a container engine still has."""
    if job.environment.docker_image is not None:
        from paceline.containers import find_engine, remove

        # Wait only briefly for a container that is still starting: each node removes containers a second time at the end.
        remove(find_engine(to_start=False), folder.run_id, settle_s=0.25)
    return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
