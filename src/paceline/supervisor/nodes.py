"""The supervisor's side of what runs once on each node, before the workers and after them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import EngineError
from paceline.job.plan import Command, RemotePaths
from paceline.runs.failure import FailureReport, signal_name
from paceline.runs.folder import RunFolder
from paceline.runs.logs import last_lines
from paceline.supervisor.signals import Wake
from paceline.system import processes
from paceline.system.files import read_json
from paceline.targets import Nodes

_TICK_S = 0.05
#: How long a node's process may take to end when it is told to.
_END_S = 5.0


@dataclass(frozen=True, kw_only=True)
class NodeOutcome:
    """How it went on all nodes. results: one for each node; stopped: why it was stopped from outside."""

    results: tuple[dict[str, Any], ...] = ()
    failure: FailureReport | None = None
    stopped: str | None = None


def on_nodes(
    verb: str,
    node_ranks: Iterable[int],
    *,
    folder: RunFolder,
    nodes: Nodes,
    seen: RemotePaths,
    wake: Wake,
    stop: Callable[[], str | None],
) -> NodeOutcome:
    """Run `verb` on these nodes at once; when this returns, no process of theirs is left.

    verb: "prepare", "check", "store", "remove" or "clean". The first that fails, or is lost, ends the others.
    """
    result = {
        "prepare": folder.prepared,
        "check": folder.stored,
        "store": folder.stored,
        "remove": folder.cleaned,
        "clean": folder.cleaned,
    }[verb]
    results = {rank: result(rank) for rank in node_ranks}
    running: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    wake.heed(nodes)
    try:
        for rank, path in results.items():
            path.unlink(missing_ok=True)
            command = Command(
                argv=(seen.python, "-m", "paceline.node", verb, str(seen.run_dir), str(rank), *options(seen)),
                environment={"PYTHONPATH": str(seen.library_dir)},
                node_rank=rank,
                log=RunFolder(seen.run_dir).prepare_log(rank),
            )
            # In the run's own folder, not the snapshot's: the user's modules must not stand in the way of ours.
            started = nodes.start(command, seen.run_dir, _environment(folder, seen, nodes.shell(rank)))
            running[rank, started.pid] = rank
        while running and all(code == 0 for code in ends.values()):
            if (reason := stop()) is not None:
                return NodeOutcome(stopped=reason)
            wake.sleep(_TICK_S)
            for ended in nodes.ended():
                if (ended.node_rank, ended.pid) in running:
                    ends[running.pop((ended.node_rank, ended.pid))] = ended.exit_code
            if lost := {rank: how for rank, how in nodes.lost().items() if rank in results}:
                return NodeOutcome(failure=_lost_report(nodes, lost))
    except EngineError:
        raise
    except OSError as error:
        # The interpreter that the nodes were to have.
        message = f"{seen.python!r} could not be started to prepare the nodes: {error.strerror or error}."
        return NodeOutcome(failure=FailureReport(cause="prepare", message=message))
    finally:
        _end(nodes, running)
    for rank, code in ends.items():
        if code != 0:
            failure = _report(verb, rank, code, read_json(results[rank]), folder)
            if verb == "prepare" and not seen.is_shared:
                name = nodes.nodes[rank].name  # its paths are those of its own disk
                failure = replace(failure, message=f"On node {name}: {failure.message}", node=name)
            return NodeOutcome(failure=failure)
    return NodeOutcome(results=tuple(read_json(path) for path in results.values()))


def how_lost(how: str, name: str) -> str:
    """The target's words on the loss of a node, for a sentence that has named it already."""
    return how.removeprefix(f"{name}: ").rstrip(".")


def options(seen: RemotePaths) -> tuple[str, ...]:
    """What tells a node that it has to make the workers' folder itself, of the snapshot that was sent."""
    return () if seen.is_shared else ("--apart",)


def _environment(folder: RunFolder, seen: RemotePaths, shell: Mapping[str, str] | None) -> dict[str, str]:
    """The node's, or the supervisor's own, but marked as the run's: by this, what a killed supervisor has left is found."""
    shell = os.environ if shell is None else shell
    kept = {name: value for name, value in shell.items() if name != processes.SUPERVISOR_VARIABLE}
    return kept | {"PACELINE_RUN_ID": folder.run_id, "PACELINE_RUN_DIR": str(seen.run_dir)}


def _end(nodes: Nodes, running: Mapping[tuple[int, int], int]) -> None:
    """SIGTERM, a moment to leave, then SIGKILL to them and to whatever they have started."""
    for (_, pid), rank in running.items():
        nodes.signal(pid, rank, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while any(nodes.is_alive(pid, rank) for (_, pid), rank in running.items()) and time.monotonic() < deadline:
        nodes.ended()
        time.sleep(0.02)
    nodes.kill_all()
    nodes.ended()


def _lost_report(nodes: Nodes, lost: Mapping[int, str]) -> FailureReport:
    rank, how = min(lost.items())
    name = nodes.nodes[rank].name
    return FailureReport(cause="node_lost", message=f"Node {name} was lost: {how_lost(how, name)}.", node=name)


def _report(verb: str, node_rank: int, code: int, result: Any, folder: RunFolder) -> FailureReport:
    told = (result or {}).get("failure")
    log = folder.prepare_log(node_rank)
    if told is None:
        what = {
            "prepare": "being prepared",
            "check": "looking at where outputs are stored",
            "store": "storing its outputs",
            "remove": "ending its containers",
            "clean": "being cleaned up",
        }[verb]
        how = f"was killed by {signal_name(code - 128)}" if code > 128 else f"ended with exit code {code}"
        told = {"cause": "prepare", "message": f"Node {node_rank} was {what} when the process that did it {how}."}
    return FailureReport(
        cause=told["cause"],
        message=told["message"],
        last_lines=tuple(last_lines(log, 20)),
        see=f"paceline logs {folder.run_id} --prepare",
    )
