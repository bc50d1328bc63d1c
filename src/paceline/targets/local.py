"""The target `local`, whose nodes are groups of processes on this machine.

A run leases the `cores` of each worker (default 1, at most all cores), and with use_gpu=True a GPU or a share of a GPU
(gpu_share) per worker. Leases are not enforced: a worker may use more threads. OMP_NUM_THREADS suggests a thread count.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.errors import TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, node_sizes, port_count, preview_ports
from paceline.observe.node.gpus import devices
from paceline.runs.folder import RunFolder
from paceline.runs.visible import visible
from paceline.system.lock_holder import user_name
from paceline.system.memory import memory
from paceline.system.names import counted
from paceline.system.processes import core_count
from paceline.system.units import size_text
from paceline.targets import supervisors
from paceline.targets.base import Nodes, Preview, Waiting
from paceline.targets.local_leases import (
    Lease,
    LeaseRequest,
    LocalDemand,
    LocalQueue,
    SharedQueue,
    is_shared,
    leases_dir,
    open_queue,
)
from paceline.targets.local_nodes import LocalNodes
from paceline.targets.options import Option, SettingValues, check_settings

if TYPE_CHECKING:
    from paceline.remote.link.link import Link
    from paceline.targets.leases import Ticket
    from paceline.targets.status import Status


_ADDRESS = "127.0.0.1"
_POLL_S = 0.05
_SLOWEST_POLL_S = 5.0
#: The memory of a worker that has imported nothing.
_WORKER_BYTES = 8 << 20
#: How often a waiting run checks whether earlier runs hang: added seconds per earlier run in the queue, and maximum seconds.
_TEXT_S, _SLOWEST_TEXT_S = 10.0, 120.0


class LocalTarget:
    """This machine as a compute target."""

    def __init__(self) -> None:
        self._cores = core_count()

    def check(self, job: Job) -> None:
        workers = job.resized(job.least_nodes).world_size
        if job.use_gpu and workers > len(devices()):
            count = len(devices())
            do = f"Ask for at most {counted(count, 'worker')}" if count else "Set use_gpu=False"
            raise TargetError(
                f"use_gpu=True with {counted(workers, 'worker')}, one GPU each, but target 'local' has "
                f"{counted(count, 'GPU', 'no')}. {do}, or choose another target."
            )
        if workers > (most := memory().total // _WORKER_BYTES):
            raise TargetError(
                f"{workers} workers do not fit into this machine's memory: each takes at least "
                f"{size_text(_WORKER_BYTES)}. Ask for at most {most} workers, or choose another target."
            )

    def preview(self, job: Job) -> Preview:
        gpus = devices()[: job.world_size] if job.use_gpu else ()
        if job.node_range and job.use_gpu:
            job = job.resized(max(job.least_nodes, min(job.node_count, len(gpus) // job.process_count_per_node)))
        return Preview(nodes=self._nodes(job, gpus), ports=preview_ports(job))

    def load_supervisor(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Start a supervisor early: it imports modules while the source is copied."""
        supervisors.load(run_dir, library_dir, python, supervisors.FOR_THIS_MACHINE)

    def enqueue(self, job: Job, run_dir: Path) -> None:
        self._enqueue(self._queue(job), job, run_dir)

    def _enqueue(self, queue: LocalQueue | SharedQueue, job: Job, run_dir: Path) -> None:
        # Queue an elastic run with its minimum number of nodes. When it starts, it takes more nodes if more are free.
        fewest = self._demand(job.resized(job.least_nodes))
        queue.enqueue(run_dir, fewest, LeaseRequest.of_job(job, port_count(job)))

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        queue, pause, began_s = self._queue(job), _POLL_S, time.monotonic()
        demands = self._demands(job, job.least_nodes) if job.node_range else ()
        text, seen, text_at = "", [""], 0.0
        while True:
            try:
                found = queue.try_grant(run_dir, demands)
            except LookupError:
                # The run has no ticket (queue entry) yet, or it has returned its nodes. So put the run into the queue.
                self._enqueue(queue, job, run_dir)
                continue
            if isinstance(found, Lease):
                give_back = functools.partial(self.release, run_dir)
                new_ports = functools.partial(queue.renew_ports, run_dir)
                nodes = self._nodes(job.resized(found.nodes) if job.node_range else job, found.gpus)
                held = LocalNodes(nodes, found.ports, give_back, new_ports)
                held.note_hang = functools.partial(queue.note_hang, run_dir)
                held.leave_reason = functools.partial(queue.leave_reason, run_dir)
                return held
            # Composing the status text reads other runs' records. So do it only if the queue has changed, or if the text is old.
            keys = [str(ticket.get("key") or ticket["why"]) for ticket in found]
            if keys != seen or time.monotonic() > text_at:
                seen, text_at = keys, time.monotonic() + min(_TEXT_S * len(found), _SLOWEST_TEXT_S)
                text = _waits_for(found, run_dir)
            if waiting(text):
                return None
            time.sleep(pause)
            # A run pauses longer if more runs are before it in the queue, or if it has waited long.
            longest_s = max(2 * _POLL_S + 4 * _POLL_S * len(found), (time.monotonic() - began_s) / 50)
            pause = min(pause * 1.2, longest_s, _SLOWEST_POLL_S)

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        held = len(nodes.nodes)
        with contextlib.suppress(TargetError, LookupError):  # another user's process may hold the queue's lock for long
            return max(held, self._queue(job).most_nodes(run_dir, self._demands(job, held + 1)))
        return held

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        return supervisors.start(run_dir, lock_fd, library_dir, python)

    def release(self, run_dir: Path) -> None:
        supervisors.drop(run_dir)
        LocalQueue(leases_dir(), self._cores, ()).release(run_dir)
        if is_shared():
            SharedQueue(self._cores, ()).release(run_dir)

    def _demands(self, job: Job, least: int) -> list[LocalDemand]:
        """Return a job's demands for all node counts, from the maximum to `least`."""
        return [self._demand(job.resized(count)) for count in range(job.node_count, least - 1, -1)]

    def _demand(self, job: Job) -> LocalDemand:
        size = job.world_size
        cores = min(size * job.cores, self._cores)
        return LocalDemand(nodes=job.node_count, cores=cores, gpus=size if job.use_gpu else 0)

    def _queue(self, job: Job) -> LocalQueue | SharedQueue:
        # nvidia-smi may take a second, so list the GPUs only for a run that needs a GPU.
        return open_queue(self._cores, devices() if job.use_gpu else ())

    def _nodes(self, job: Job, leased: tuple[str, ...]) -> tuple[Node, ...]:
        nodes, gpus = [], list(leased)
        for node_rank, size in enumerate(node_sizes(job)):
            mine, gpus = (gpus[:size], gpus[size:]) if leased else ([], [])
            nodes.append(
                Node(
                    node_rank=node_rank,
                    name=f"local-{node_rank}" if job.node_count > 1 else "local",
                    address=_ADDRESS,
                    cores=max(1, self._cores // job.node_count),
                    gpus=tuple(mine),
                    interface="lo" if sys.platform.startswith("linux") else "lo0",
                )
            )
        return tuple(nodes)


def _waits_for(tickets: list[Ticket], run_dir: Path) -> str:
    """Return the status text of a run that waits for these tickets' runs.

    The text names the folder of a run of another workspace, and the owner of another user's run. If one of the runs hangs,
    the text says since when, and how to end that run.
    """
    if not tickets:
        return "other runs hold what it needs"
    if "why" in tickets[0]:
        return visible(str(tickets[0]["why"]))
    folders = [RunFolder(Path(str(ticket.get("run_dir") or f"/-/-/{ticket['run_id']}"))) for ticket in tickets]
    shown = ", ".join(_named(folder, run_dir) for folder in folders[:3]) + (", ..." if len(folders) > 3 else "")
    hangs = (
        f". {one['run_id']} hangs since {one['hangs_since']}: `paceline cancel {one['run_id']}` in its folder ends it"
        for one in tickets
        if one["hangs_since"]
    )
    # Escape the text: another user who can write to the folder of leases may have written the ticket.
    return visible(f"waits for {counted(len(tickets), 'run')} ({shown}){next(hangs, '')}")


def _named(folder: RunFolder, run_dir: Path) -> str:
    place = folder.path.parents[1]
    where = "" if place == run_dir.parents[1] else f" in {place.parent if place.name == '.paceline' else place}"
    with contextlib.suppress(OSError):
        if (uid := os.stat(folder.path).st_uid) != os.geteuid():
            where = f" of {user_name(uid)}{where}"
    return folder.run_id + where


class ThisMachine(LocalTarget):
    """The kind `local` of compute target, which has no settings."""

    kind: ClassVar[str] = "local"
    OPTIONS: ClassVar[tuple[Option, ...]] = ()

    def __init__(self, name: str = kind, settings: SettingValues | None = None) -> None:
        check_settings(self.kind, self.OPTIONS, settings or {}, name)
        super().__init__()

    def status(self) -> Status:
        """Return this machine's status, with its runs and their leases."""
        # Import this module here, because no supervisor needs it, and every supervisor loads this file.
        from paceline.targets.status import host_status

        gpus, cores = devices(), core_count()
        return host_status(socket.gethostname(), open_queue(cores, gpus).look())

    @contextlib.contextmanager
    def examine(self, node_count: int | None = None) -> Iterator[list[Link]]:
        """Yield a connection to one agent, because all `local` nodes are this machine."""
        import paceline
        from paceline.remote.foreign_python import bootstrap_words
        from paceline.remote.link.link import Link

        link = Link.open(
            bootstrap_words(sys.executable),
            name=socket.gethostname(),
            library_dir=Path(paceline.__file__).resolve().parents[1],
            folder=f"/tmp/paceline-{getpass.getuser()}",
            shared_library=True,
        )
        try:
            yield [link]
        finally:
            link.close()
