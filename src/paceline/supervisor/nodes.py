"""Run `paceline.node` once on each node, before the workers start and after they end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import EngineError
from paceline.job.plan import Command, ProcessExit, RemotePaths, StartedCommand
from paceline.runs.failure import FailureReport, signal_name
from paceline.runs.folder import RunFolder
from paceline.supervisor.supervision import Supervision
from paceline.system import processes
from paceline.system.detached_process import library_dir
from paceline.system.files import read_json
from paceline.targets import Nodes
from paceline.targets.local_nodes import LocalNodes

_TICK_S = 0.05
#: Seconds to wait until a node's process has ended after SIGTERM.
_END_S = 5.0
#: Subcommand of `paceline.node` -> function that returns the path of its result file, and a description of its work.
_VERBS: dict[str, tuple[Callable[[RunFolder, int], Path], str]] = {
    "prepare": (RunFolder.prepared, "being prepared"),
    "check": (RunFolder.stored, "looking at where outputs are stored"),
    "store": (RunFolder.stored, "storing its outputs"),
    "remove": (RunFolder.cleaned, "ending its containers"),
    "clean": (RunFolder.cleaned, "being cleaned up"),
    "rescue": (RunFolder.rescued, "writing the states in its memory"),
}


@dataclass(frozen=True, kw_only=True)
class NodeOutcome:
    """The outcome of a program that ran on several nodes.

    results: The result of each node; empty unless the program succeeded on all nodes.
    failure: The report of the first failure, or None.
    stopped: The reason that stopped the program early, such as "cancel", or None.
    """

    results: tuple[dict[str, Any], ...] = ()
    failure: FailureReport | None = None
    stopped: str | None = None


def on_nodes(
    run: Supervision,
    verb: str,
    node_ranks: Iterable[int],
    nodes: Nodes,
    seen: RemotePaths,
    stop: Callable[[], str | None] = lambda: None,
    more: Sequence[str] = (),
) -> NodeOutcome:
    """Run a `paceline.node` command on these nodes in parallel, and await its end.

    verb: The command, such as "prepare", a key of `_VERBS`.
    seen: Paths of the run's folders on the nodes.
    stop: Polled for a reason to stop, such as "cancel"; None to continue.
    more: Further options of the command.

    As soon as the command fails on a node, or a node is lost, end the command on the other nodes.
    """
    folder, wake = run.folder, run.wake
    result, _ = _VERBS[verb]
    results = {rank: result(folder, rank) for rank in node_ranks}
    # A node without shared folders makes the workers' folder itself, from the snapshot that was sent to the node.
    options = [
        *([] if seen.is_shared else ["--apart"]),
        *(["--nodes", str(len(nodes.nodes))] if run.job.node_range else []),
        *more,
    ]
    running: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    error: OSError | None = None
    try:
        commands, shells = [], {}
        for rank, path in results.items():
            # Remove an earlier attempt's result: if this process is killed, the old result would count as the new one.
            path.unlink(missing_ok=True)
            shells[rank] = _environment(folder, seen, nodes.shell(rank))
            commands.append(
                Command(
                    argv=(seen.python, "-m", "paceline.node", verb, str(seen.run_dir), str(rank), *options),
                    environment={"PYTHONPATH": str(seen.library_dir)},
                    node_rank=rank,
                    log=RunFolder(seen.run_dir).prepare_log(rank),
                )
            )
        # Start in the run's own folder: modules in the snapshot must not shadow Paceline's modules.
        for started in all_started(nodes, commands, seen.run_dir, shells):
            if isinstance(started, OSError):
                error = error or started
                continue
            running[started.command.node_rank, started.pid] = started.command.node_rank
        if error is not None:
            raise error
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
        raise  # some EngineErrors are OSErrors too, but mean that the nodes can't be reached
    except OSError as failed:
        # The node lacks the interpreter that it is configured to have.
        message = f"{seen.python!r} could not be started to prepare the nodes: {failed.strerror or failed}."
        return NodeOutcome(failure=FailureReport(cause="prepare", message=message))
    finally:
        _end(nodes, running)
    for rank, code in ends.items():
        if code != 0:
            failure = _report(verb, rank, code, read_json(results[rank]), folder)
            if verb == "prepare" and not seen.is_shared:
                name = nodes.nodes[rank].name  # name the node, because the message's paths are on its disk
                failure = replace(failure, message=f"On node {name}: {failure.message}", node=name)
            return NodeOutcome(failure=failure)
    found = tuple(read_json(path) for path in results.values())
    if None in found:
        # The node has sent its result, but this machine could not store it, for example on a full disk.
        path = list(results.values())[found.index(None)]
        message = f"{str(path)!r} of a node could not be stored here, or was removed. Free some space and submit again."
        return NodeOutcome(failure=FailureReport(cause="disk", message=message))
    return NodeOutcome(results=found)


def all_started(
    nodes: Nodes, commands: Sequence[Command], work_dir: Path, shells: Mapping[int, Mapping[str, str]]
) -> Iterator[StartedCommand | OSError]:
    """Start commands. Yield a StartedCommand for each, or the error that prevented its start.

    shells: Node rank -> environment variables of the node, which the commands' own variables override.
    """
    start_all = getattr(nodes, "start_all", None)
    if start_all is not None and len(commands) > 1:
        yield from start_all(commands, work_dir, shells)
        return
    cold: set[str] = set()
    for given in commands:
        # A spare is a pre-started Python process. If one command finds it busy, later commands skip it, because waiting is slow.
        command = replace(given, spare="") if given.spare in cold else given
        try:
            started = nodes.start(command, work_dir, shells[command.node_rank])
        except OSError as error:
            yield error
            return
        if started.cold:
            cold.add(command.spare)
        yield replace(started, command=given)  # if this worker is replaced later, the spare may be ready


def send_signals(nodes: Nodes, pids: Mapping[int, Sequence[int]], numbers: Sequence[int]) -> None:
    """Send the signals `numbers` in order to processes, given as {node rank: pids}."""
    if (send := getattr(nodes, "signal_all", None)) is not None:
        send(pids, numbers)
        return
    for rank, mine in pids.items():
        for pid in mine:
            for number in numbers:
                nodes.signal(pid, rank, number)


def from_here(run: Supervision, verb: str) -> NodeOutcome:
    """Run a `paceline.node` command on this machine, to store or check remote nodes' outputs."""
    nodes = ThisHost()
    seen = nodes.send(run.folder, library_dir(run.folder.path.parent.parent))
    return on_nodes(run, verb, [0], nodes, seen, run.cancel_reason)


def _environment(folder: RunFolder, seen: RemotePaths, shell: Mapping[str, str] | None) -> dict[str, str]:
    """Return environment variables that identify a process as part of the run.

    By these variables, Paceline finds processes that a killed supervisor left. Omit SUPERVISOR_VARIABLE, because
    Paceline does not kill processes with this variable when it kills the run's processes.

    shell: The variables to start from; None for the supervisor's own.
    """
    shell = os.environ if shell is None else shell
    kept = {name: value for name, value in shell.items() if name != processes.SUPERVISOR_VARIABLE}
    return kept | {"PACELINE_RUN_ID": folder.run_id, "PACELINE_RUN_DIR": str(seen.run_dir)}


def _end(nodes: Nodes, running: Mapping[tuple[int, int], int]) -> None:
    for (_, pid), rank in running.items():
        nodes.signal(pid, rank, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while any(nodes.is_alive(pid, rank) for (_, pid), rank in running.items()) and time.monotonic() < deadline:
        nodes.ended()
        time.sleep(0.02)
    nodes.kill_all()
    nodes.ended()


def _lost_report(nodes: Nodes, lost: Mapping[int, str]) -> FailureReport:
    from paceline.supervisor.diagnosis.findings import how_lost

    rank, how = min(lost.items())
    name = nodes.nodes[rank].name
    return FailureReport(cause="node_lost", message=f"Node {name} was lost: {how_lost(how, name)}.", node=name)


def _report(verb: str, node_rank: int, code: int, result: Any, folder: RunFolder) -> FailureReport:
    from paceline.runs.logs import last_lines

    told = (result or {}).get("failure")
    log = folder.prepare_log(node_rank)
    if told is None:
        _, what = _VERBS[verb]
        how = f"was killed by {signal_name(code - 128)}" if code > 128 else f"ended with exit code {code}"
        told = {"cause": "prepare", "message": f"Node {node_rank} was {what} when the process that did it {how}."}
    return FailureReport(
        cause=told["cause"],
        message=told["message"],
        last_lines=tuple(last_lines(log, 20)),
        see=f"paceline logs {folder.run_id} --prepare",
    )


class ThisHost(LocalNodes):
    """This machine as a `Nodes` object with one node, for runs on remote nodes.

    `LocalNodes` reaps and kills every child of this process. But ssh processes to the run's nodes are children too, and
    other threads wait for their exit codes. So this class reaps and kills only processes that it has started.
    """

    def __init__(self) -> None:
        super().__init__((), (), lambda: None)
        self._pids: set[int] = set()

    def start(self, command: Command, work_dir: Path, shell: Mapping[str, str]) -> StartedCommand:
        started = super().start(command, work_dir, shell)
        self._pids.add(started.pid)
        return started

    def ended(self) -> list[ProcessExit]:
        return [ended for pid in list(self._pids) for ended in self._wait(pid, os.WNOHANG)]

    def kill_all(self) -> None:
        for pid in list(self._pids):
            for child in [*processes.descendants(pid), pid]:
                processes.send(child, signal.SIGKILL)
            self._wait(pid, 0)

    def _wait(self, pid: int, options: int) -> list[ProcessExit]:
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, options)
            if not found:
                return []
            self._pids.discard(pid)
            return [ProcessExit(pid=pid, node_rank=0, exit_code=processes.shell_exit_code(status), time=time.time())]
        self._pids.discard(pid)
        return []
