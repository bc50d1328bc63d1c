"""Plain programs as runs: `paceline.init()`, `log()` and `finish()`.

Outside a run, `init` starts an interactive run of the configured workspace (`paceline.runs.interactive`). In a worker, all three
functions use the worker's run. Under torchrun, mpirun or srun, rank 0 starts the run. The other ranks read its id from:

    <workspace>/launches/<hash of the launch>.json    {"run_id": "train_1795238004_07625d4f", "launcher": "host 4711 88211"}
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import FileNameError, RunNotFoundError, RunStateError, UserError
from paceline.runs import interactive, read, states, store, tags_and_properties
from paceline.runs.context import WorkerContext
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id, experiment_name
from paceline.system import processes
from paceline.system.files import read_json, write_json
from paceline.system.run_variables import TRACKED_VARIABLE, launch_name, launched_rank
from paceline.system.serialization import flat
from paceline.workspace import Experiment, Run, Workspace

__all__ = ["finish", "init", "log"]

#: Maximum number of characters of a parameter's value.
_LONGEST = 10_000
#: Seconds after which a rank reports that it waits for rank 0; seconds after which it stops waiting.
_SAY_S, _PATIENCE_S = 5.0, 300.0

_lock = threading.Lock()
_current: Run | None = None


def init(
    params: object = None,
    *,
    experiment: str | None = None,
    name: str | None = None,
    tags: Mapping[str, object] | None = None,
) -> Run:
    """Track this program as a run.

    The run ends with the program, or with `finish`. Inside a run, as under `paceline run`, return that run. A second
    call returns the run of the first call. Under torchrun, mpirun or srun, all ranks get one run.

    Args:
        params: Parameters of the run: a dict, an `argparse.Namespace` or a dataclass. Dots join the keys of nested dicts. A
            parameter keeps its first value.
        experiment: Name of the experiment; default: the working directory's name. Ignored inside a run.
        name: Name of the run, for people.
        tags: Tags of the run.

    Raises:
        UserError: A value is wrong, or the workspace cannot be used.
        RunStateError: Another experiment is tracked already, or rank 0 did not call `init`.

    Examples:
        >>> run = paceline.init({"lr": 0.1}, experiment="digits")
        >>> for step in range(3):
        ...     paceline.log({"loss": 1 / (1 + step)}, step=step)
        >>> paceline.finish()
        >>> run.status, run.properties
        ('Completed', {'lr': '0.1'})
    """
    global _current
    # Store an empty dict as one parameter, because it has no entries that could become parameters.
    named = flat(_mapping(params), is_whole=lambda value: not value)
    values = {key: str(value)[:_LONGEST] for key, value in named}
    with _lock:
        run = _open_run()
        if run is None:
            run = _started(experiment)
        elif experiment not in (None, run.experiment.name) and run.kind == "interactive":
            raise RunStateError(
                f"paceline.init(experiment={experiment!r}): this program logs to {run.id} of experiment "
                f"{run.experiment.name!r}. Call paceline.finish() first."
            )
        _current = run
    context = WorkerContext.of_process()
    # Store only rank 0's parameters, because the other ranks have equal parameters, except for values such as local_rank.
    if context is None or context.rank == 0:
        _keep(run, values)
        if name is not None:
            tags_and_properties.set_name(run.folder.notes, "display_name", name)
        run.set_tags(tags or {})
    return run


def log(name: str | Mapping[str, object], value: object = ..., *, step: int | None = None) -> None:
    """Log values to this program's run.

    See `Run.log`.

    Args:
        name: Name of the metric, or a dict of name to value.
        value: The value. Omit it if `name` is a dict.
        step: Training step of the values.

    Raises:
        RunStateError: The program is outside a run, and `init` was not called.
        MetricError: A name is empty or not a string, or there is no value.

    Examples:
        >>> run = paceline.init()
        >>> paceline.log({"loss": 0.5, "accuracy": 0.9}, step=1)
        >>> paceline.finish()
        >>> run.get_metrics()
        {'loss': 0.5, 'accuracy': 0.9}
    """
    (_current or _of_surroundings()).log(name, value, step=step)


def finish() -> None:
    """End the run of `init` as Completed.

    Do nothing if `init` has not started a run, or if the program belongs to a submitted run.

    Examples:
        >>> run = paceline.init()
        >>> paceline.finish()
        >>> run.status
        'Completed'
    """
    global _current
    with _lock:
        run, _current = _current, None
        if run is not None and os.environ.get(TRACKED_VARIABLE) == str(run.folder.path):
            del os.environ[TRACKED_VARIABLE]
            # Only the process that logs the run may end it. In all other processes, `complete` raises this error.
            with contextlib.suppress(RunStateError):
                run.complete()


def _of_surroundings() -> Run:
    """Return the run that `paceline.log` writes to. Raise RunStateError without a run."""
    global _current
    with _lock:
        _current = _current or _open_run()
        if _current is None:
            raise RunStateError("paceline.log() has no run to log to. Call paceline.init() before the first value.")
        return _current


def _open_run() -> Run | None:
    """Return this process's live run, or None."""
    if _current is not None and not store.has_ended(_current.folder):
        return _current
    context = WorkerContext.of_process()
    if context is None or (TRACKED_VARIABLE in os.environ and store.has_ended(RunFolder(context.run_dir))):
        return None
    return Run.get_context()


def _started(experiment: str | None) -> Run:
    """Return the run that rank 0 starts and the other ranks use."""
    workspace = Workspace.from_config()
    rank, world_size = launched_rank()
    launch, launcher = _launch_file(workspace.path), _launcher()
    if rank == 0:
        os.environ.pop(TRACKED_VARIABLE, None)
        run = Experiment(workspace, experiment or experiment_name(Path.cwd())).start_logging(outputs=False)
        folder = run.folder
        print(f"paceline: run {run.display_name} ({run.id}); paceline ui shows it", file=sys.stderr)
        if world_size > 1:
            launch.parent.mkdir(exist_ok=True)
            write_json(launch, {"run_id": folder.run_id, "launcher": launcher})
    else:
        folder = _wait_for_rank_0(workspace.runs_dir, launch, launcher, rank)
        atexit.register(_note_failure, folder, rank, os.getpid())
    # Processes that this program starts, such as workers of a DataLoader, read this variable, and so belong to the run, too.
    os.environ[TRACKED_VARIABLE] = str(folder.path)
    return Run.get_context()


def _launch_file(workspace: Path) -> Path:
    name = launch_name()
    # If no variable names the launch, use the launcher process as name. If the address is localhost, add this machine's name.
    if not name.strip():
        name = _launcher()
    elif (
        os.environ.get("MASTER_ADDR", "") in ("", "localhost", "127.0.0.1", "::1") and "SLURM_JOB_ID" not in os.environ
    ):
        name += f" {socket.gethostname()}"
    return workspace / "launches" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def _launcher() -> str:
    """Return a text that identifies this launch: host, launcher process and restart."""
    parent = os.getppid()
    started = (processes.stat_of(parent) or [""])[19:20]
    return " ".join([socket.gethostname(), str(parent), *started, os.environ.get("TORCHELASTIC_RESTART_COUNT", "")])


def _wait_for_rank_0(runs_dir: Path, launch: Path, launcher: str, rank: int) -> RunFolder:
    end_s, pause_s = time.monotonic() + _PATIENCE_S, 0.02
    text = f"paceline: rank {rank} waits for rank 0 to call paceline.init()"
    message = threading.Timer(_SAY_S, print, [text], {"file": sys.stderr})
    message.start()
    try:
        while time.monotonic() < end_s:
            match read_json(launch):
                case {"run_id": str(run_id), "launcher": started_by}:
                    with contextlib.suppress(RunNotFoundError, FileNameError):
                        folder = RunFolder(runs_dir / check_run_id(run_id))
                        # A run that has ended is from an earlier launch, unless this process's launcher has started the run.
                        if not read.record(folder).is_terminal or started_by == launcher:
                            return folder
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)
    finally:
        message.cancel()
    raise RunStateError(
        f"rank {rank} has waited {_PATIENCE_S:.0f} s for rank 0 to call paceline.init(). "
        "Call it on every rank, or on rank 0 only."
    )


def _note_failure(folder: RunFolder, rank: int, pid: int) -> None:
    """Write this rank's failure to a file, because rank 0 can't report it."""
    status, report = interactive.end_of_program()
    if status == states.FAILED and report is not None and os.getpid() == pid:
        with contextlib.suppress(OSError):
            write_json(folder.rank_failure, dataclasses.replace(report, rank=rank).to_json())


def _keep(run: Run, values: Mapping[str, str]) -> None:
    """Store parameters as properties. A parameter keeps its first value."""
    there = tags_and_properties.add_properties(run.folder.notes, values, if_missing=True)
    for key in [key for key, value in values.items() if there.get(key, value) != value]:
        print(f"paceline: parameter {key!r} stays {there[key]!r}; {values[key]!r} came later", file=sys.stderr)


def _mapping(params: object) -> Mapping[str, object]:
    match params:
        case None:
            return {}
        case argparse.Namespace():
            return vars(params)
        case Mapping():
            return params
        case _ if dataclasses.is_dataclass(params) and not isinstance(params, type):
            return dataclasses.asdict(params)
    raise UserError(
        f"params={params!r} is a {type(params).__name__}. Give a dict, an argparse.Namespace or a dataclass."
    )
