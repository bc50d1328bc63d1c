"""`python -m paceline.node prepare|check|store|remove|clean RUN_DIR NODE_RANK [--apart] [--nodes N]`.

--apart: the node has a folder of its own for the run, and makes the workers' folder in it of the snapshot that was sent.
--nodes: so many nodes this attempt of an elastic run has.

Says on standard output what it does, live; leaves its result, or why there is none, in one JSON file in the run's folder.
"""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from paceline.system.files import write_json

if __name__ == "__main__":
    # What is loaded stays until the end: the collector would look at all of it again and again (`main` starts it).
    gc.disable()


def main(argv: list[str]) -> int:
    gc.freeze()
    gc.enable()
    verb, folder, node_rank = argv[0], RunFolder(Path(argv[1])), int(argv[2])
    record = store.stored(folder)
    assert record.job is not None, "only submitted runs have nodes"
    job = record.job
    # A node of `ThisHost`, which looks at or stores outputs alone, counts as one, and no range need allow that.
    if "--nodes" in argv and verb == "prepare":
        job = job.resized(int(argv[argv.index("--nodes") + 1]))
    work: dict[str, tuple[Callable[[], dict[str, Any]], Path]] = {
        "prepare": (lambda: prepare(job, folder, node_rank, apart="--apart" in argv), folder.prepared(node_rank)),
        "check": (lambda: check_outputs(job.inputs, as_here(folder)), folder.stored(node_rank)),
        "store": (lambda: store_outputs(job, folder, node_rank), folder.stored(node_rank)),
        "remove": (lambda: remove_containers(job, folder), folder.cleaned(node_rank)),
        "clean": (lambda: clean(job, folder), folder.cleaned(node_rank)),
    }
    make, path = work[verb]
    try:
        result = make()
    # A signal is not meant: it ends the process without a result, and the supervisor tells which one it was.
    except Exception as error:
        result = {"failure": _failure(error)}
    finally:
        output.close()
    # The last thing that is done: the supervisor reads the result when it has seen this process's end.
    path.parent.mkdir(exist_ok=True)
    write_json(path, result)
    return 1 if "failure" in result else 0


def _failure(error: Exception) -> dict[str, str]:
    """Cause and message, for the failure report."""
    if isinstance(error, (EnvironmentBuildError, EnvironmentSpecError)):
        return {"cause": "environment", "message": str(error)}
    if isinstance(error, (LauncherError, EngineError)) and not isinstance(error, TransferError):
        return {"cause": "launcher", "message": str(error)}
    if isinstance(error, PacelineError):
        return {"cause": "data", "message": str(error)}
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename!r})" if error.filename else ""
        return {"cause": "disk", "message": f"The disk is full{where}. Free some space and submit again."}
    import traceback  # of what every node loads, nothing else wants it

    traceback.print_exc()
    return {
        "cause": "internal",
        "message": f"An error of Paceline's own: {type(error).__name__}: {error}. Please report it with this log.",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def clean(job: Job, folder: RunFolder) -> dict[str, Any]:
    """End what a container engine still has of the run, and drop its views of the node's data."""
    remove_containers(job, folder)
    if any(not reference.is_output for reference in job.inputs):
        from paceline.data.transfer.cache import DataCache

        # What the run saw of the cache; the files themselves stay in it for the next run.
        DataCache().drop_views(folder.run_id)
    return {}


def remove_containers(job: Job, folder: RunFolder) -> dict[str, Any]:
    """End what a container engine still has of the run."""
    if job.environment.docker_image is not None:
        from paceline.containers import find_engine, remove

        # Twice in a run's life, so that it need not be long.
        remove(find_engine(to_start=False), folder.run_id, settle_s=0.25)
    return {}
