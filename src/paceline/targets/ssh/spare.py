"""The hosts that an elastic run does not hold and that would take it."""

from __future__ import annotations

from collections.abc import Collection

from paceline.job.job import Job
from paceline.job.plan import node_sizes
from paceline.targets.leases import has_room
from paceline.targets.ssh.probe import HostProbe, look_at
from paceline.targets.ssh.settings import SshSettings


def spare_hosts(settings: SshSettings, job: Job, held: Collection[str], machines: Collection[tuple[str, str]]) -> int:
    """How many more hosts would take the job's workers now. Each is asked, by a login; nothing is held there.

    held: names of the run's own hosts. machines: (boot id, host name) of these, which other names may lead to.
    """
    left = [host for host in settings.hosts if host.name not in held]
    if not left:
        return 0
    # Without connections that stay: a run's link that shares one would end with it.
    looks = look_at(settings.ssh, left, python=settings.own_python, with_gpus=job.use_gpu, leave_open=False)
    return len({(look.boot_id, look.hostname) for look in looks if _takes(look, job)} - set(machines))


def _takes(look: HostProbe, job: Job) -> bool:
    per_node = max(node_sizes(job))
    ticket = {"cores": per_node, "gpu_count": per_node if job.use_gpu else 0}
    return look.failure is None and has_room(ticket, look.tickets, look.offered, look.gpus)
