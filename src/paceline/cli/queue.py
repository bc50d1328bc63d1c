"""queue, share: show the queues of machines, and share a machine among its users."""

from __future__ import annotations

import json
import os

from paceline.cli.common import print_json, print_table, warn
from paceline.cli.options import JSON, Duration, VerbOption, takes
from paceline.errors import TargetError
from paceline.runs.visible import visible
from paceline.system.processes import core_count
from paceline.targets import configured, host_leases
from paceline.targets.local_leases import open_queue
from paceline.targets.shares import NEW_SHARES
from paceline.targets.status import JobUse, NodeStatus
from paceline.targets.status_of_all import counts_text, look_at_all
from paceline.workspace import Workspace


@takes(
    VerbOption("name", "The compute target; default: all targets.", complete="targets"),
    VerbOption("--timeout", "Time to wait for an answer.", type=Duration(least=0.1), name="timeout_s", default=30.0),
    JSON,
)
def queue(*, name: str | None, timeout_s: float, as_json: bool) -> None:
    """Show for each machine what runs, who waits and why."""
    workspace_dir = Workspace.from_config(create=False).path
    if name is not None:
        configured.read(workspace_dir, name)  # an unknown name raises an error
    looks = look_at_all(workspace_dir, configured.names(workspace_dir) if name is None else [name], timeout_s)
    if as_json:
        print_json({"targets": [found.to_json() for found in looks]})
        return
    for found in looks:
        if (status := found.status) is not None:
            for node in status.nodes:
                _print_node(found.name, node, [job for job in status.jobs if job.node == node.name])
            # A scheduler names no node for a waiting job, and several nodes, such as "n[1-2]", for a job on all of them.
            listed = {node.name for node in status.nodes}
            if others := [job for job in status.jobs if job.node not in listed]:
                print(visible(f"{found.name}, other runs:"))
                _print_jobs(others)
        if found.error:
            warn(f"paceline: {found.name}: {found.error}")


def _print_node(target: str, node: NodeStatus, jobs: list[JobUse]) -> None:
    free = (("cores", node.cores, node.used_cores), ("GPUs", node.gpus, node.used_gpus))
    facts = [f"{counts_text(total, used)} {unit} free" for unit, total, used in free if total]
    if node.shared_by:
        facts.append(f"shared by {node.shared_by}")
    print(visible(f"{target}, {node.name}: {', '.join(facts) if node.is_up else node.state}"))
    for text in (*filter(None, [node.message]), *node.outside):
        print(visible(f"  {text}"))
    if jobs:
        _print_jobs(jobs, node.name)
    if node.shares:
        print_table(
            ("  USER", "GROUP", "SHARE", "USED (GPU-HOURS)"),
            [(f"  {one.user}", one.group, f"{one.share:g}", f"{one.used_hours:.1f}") for one in node.shares],
        )


def _print_jobs(jobs: list[JobUse], node: str = "") -> None:
    header = ("  RUN", "USER", "PRIORITY", "CORES", "GPUS", "STATE")
    rows = [(f"  {job.run_id}", job.user, job.priority, job.cores, job.gpus, _state(job, node)) for job in jobs]
    print_table(header, [tuple("-" if cell in (None, "") else str(cell) for cell in row) for row in rows])


def _state(job: JobUse, node: str) -> str:
    if job.is_waiting:
        return ": ".join(filter(None, ["waits", job.reason]))
    return ", ".join(filter(None, ["runs" if job.node == node else f"runs on {job.node}", job.reason]))


@takes()
def init() -> None:
    """Share this machine: all of its users then have one queue."""
    path = host_leases.shares_path()
    folder = os.path.dirname(path)
    if os.path.lexists(path):
        raise TargetError(f"this machine is shared already, by {host_leases.owner_of(path)}: see {path!r}.")
    if tickets := open_queue(core_count(), ()).look()["tickets"]:
        # The runs of this user stay in the user's own queue until they end, so the queue of all users would not know of them.
        raise TargetError(
            f"run {tickets[0]['run_id']} uses this machine. Wait for its end, or cancel it, and repeat this."
        )
    try:
        host_leases.check_parent()
        # Only the owner may write to this folder, so that no other user can replace the file with the shares.
        os.makedirs(folder, 0o755, exist_ok=True)
        if not host_leases.is_own_folder(folder, os.geteuid()):
            raise TargetError(f"{folder!r} is not a folder of yours that only you can write to. Remove it first.")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o644)
            json.dump(NEW_SHARES, file, indent=2)
            file.write("\n")
    except OSError as error:
        raise TargetError(f"{path!r} can't be written: {error.strerror or error}.") from error
    print(f"This machine is shared: runs of all users wait in one queue. Edit {path} to change shares and limits.")


@takes()
def check() -> int:
    """Check this machine's shares file, and print the first error in it."""
    queue = host_leases.host_queue()
    if queue.policy() is None:
        print(f"This machine is not shared: there is no {queue.shares}. `paceline share init` makes it.")
        return 1
    print(queue.shares_error or f"{queue.shares} is correct.")
    return int(bool(queue.shares_error))


verbs = {"init": init, "check": check}
