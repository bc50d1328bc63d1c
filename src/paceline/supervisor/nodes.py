"""The supervisor's side of what runs once on each node, before the workers and after them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from paceline import processes
from paceline.plan import Command
from paceline.runs.failure import FailureReport, signal_name
from paceline.runs.files import read_json
from paceline.runs.folder import RunFolder
from paceline.runs.logs import last_lines
from paceline.supervisor.wake import Wake
from paceline.targets import Target

_TICK_S = 0.05
#: How long a node's process may take to end when it is told to.
_END_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """How it went on all nodes. results: one for each node; stopped: why it was stopped from outside."""

    results: tuple[dict[str, Any], ...] = ()
    failure: FailureReport | None = None
    stopped: str | None = None


def on_nodes(
    verb: str,
    node_ranks: Iterable[int],
    *,
    folder: RunFolder,
    target: Target,
    wake: Wake,
    stop: Callable[[], str | None],
) -> Done:
    """Run `verb`, "prepare" or "store", on these nodes at once; when this returns, no process of theirs is left.

    The first that fails ends the others.
    """
    results = {rank: folder.prepared(rank) if verb == "prepare" else folder.stored(rank) for rank in node_ranks}
    running: dict[int, int] = {}
    ends: dict[int, int] = {}
    try:
        for rank, path in results.items():
            path.unlink(missing_ok=True)
            command = Command(
                argv=(sys.executable, "-m", "paceline.node", verb, str(folder.path), str(rank)),
                node_rank=rank,
                log=folder.prepare_log(rank),
            )
            # In the run's own folder, not the snapshot's: the user's modules must not stand in the way of ours.
            running[target.start(command, folder.path, _environment(folder)).pid] = rank
        while running and all(code == 0 for code in ends.values()):
            if (reason := stop()) is not None:
                return Done(stopped=reason)
            wake.sleep(_TICK_S)
            for pid, status in processes.reap():
                if pid in running:
                    ends[running.pop(pid)] = processes.shell_exit_code(status)
    finally:
        _end(target, running)
    for rank, code in ends.items():
        if code != 0:
            return Done(failure=_report(verb, rank, code, read_json(results[rank]), folder))
    return Done(results=tuple(read_json(path) for path in results.values()))


def _environment(folder: RunFolder) -> dict[str, str]:
    """The supervisor's own, but marked as the run's: by this, what a killed supervisor has left is found."""
    kept = {name: value for name, value in os.environ.items() if name != processes.SUPERVISOR_VARIABLE}
    return kept | {"PACELINE_RUN_ID": folder.run_id, "PACELINE_RUN_DIR": str(folder.path)}


def _end(target: Target, running: dict[int, int]) -> None:
    """SIGTERM, a moment to leave, then SIGKILL to them and to whatever they have started."""
    for pid, rank in running.items():
        target.signal(pid, rank, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while any(processes.is_alive(pid) for pid in running) and time.monotonic() < deadline:
        processes.reap()
        time.sleep(0.02)
    processes.kill_descendants(os.getpid())
    processes.reap()


def _report(verb: str, node_rank: int, code: int, result: Any, folder: RunFolder) -> FailureReport:
    told = (result or {}).get("failure")
    log = folder.prepare_log(node_rank)
    if told is None:
        what = "being prepared" if verb == "prepare" else "storing its outputs"
        how = f"was killed by {signal_name(code - 128)}" if code > 128 else f"ended with exit code {code}"
        told = {"cause": "prepare", "message": f"Node {node_rank} was {what} when the process that did it {how}."}
    return FailureReport(
        cause=told["cause"],
        message=told["message"],
        last_lines=tuple(last_lines(log, 20)),
        see=f"paceline logs {folder.run_id} --prepare",
    )
