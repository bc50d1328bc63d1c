"""Probe hosts, which need not have Paceline, for their resources and leases."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from paceline.job.job import Job
from paceline.job.plan import node_sizes
from paceline.observe.node import gpus, nvml, outside
from paceline.remote import foreign_python
from paceline.remote.agent.boot import OLDEST
from paceline.system import lock_holder, processes
from paceline.targets import fair_share, host_leases, leases, shares
from paceline.targets.leases import has_room
from paceline.targets.ssh.command import PASSING, Ssh, explain
from paceline.targets.ssh.hosts import SshHost
from paceline.targets.ssh.settings import SshSettings

if TYPE_CHECKING:
    from paceline.targets.leases import LeaseAnswer, SharesAnswer, Ticket

#: Seconds for a host to answer. GPUS_S: seconds to add if it lists its GPUs, because nvidia-smi may load the driver.
TIMEOUT_S = 15.0
GPUS_S = 25.0
_AGAIN_S = 1.0
#: Seconds to wait for further hosts once enough hosts have answered.
_MORE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HostProbe:
    """A host's report: its cores and GPUs, and the runs that use it.

    Attributes:
        failure: Why the host can't be used, and what to do; the other fields are empty then.
        tickets: Tickets (`paceline.targets.leases`) of runs that hold or wait for the host's cores or GPUs, in queue order.
    """

    host: SshHost
    failure: str | None = None
    hostname: str = ""
    boot_id: str = ""
    cores: int = 0
    gpus: tuple[str, ...] = ()
    tickets: tuple[Ticket, ...] = field(default=())
    shares: SharesAnswer | None = None
    outside: tuple[str, ...] = ()
    blocked: Mapping[str, str] = field(default_factory=dict)

    @property
    def offered(self) -> int:
        """The number of cores that the host offers to runs."""
        return self.host.slots or self.cores

    @property
    def answer(self) -> LeaseAnswer:
        """The host's report as a `LeaseAnswer`, limited to the offered cores."""
        return {
            "cores": self.offered,
            "gpus": list(self.gpus),
            "tickets": list(self.tickets),
            "shares": self.shares or {},
            "outside": list(self.outside),
            "blocked": dict(self.blocked),
        }


def look_at(
    ssh: Ssh,
    hosts: Sequence[SshHost],
    *,
    python: str,
    with_gpus: bool = False,
    enough: int | None = None,
    leave_open: bool = True,
) -> list[HostProbe]:
    """Probe hosts in parallel. Return their reports in the same order.

    leave_open: Whether to keep the connections open for a while. with_gpus: Whether to list GPUs, which is slow.
    enough: Once this number of hosts is usable, wait only `_MORE_S` seconds for the others. None: wait for all hosts.

    Raises:
        TargetError: This machine has no `ssh`.
    """
    timeout_s = TIMEOUT_S + (GPUS_S if with_gpus else 0)
    ssh.program()
    found: dict[SshHost, HostProbe] = {}
    changed = threading.Condition()
    # Limit the number of connections, because sshd on a host or a jump host drops connections beyond MaxStartups.
    slots = threading.Semaphore(ssh.at_once(hosts[0]))

    def ask(host: SshHost) -> None:
        with slots:
            look = _ask(ssh, host, python, with_gpus, timeout_s, leave_open)
            if (look.failure or "").startswith(PASSING):
                time.sleep(_AGAIN_S)
                look = _ask(ssh, host, python, with_gpus, timeout_s, leave_open)
        # Reading `found` needs no lock: each key is written once, and `changed` notifies the only reader.
        with changed:
            found[host] = look
            changed.notify_all()

    for host in hosts:
        threading.Thread(target=ask, args=(host,), name=f"paceline-look-{host.name}", daemon=True).start()
    # ssh has a shorter time limit than this deadline. Don't wait for a thread whose ssh runs past the deadline.
    deadline, was_enough = time.monotonic() + timeout_s + 5, False
    with changed:
        while len(found) < len(hosts) and (left := deadline - time.monotonic()) > 0:
            well = sum(look.failure is None for look in found.values())
            # Once enough hosts have answered, wait briefly for further hosts, which may be better for the run.
            if enough is not None and well >= enough and not was_enough:
                was_enough, deadline = True, min(deadline, time.monotonic() + _MORE_S)
                continue
            changed.wait(left)
        silent = "it has not answered so far"
        return [found.get(host) or HostProbe(host=host, failure=silent) for host in hosts]


def host_program(verb: str, given: Mapping[str, Any]) -> bytes:
    """Return a program's source, which hosts run to answer a request for leases."""
    above = [str(module.__file__) for module in (lock_holder, nvml, gpus, outside, shares, fair_share, leases)]
    return foreign_python.program(host_leases.__file__, "answer", verb, given, above=above)


def _ask(ssh: Ssh, host: SshHost, python: str, with_gpus: bool, timeout_s: float, leave_open: bool) -> HostProbe:
    command = ssh.words(host, [shlex.join(foreign_python.words(python, "look"))], leave_open=leave_open)
    # Use files instead of pipes, because a shared connection in the background may keep a pipe open.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(host_program("look", {"with_gpus": with_gpus}))
        stdin.seek(0)
        # Drop variables that name a run: the ssh connection may outlive this process, and is no leftover of that run.
        environment = processes.of_no_run(os.environ)
        process = subprocess.Popen(
            command, stdin=stdin, stdout=out, stderr=err, start_new_session=True, env=environment
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # This ends only the ssh client, not a shared connection in the background.
            process.kill()
            process.wait()
            code = None
        output, errors = _content(out), _content(err).decode(errors="replace")
    answer = foreign_python.answer_in(output)
    if answer is None:
        if code is None:
            errors += f"\nno answer within {timeout_s:g} s: timed out"
        said = errors if errors.strip() else output.decode(errors="replace")
        return HostProbe(host=host, failure=explain(host, said, code, ssh.login_words(host), python))
    path, *version = answer["python"]
    if tuple(version[:2]) < OLDEST:
        return HostProbe(
            host=host,
            failure=f"its {python!r} ({path}) is Python {'.'.join(map(str, version))}, and 3.10 or later is needed. "
            "Set `python` to the path of another.",
        )
    if error := answer.get("error"):
        return HostProbe(host=host, failure=f"what is held of it can't be read: {error}.")
    return HostProbe(
        host=host,
        hostname=answer["host"],
        boot_id=answer["boot_id"],
        cores=answer["cores"],
        gpus=tuple(answer.get("gpus", ())),
        tickets=tuple(answer["tickets"]),
        shares=answer.get("shares"),
        outside=tuple(answer.get("outside", ())),
        blocked=answer.get("blocked", {}),
    )


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def spare_hosts(settings: SshSettings, job: Job, held: Collection[str], machines: Collection[tuple[str, str]]) -> int:
    """Return how many more hosts could run the job now, without reserving them.

    held: Names of the hosts that the run holds.
    machines: (boot id, host name) of the run's own hosts, because the target may list a host under several names.
    """
    left = [host for host in settings.hosts if host.name not in held]
    if not left:
        return 0
    # Don't leave the connection open: a run could use it, too, and would lose its node when the connection closes.
    looks = look_at(settings.ssh, left, python=settings.own_python, with_gpus=job.use_gpu, leave_open=False)
    return len({(look.boot_id, look.hostname) for look in looks if _takes(look, job)} - set(machines))


def _takes(look: HostProbe, job: Job) -> bool:
    per_node = max(node_sizes(job))
    ticket = {"cores": per_node, "gpu_count": per_node if job.use_gpu else 0, "gpu_share": job.gpu_share}
    gpus = [gpu for gpu in look.gpus if gpu not in look.blocked]
    return look.failure is None and has_room(ticket, look.tickets, look.offered, gpus)
