"""The examination of a compute target, from its settings to an all-reduce over its nodes.

Each check builds on the ones before. A check that an earlier failure makes impossible is reported as skipped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.doctor.clock import check_clocks
from paceline.doctor.connections import check_network, check_ports
from paceline.doctor.environment import check_environment
from paceline.doctor.examination import FAIL, OK, WARN, Examination, Finding, Patient, skipped
from paceline.doctor.machine import check_gpus, check_limits, check_python, check_space, check_stacks, learn_facts
from paceline.doctor.reduce import check_gloo, check_mpi
from paceline.doctor.sharing import check_sharing
from paceline.system.names import counted
from paceline.targets.base import Examined
from paceline.targets.polling import said, within
from paceline.targets.status import Status

#: Time for the engine's answer about its nodes.
STATUS_S = 30.0
#: Time to acquire the nodes: an allocation may wait in a queue.
NODES_S = 180.0

_ON_NODES: tuple[tuple[str, Callable[[Examination], Iterator[Finding]]], ...] = (
    ("clocks", check_clocks),
    ("what the nodes have", learn_facts),
    ("Python", check_python),
    ("space", check_space),
    ("limits", check_limits),
    ("stacks", check_stacks),
    ("GPUs", check_gpus),
    ("what is installed", check_environment),
    ("shared folders", check_sharing),
    ("the network", check_network),
    ("connections between the nodes", check_ports),
    ("an all-reduce over Gloo", check_gloo),
    ("an all-reduce over MPI", check_mpi),
)


def examine(
    target: Any,
    workspace_dir: Path,
    *,
    node_count: int | None = None,
    python: str | None = None,
    interface: str | None = None,
    nodes_s: float = NODES_S,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Yield each finding at once.

    A target that is not `Examined` is reported as skipped. `node_count` None leaves the number to the kind. `nodes_s` limits
    the wait for the nodes. `python` is the scripts' interpreter; None means the target's `script_python(links)`, else that of
    each node's agent. `interface` is the nodes' network interface. `say` receives the name of the current check.
    """
    if not isinstance(target, Examined):
        yield skipped("nodes", f"targets of kind {getattr(target, 'kind', '?')!r} can't be examined from within")
        return
    say("the engine's status")
    yield from _check_status(target)
    say("waiting for nodes")
    links, error, close = _open(target, node_count, nodes_s)
    try:
        if error:
            yield Finding(
                check="reach",
                level=FAIL,
                seen=error,
                advice="Mend this first: no run would get nodes either.",
            )
        patients = []
        for link in links:
            if link.lost:
                yield _unreachable(link)
                continue
            patients.append(Patient(link))
            hello = link.hello
            yield Finding(
                check="reach",
                node=link.name,
                level=OK,
                seen=f"{hello.user}@{hello.host}, {counted(hello.cores, 'core')}",
            )
        if not patients:
            return
        of_scripts = getattr(target, "script_python", None)
        if python is None and of_scripts is not None:
            # The target asks its nodes, which may hang.
            found = within(lambda: of_scripts([patient.link for patient in patients]), STATUS_S)
            python = None if isinstance(found, Exception) else found
        examination = Examination(
            patients=patients,
            folder=str(patients[0].link.hello.folder),
            workspace_dir=str(workspace_dir),
            python=python,
            interface=interface,
        )
        # Checks are generators, so that findings appear at once.
        for title, check in _ON_NODES:
            say(title)
            if not examination.well:
                yield skipped("nodes", "no node answers any more")
                return
            yield from check(examination)
    finally:
        close()


def _check_status(target: Examined) -> Iterator[Finding]:
    status = within(target.status, STATUS_S)
    if not isinstance(status, Status):
        seen = said(status) if isinstance(status, Exception) else f"status() gave {status!r}"
        yield Finding(check="status", level=FAIL, seen=seen, advice="Without an answer no run can be submitted.")
        return
    for node in status.nodes:
        if not node.is_up:
            yield Finding(
                check="status",
                node=node.name,
                level=WARN if status.up else FAIL,
                seen=f"{node.state}{f': {node.message}' if node.message else ''}",
                advice="Runs will not get this node until it is up again.",
            )
    waiting = f", {counted(status.queued, 'job')} waiting" if status.queued else ""
    yield Finding(
        check="status",
        level=OK if status.up else FAIL,
        seen=f"{len(status.up)} of {counted(len(status.nodes), 'node')} up{waiting}",
        advice="" if status.up else "No run will get a node.",
    )


def _open(target: Examined, node_count: int | None, limit_s: float) -> tuple[list[Any], str | None, Callable[[], None]]:
    """Return the links or the failure, and the stack that releases the nodes.

    The waiting thread releases nodes that arrive after the timeout.
    """
    # Either the waiting thread closes the stack or this one does. `decided` guards the choice: a side holds it while it
    # sets its
    # flag and reads the other's.
    stack, decided = contextlib.ExitStack(), threading.Lock()
    has_entered = is_late = False

    def enter() -> list[Any]:
        nonlocal has_entered
        manager = target.examine() if node_count is None else target.examine(node_count)
        links = list(stack.enter_context(manager))
        with decided:
            has_entered = True
            if not is_late:
                return links
        stack.close()
        return []

    found = within(enter, limit_s)
    if not isinstance(found, Exception):
        return found, None, lambda: _close(stack)
    with decided:
        is_late = True
    if has_entered:
        _close(stack)
    if isinstance(found, TimeoutError):
        return [], f"no nodes in {limit_s:g} s: the queue is long, or a node hangs", lambda: None
    return [], said(found), lambda: None


def _close(stack: contextlib.ExitStack) -> None:
    # Closing the link of a hanging node may hang, too.
    within(stack.close, 20.0)


def _unreachable(link: Any) -> Finding:
    return Finding(
        check="reach",
        node=link.name,
        level=FAIL,
        seen=str(link.lost).removeprefix(f"{link.name}: "),
        advice=f"Look whether {link.name} is up and this user may log in there.",
    )
