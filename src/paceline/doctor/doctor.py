"""Examine a compute target, from its settings to an all-reduce over its nodes.

A check may need results of earlier checks. If such a result is missing, the check is reported as skipped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.doctor.connections import check_network, check_ports
from paceline.doctor.environment import check_environment
from paceline.doctor.examination import FAIL, OK, WARN, Examination, Finding, NoAnswerError, Patient, skipped
from paceline.doctor.machine import check_gpus, check_limits, check_python, check_space, check_stacks, learn_facts
from paceline.doctor.reduce import check_gloo, check_mpi
from paceline.doctor.sharing import check_sharing
from paceline.system.names import counted
from paceline.targets.base import Examined
from paceline.targets.polling import said, within
from paceline.targets.status import Status

if TYPE_CHECKING:
    from paceline.remote.link.link import Link

_WARN_S = 1.0
_FAIL_S = 30.0
_SAMPLES = 3
_QUESTION_S = 20.0
_ADVICE = "Let the node take its time from the network: `timedatectl set-ntp true`, or start chronyd or ntpd."


@dataclass(frozen=True)
class Offset:
    """The difference between a node's clock and this machine's, accurate to `error_s`."""

    seconds: float
    error_s: float

    @property
    def surely_s(self) -> float:
        """The seconds by which the clocks differ at least, despite measurement errors."""
        return max(0.0, abs(self.seconds) - self.error_s)


def check_clocks(examination: Examination) -> Iterator[Finding]:
    """Compare the nodes' clocks with this machine's clock, and with each other."""
    answers, failed = examination.ask_all("clock", _offset, _SAMPLES * _QUESTION_S)
    yield from failed
    for name, offset in answers.items():
        yield Finding(
            check="clock",
            node=name,
            level=_level(offset.surely_s),
            seen=_apart(offset),
            advice=_ADVICE if offset.surely_s > _WARN_S else "",
        )
    if len(answers) > 1:
        yield _between(answers)


def _between(found: dict[str, Offset]) -> Finding:
    first = min(found, key=lambda name: found[name].seconds)
    last = max(found, key=lambda name: found[name].seconds)
    apart = Offset(found[last].seconds - found[first].seconds, found[last].error_s + found[first].error_s)
    level = _level(apart.surely_s)
    return Finding(
        check="clock",
        level=level,
        seen=f"{_seconds(apart.seconds)} at most between two nodes" + (f" ({first} and {last})" if level != OK else ""),
        advice=_ADVICE if level != OK else "",
    )


def _offset(patient: Patient) -> Offset:
    samples = []
    for _ in range(_SAMPLES):
        sent_at = time.time()
        done = patient.run([patient.python, "-S", "-c", "import time; print(time.time())"], timeout_s=_QUESTION_S)
        answered = time.time()
        try:
            theirs = float(done.stdout)
        except ValueError:
            raise NoAnswerError(f"its Python told no time: {done.stderr.decode(errors='replace')[-200:]}") from None
        # As in NTP, assume that the node read its time in the middle of the round trip.
        samples.append(Offset(theirs - (sent_at + answered) / 2, (answered - sent_at) / 2))
    return min(samples, key=lambda offset: offset.error_s)


def _apart(offset: Offset) -> str:
    if offset.surely_s == 0:
        return f"that of this machine, as far as can be told within {_seconds(offset.error_s)}"
    return f"{_seconds(offset.seconds)} {'ahead of' if offset.seconds > 0 else 'behind'} this machine's"


def _level(surely_s: float) -> str:
    return FAIL if surely_s > _FAIL_S else WARN if surely_s > _WARN_S else OK


def _seconds(seconds: float) -> str:
    return f"{abs(seconds) * 1e3:.0f} ms" if abs(seconds) < 1 else f"{abs(seconds):.1f} s"


#: Time limit in seconds for the target's engine, such as Slurm, to report the state of its nodes.
STATUS_S = 30.0
#: Time limit in seconds for acquiring nodes. The allocation may wait in a queue.
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
    target: object,
    workspace_dir: Path,
    *,
    node_count: int | None = None,
    python: str | None = None,
    interface: str | None = None,
    nodes_s: float = NODES_S,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Examine a compute target. Yield each finding as soon as it is known.

    If the doctor can't examine targets of this kind, the only finding has the level "skipped".

    node_count: Number of nodes to examine; None for the default of the target's kind.
    nodes_s: Time limit in seconds for getting the nodes.
    python: Interpreter of scripts. None: the target's interpreter for scripts, or else Paceline's interpreter.
    interface: The nodes' network interface. None: any.
    say: Called with the title of each check before it begins.
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
                check="reach", level=FAIL, seen=error, advice="Fix this first: without it, no run gets nodes."
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
            # Limit the time, because the target sends a request to its nodes, which may hang.
            found = within(lambda: of_scripts([patient.link for patient in patients]), STATUS_S)
            python = None if isinstance(found, Exception) else found
        examination = Examination(
            patients=patients,
            folder=str(patients[0].link.hello.folder),
            workspace_dir=str(workspace_dir),
            python=python,
            interface=interface,
        )
        # Each check is a generator, so that its findings appear at once.
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


def _open(
    target: Examined, node_count: int | None, limit_s: float
) -> tuple[list[Link], str | None, Callable[[], None]]:
    """Return the nodes' links, an error text or None, and a closing function.

    The closing function releases the nodes. If the nodes arrive after the timeout, they are released immediately.
    """
    # Either this thread or the thread that waits for nodes closes the stack. The lock `decided` guards these threads' flags.
    stack, decided = contextlib.ExitStack(), threading.Lock()
    has_entered = is_late = False

    def enter() -> list[Link]:
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
    # Limit the time, because closing the link of a hanging node may hang too.
    within(stack.close, 20.0)


def _unreachable(link: Link) -> Finding:
    return Finding(
        check="reach",
        node=link.name,
        level=FAIL,
        seen=str(link.lost).removeprefix(f"{link.name}: "),
        advice=f"Look whether {link.name} is up and this user may log in there.",
    )
