"""Detect ranks that a program inside a run starts, and give each of them its own log.

Some ranks find a launcher's variables when their interpreter starts. Others are detected when they join a torch process
group (`mp.spawn`, `ddp_spawn`). From then on Paceline logs a rank's metrics under its own number. Paceline writes the
rank's output to `rank_<n>.log` instead of the worker's log, unless a launcher redirects the output.
"""

from __future__ import annotations

import os
import sys

from paceline.system.run_variables import OUTPUT_VARIABLE, VARIABLE, by_launcher, nested_rank

# Don't import TYPE_CHECKING from typing, which is slow to load: each worker loads this module before the user's script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_C10D = "torch.distributed.distributed_c10d"
#: Pid of the worker's first process. Its output stays in the worker's log even if the process joins a process group.
_worker_pid = 0


def begin_worker(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Let a worker detect ranks that its script starts."""
    global _worker_pid
    _worker_pid = os.getpid()
    environ[OUTPUT_VARIABLE] = _file(1)
    _be_live()
    # Only in a run with one worker, a process that joins a process group must be a rank that the script itself has started.
    if environ.get("PACELINE_WORLD_SIZE") == "1":
        _follow_torch()


def begin_below() -> None:
    """Let a worker's child process detect its own rank.

    `sitecustomize` calls this function, which also records metrics that the process logs by libraries such as MLflow.
    """
    from paceline.trackers import hooks

    hooks.install()
    _be_live()
    if by_launcher() is None:
        _follow_torch()
    _take_log()


def _be_live() -> None:
    """Flush output after each line, and print the stack if native code crashes."""
    if "PYTHONUNBUFFERED" not in os.environ and (reconfigure := getattr(sys.stdout, "reconfigure", None)):
        reconfigure(line_buffering=True)
    if "PYTHONFAULTHANDLER" not in os.environ:
        import faulthandler

        faulthandler.enable(2)


def _follow_torch() -> None:
    from paceline.system.lazy_import import when_loaded

    when_loaded(_C10D, _listen)


def _listen(module: ModuleType) -> None:
    import functools

    made = module.init_process_group

    @functools.wraps(made)
    def init_process_group(*given: Any, **options: Any) -> Any:
        result = made(*given, **options)
        try:
            _joined(module.get_rank(), module.get_world_size())
        except Exception:  # the backend does not report the rank, so keep the log
            pass
        return result

    module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _joined(rank: int, size: int) -> None:
    if size == 1 or by_launcher() is not None or _is_worker(rank, size):
        return
    os.environ[VARIABLE] = f"{rank}/{size}"
    _take_log()


def _is_worker(rank: int, size: int) -> bool:
    """Return whether this process is the worker, or was started by its shell script."""
    from multiprocessing import process

    own = os.environ.get("PACELINE_RANK"), os.environ.get("PACELINE_WORLD_SIZE")
    return os.getpid() == _worker_pid or ((str(rank), str(size)) == own and process.parent_process() is None)


def _take_log() -> None:
    """Redirect output, also of native code and child processes, to this rank's log."""
    found = nested_rank()
    if found is None or str(found[0]) == os.environ["PACELINE_RANK"]:
        return
    shared = os.environ.get(OUTPUT_VARIABLE)
    numbers = [number for number in (1, 2) if _file(number) == shared]
    if not numbers:
        return
    folder = os.path.join(os.environ["PACELINE_RUN_DIR"], "attempts", os.environ["PACELINE_ATTEMPT"])
    try:
        log = os.open(os.path.join(folder, f"rank_{found[0]}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:  # the disk is full, so keep the worker's log
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for number in numbers:
        os.dup2(log, number)
    os.close(log)
    # Name the new log in this variable, by which a child process that becomes another rank knows to leave it.
    os.environ[OUTPUT_VARIABLE] = _file(numbers[0])


def _file(number: int) -> str:
    try:
        found = os.fstat(number)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"
