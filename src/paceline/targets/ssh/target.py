"""The compute target `ssh`, a list of hosts whose cores and GPUs runs lease."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.job.plan import Node, node_sizes, port_count, preview_ports
from paceline.job.sizes import range_text
from paceline.remote.addresses import Machine, choose
from paceline.system.detached_process import library_dir
from paceline.system.names import counted
from paceline.targets import supervisors
from paceline.targets.base import Nodes, Preview, Waiting
from paceline.targets.local_leases import LeaseRequest, lease_key
from paceline.targets.options import Option, SettingValues
from paceline.targets.polling import Lookout
from paceline.targets.ssh.command import MENDED_BY_LOGIN
from paceline.targets.ssh.hosts import SshHost
from paceline.targets.ssh.probe import HostProbe, look_at, spare_hosts
from paceline.targets.ssh.settings import KIND, OPTIONS, SshSettings, read_settings
from paceline.targets.status import JobUse, NodeStatus, Status, Unreachable, host_status

if TYPE_CHECKING:
    from paceline.targets.ssh.allocate import HeldHosts
    from paceline.targets.ssh.members import HostMember

log = logging.getLogger(__name__)

#: Seconds that a run waits for a lost host if too few other hosts are up.
_PATIENCE_S = 60.0
#: Seconds that an elastic run waits if fewer hosts than its minimum are up, as in torchrun and Horovod.
_ELASTIC_PATIENCE_S = 600.0
#: Seconds between queries of the hosts that an elastic run does not hold. Each query logs in to all of these hosts.
_LOOKOUT_S = 10.0
#: Seconds between two checks whether an urgent run needs this run's hosts.
_LEAVE_S = 1.0
#: Modules that a supervisor imports in advance, because it needs them to wait for nodes.
_LOADED = (__name__, "paceline.remote.link.nodes", "paceline.targets.ssh.allocate")


class SshTarget:
    """A list of hosts, reached by ssh, whose cores and GPUs runs lease."""

    kind: ClassVar[str] = KIND
    OPTIONS: ClassVar[tuple[Option, ...]] = OPTIONS

    def __init__(self, name: str = KIND, settings: SettingValues | None = None) -> None:
        self.name = name
        self._set: SshSettings = read_settings(name, settings or {})
        #: The settings to store. They contain the content of files, such as a file of hosts, instead of the file's name.
        self.settings = self._set.plain
        self._looks: list[HostProbe] | None = None
        self._gathered = 0
        #: The hosts of the last attempt. Hosts of them that were lost are tried last.
        self._held: Sequence[HeldHosts] = ()
        #: A poller of the hosts that the run does not hold. Each attempt creates a new poller.
        self._lookout: Lookout[int] | None = None
        self._machines: set[tuple[str, str]] = set()

    def forward_words(self, node: str, socket_path: str, port: int) -> list[str]:
        """Return the command line that forwards a socket to a node's port.

        Raises:
            TargetError: The node is not a host of this target.
        """
        for host in self._set.hosts:
            if host.name == node:
                return self._set.ssh.forward_words(host, socket_path, port)
        raise TargetError(f"compute target {self.name!r} has no host {node!r} any more.")

    # --- methods for the submitting program

    def check(self, job: Job) -> None:
        hosts = self._set.hosts
        least = job.least_nodes
        if least > len(hosts):
            raise TargetError(
                f"node_count={range_text(least, job.node_count)}, but compute target {self.name!r} has "
                f"{counted(len(hosts), 'host')} ({_names(hosts)}). Ask for at most {len(hosts)}, or add hosts."
            )
        looks = self._looks = self._look(with_gpus=job.use_gpu, enough=least)
        reasons = {look.host: look.failure for look in looks if look.failure is not None}
        down = dict(reasons)
        gpus = max(node_sizes(job)) if job.use_gpu else 0
        for look in looks:
            if look.failure is None and len(look.gpus) < gpus:
                has = counted(len(look.gpus), "GPU", "no")
                reasons[look.host] = f"it has {has}, and the job asks for {gpus}, one for each worker there"
        if len(hosts) - len(reasons) < least:
            from paceline.targets.ssh.allocate import too_few

            # If a host did not answer, raise EngineError, which means that the failure may be temporary.
            failed = EngineError if down else TargetError
            raise failed(f"compute target {self.name!r}: {too_few(least, hosts, reasons)}")
        for host, why in down.items():
            log.warning("compute target %r: host %s is left out: %s", self.name, host.name, why)

    def preview(self, job: Job) -> Preview:
        looks = [look for look in self._looks or () if look.failure is None]
        hosts = [look.host for look in looks] or list(self._set.hosts)
        cores = {look.host: look.offered for look in looks}
        gpus = {look.host: look.gpus for look in looks}
        nodes = []
        for node_rank, (host, size) in enumerate(zip(hosts, node_sizes(job), strict=False)):
            given = (gpus.get(host) or tuple(map(str, range(size))))[:size] if job.use_gpu else ()
            nodes.append(
                Node(
                    node_rank=node_rank,
                    name=host.name,
                    address=host.name,
                    cores=cores.get(host) or host.slots or size,
                    gpus=given,
                )
            )
        return Preview(nodes=tuple(nodes), ports=preview_ports(job))

    def load_supervisor(self, run_dir: Path, library_dir: Path, python: str) -> None:
        """Start a supervisor, which imports modules while hosts are probed.

        Until `start_supervisor` passes a run to it, `release` or the end of this program ends the supervisor.
        """
        supervisors.load(run_dir, library_dir, python, _LOADED)

    def enqueue(self, job: Job, run_dir: Path) -> None:
        """Do nothing: a run later queues on each host by submission time."""

    def start_supervisor(self, run_dir: Path, lock_fd: int, library_dir: Path, python: str) -> int:
        return supervisors.start(run_dir, lock_fd, library_dir, python)

    # --- methods for the supervisor

    def wait_for_nodes(self, job: Job, run_dir: Path, waiting: Waiting) -> Nodes | None:
        from paceline.remote.link.nodes import AgentNodes
        from paceline.targets.ssh.allocate import Gathering, HostDemand
        from paceline.targets.ssh.members import Opening

        per_node = max(node_sizes(job))
        demand = HostDemand(
            count=job.least_nodes,
            more=job.node_count - job.least_nodes,
            cores=per_node,
            gpus=per_node if job.use_gpu else 0,
            key=lease_key(run_dir),
            run_id=run_dir.name,
            request=LeaseRequest.of_job(job),
        )
        opening = Opening(
            self._set.ssh,
            python=self._set.own_python,
            library_dir=library_dir(run_dir.parent.parent),
            folder=self._set.folder,
        )
        # In the first call, fail at once, because a user may be waiting. Later, wait, because a lost host may be rebooting.
        patience_s = (_ELASTIC_PATIENCE_S if job.node_range else _PATIENCE_S) if self._gathered else 0.0
        self._gathered += 1
        held: list[HeldHosts] | None = None
        try:
            lost = {item.member.host for item in self._held if item.member.link.lost}
            hosts = sorted(self._set.hosts, key=lost.__contains__)
            held = Gathering(opening, hosts, demand, patience_s).gather(waiting)
            if held is None:
                return None
            self._held = held
            job = job.resized(len(held))
            self._lookout, self._machines = None, {item.member.identity for item in held}
            nodes = self._nodes(job, held)
            ports = tuple(held[0].member.link.free_ports(port_count(job)))
        except EngineError as error:
            held = None
            raise EngineError(f"compute target {self.name!r}: {error}") from error
        except BaseException as error:
            held = None
            if isinstance(error, TargetError):
                raise TargetError(f"compute target {self.name!r}: {error}") from error
            raise
        finally:
            # End Paceline's processes on hosts that the run does not hold. After an error, `held` is None, so the run holds none.
            opening.close(but=[item.member for item in held or ()])
        links = [item.member.link for item in held]

        def note_hang(since: str | None) -> None:
            for item in held:
                with contextlib.suppress(TargetError, EngineError, OSError):  # skip a host that is lost or locked
                    item.member.ask("note", {"key": demand.key, "hangs_since": since})

        def leave_reason() -> str:
            return next(filter(None, (_leave_reason(item.member, item.gpus, demand.key) for item in held)), "")

        python = self.script_python(links)
        made = AgentNodes(links, nodes, ports, folder=self._set.folder, python=python, on_hang=note_hang)
        made.leave_reason = Lookout(leave_reason, _LEAVE_S, "").found
        return made

    def nodes_to_be_had(self, job: Job, run_dir: Path, nodes: Nodes) -> int:
        if self._lookout is None:
            held, machines = {node.name for node in nodes.nodes}, self._machines
            self._lookout = Lookout(lambda: spare_hosts(self._set, job, held, machines), _LOOKOUT_S, 0)
        return len(nodes.nodes) + self._lookout.found()

    def script_python(self, links: Sequence[Any]) -> str | None:
        """Return the interpreter for jobs that set none; None means the agents' interpreter."""
        from paceline.remote.link import script_python

        return script_python(self._set.python, sys.executable, links)

    def release(self, run_dir: Path) -> None:
        """End the supervisor that `load_supervisor` has started.

        The run's shares need no release: they end with the agents, which end with the supervisor.
        """
        supervisors.drop(run_dir)

    def _nodes(self, job: Job, held: Sequence[Any]) -> tuple[Node, ...]:
        machines = []
        for item in held:
            hello = item.member.link.hello
            # sshd sets this variable for each session: client address and port, server address and port.
            connection = hello.env.get("SSH_CONNECTION", "").split()
            machines.append(
                Machine(
                    name=item.member.host.name,
                    interfaces=hello.interfaces,
                    arrived_at=connection[2] if len(connection) == 4 else "",
                )
            )
        chosen = choose(machines, self._set.interface)
        return tuple(
            Node(
                node_rank=node_rank,
                name=item.member.host.name,
                address=address,
                cores=item.member.offered,
                gpus=item.gpus[:size],
                interface=interface,
            )
            for node_rank, (item, size, (address, interface)) in enumerate(
                zip(held, node_sizes(job), chosen, strict=True)
            )
        )

    # --- methods for `paceline compute`

    def status(self) -> Status:
        """Return the status of each host, including its leases."""
        nodes: list[NodeStatus] = []
        jobs: list[JobUse] = []
        running, queued = set(), set()
        for look in self._look(with_gpus=True):
            if look.failure is not None:
                nodes.append(NodeStatus(name=look.host.name, is_up=False, state="down", message=look.failure))
                continue
            # A run on several hosts has a ticket (queue entry) on each host. Count the run once.
            running |= {ticket["key"] for ticket in look.tickets if ticket["granted"] is not None}
            queued |= {ticket["key"] for ticket in look.tickets if ticket["granted"] is None}
            found = host_status(look.host.name, look.answer)
            nodes += found.nodes
            jobs += found.jobs
        return Status(nodes=tuple(nodes), running=len(running), queued=len(queued - running), jobs=tuple(jobs))

    @contextlib.contextmanager
    def examine(self, node_count: int | None = None) -> Iterator[list[Any]]:
        """Yield links to agents on the first `node_count` available hosts; None means all."""
        import paceline
        from paceline.targets.ssh.members import Opening

        library = Path(paceline.__file__).resolve().parents[1]
        opening = Opening(self._set.ssh, python=self._set.own_python, library_dir=library, folder=self._set.folder)
        try:
            opening.open(self._set.hosts)
            opening.wait(40.0)
            members = opening.members(self._set.hosts)[:node_count]
            down = [Unreachable(name=host.name, lost=why) for host, why in opening.failures.items()]
            yield [
                *(member.link for member in members),
                *(down if node_count is None else down[: node_count - len(members)]),
            ]
        finally:
            opening.close()

    def login(self) -> None:
        """Log in to all hosts: ssh asks for passwords and about unknown keys.

        Each connection stays open until it has been unused for a while.
        """
        for look in self._look(with_gpus=False):
            if look.failure is None:
                print(f"{look.host.name}: no question asked")
            elif look.failure.startswith(MENDED_BY_LOGIN):
                words = self._set.ssh.words(look.host, ["true"], leave_open=True, ask=True)
                print(f"{look.host.name}:", flush=True)
                code = subprocess.run(words, check=False).returncode
                print(
                    f"{look.host.name}: {'logged in' if code == 0 else f'not logged in (exit code {code})'}", flush=True
                )
            else:
                print(f"{look.host.name}: {look.failure}")

    def _look(self, *, with_gpus: bool, enough: int | None = None) -> list[HostProbe]:
        return look_at(self._set.ssh, self._set.hosts, python=self._set.own_python, with_gpus=with_gpus, enough=enough)


def _leave_reason(member: HostMember, gpus: Sequence[str], key: str) -> str:
    if member.link.lost:
        return ""
    asked = {"key": key, "all_cores": member.offered, "all_gpus": list(member.link.hello.gpus) if gpus else []}
    return member.ask("leave", asked).get("leave", "")


def _names(hosts: Sequence[SshHost]) -> str:
    shown = ", ".join(host.name for host in hosts[:5])
    return shown + (", ..." if len(hosts) > 5 else "")
