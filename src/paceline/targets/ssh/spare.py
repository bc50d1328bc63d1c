"""The hosts that an elastic run does not hold and that would take it."""

from __future__ import annotations

from collections.abc import Collection

from paceline.job.job import Job
from paceline.job.plan import node_sizes
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
    if look.failure is not None:
        return False
    if any(ticket["granted"] is None for ticket in look.tickets):
        return False  # somebody waits there, and is served first
    per_node = max(node_sizes(job))
    gpus = {gpu for ticket in look.tickets for gpu in ticket["granted"].get("gpus", ())}
    if job.use_gpu and len(set(look.gpus) - gpus) < per_node:
        return False
    used = sum(int(ticket["cores"]) for ticket in look.tickets)
    return used + min(per_node, look.offered) <= look.offered
