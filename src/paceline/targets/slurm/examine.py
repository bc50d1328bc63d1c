"""Allocate nodes for a short time, for `paceline compute doctor` to check them."""

from __future__ import annotations

import contextlib
import getpass
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import EngineError, TargetError
from paceline.remote.link import Link
from paceline.system.names import counted
from paceline.targets.polling import all_within
from paceline.targets.slurm.allocation import Allocation, link_words
from paceline.targets.slurm.scheduler import AwayError, CommandResult, Scheduler
from paceline.targets.slurm.script import selecting_options
from paceline.targets.slurm.states import expand
from paceline.targets.status import Unreachable

#: Time limit in minutes of the job of `paceline compute doctor`, in case that command is killed.
_MINUTES = 10
#: Seconds to wait for free nodes. The time is short, because a user waits for the result of `paceline compute doctor`.
_WAIT_S = 45
_OPEN_S = 60.0


@contextlib.contextmanager
def examined(scheduler: Scheduler, node_count: int) -> Iterator[list[Any]]:
    """Allocate nodes for a `with` block. Yield a list of connections to their agents.

    The list has an `Unreachable` for each node without a connection.

    Raises:
        TargetError: Slurm provides no nodes within a minute, or refuses the request.
    """
    job_id = _allocate(scheduler, node_count)
    links: list[Any] = []
    try:
        done = scheduler.call(["squeue", "-h", "-j", job_id, "-o", "%N"])
        nodes = expand(done.stdout.strip())
        links = _open(scheduler, job_id, nodes)
        yield links
    finally:
        # Close the links to the nodes before scancel. Otherwise scancel kills the agents, and each link reports a lost node.
        all_within({id(link): link.close for link in links if isinstance(link, Link)}, 15.0)
        with contextlib.suppress(TargetError, EngineError):
            scheduler.call(["scancel", job_id])


def _allocate(scheduler: Scheduler, node_count: int) -> str:
    settings = scheduler.settings
    argv = [
        *("salloc", "--no-shell", "--job-name=paceline-doctor", f"--nodes={node_count}", "--ntasks-per-node=1"),
        # With --immediate salloc gives up if no nodes are free. Otherwise it waits in the queue without a limit.
        *(f"--immediate={_WAIT_S}", f"--cpus-per-task={settings.cpus_per_process}"),
        *(option for option in selecting_options(settings, settings.gres) if not option.startswith("--time=")),
        f"--time={_MINUTES}",
    ]
    try:
        done = scheduler.call(argv, timeout_s=_WAIT_S + 30.0)
    except AwayError as error:
        # If no node became free in time, Slurm reports a misleading connection timeout. Replace this text.
        if "waiting for resources" not in str(error):
            raise
        raise TargetError(f"{scheduler.title}: {_busy(node_count)}") from error
    # Look for the job's number in the standard error, because salloc prints it only there.
    found = re.search(r"[Gg]ranted job allocation (\d+)", done.stderr)
    if found is None:
        raise TargetError(f"{scheduler.title}: {_why(done, node_count)}")
    return found[1]


def _why(done: CommandResult, node_count: int) -> str:
    if re.search(r"nodes are busy|not available now|timed out", done.stderr, re.IGNORECASE):
        return _busy(node_count)
    return f"Slurm refuses {counted(node_count, 'node')}: {done.said}."


def _busy(node_count: int) -> str:
    asked = counted(node_count, "node")
    return f"Slurm has not given {asked} within {_WAIT_S} s. Try again when some are free, or examine fewer nodes."


def _open(scheduler: Scheduler, job_id: str, nodes: Sequence[str]) -> list[Any]:
    import paceline

    settings, library = scheduler.settings, Path(paceline.__file__).resolve().parents[1]
    python = settings.python or ("python3" if settings.login else sys.executable)
    # This machine is not one of the nodes. So set here="", with which srun starts an agent process on each node.
    allocation = Allocation(job_id=job_id, nodes=tuple(nodes), cores=(0,) * len(nodes), here="")

    def opener(node: str) -> Link:
        return Link.open(
            scheduler.words(link_words(allocation, node, python=python)),
            name=node,
            library_dir=library,
            folder=f"/tmp/paceline-{getpass.getuser()}",
            shared_library=settings.login is None,
            timeout_s=_OPEN_S,
            silence_s=settings.silence_s,
        )

    answers = all_within({node: lambda node=node: opener(node) for node in nodes}, _OPEN_S + 5)  # type: ignore[misc]
    return [
        found if isinstance(found, Link) else Unreachable(name=node, lost=str(found)) for node, found in answers.items()
    ]
