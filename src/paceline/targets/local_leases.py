"""The queue of this machine for runs of `local`, which lease cores, GPUs and ports.

Each user has a queue, a `LocalQueue`:

    tickets/00000041.ticket     numbered in the order of submission, which is the order of service
    guard                       locked while tickets are read or changed

A ticket names a run's folder and is valid while a process holds that folder's lock, so the lease of a killed supervisor
ends. After `paceline share init`, all users have one queue together, a `SharedQueue`, which is also the queue of `ssh`
targets' runs on this machine (`paceline.targets.host_leases`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, TargetError
from paceline.remote.agent import machine
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.system.files import make_own, read_json, state_folder
from paceline.targets import host_leases
from paceline.targets.leases import Queue, has_room, taken_ports

if TYPE_CHECKING:
    from paceline.job.job import Job
    from paceline.targets.leases import GrantedShare, LeaseAnswer, Ticket

#: Environment variable with a folder for leases. By default, leases are in the user's state folder.
LEASES_VARIABLE = "PACELINE_LEASES"
#: Seconds to wait for the queue's lock. Processes hold it for milliseconds, or longer to end a killed run's processes.
_GUARD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The cores, GPUs and ports of a machine that a run holds."""

    nodes: int = 1
    cores: int
    gpus: tuple[str, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LocalDemand:
    """The cores and GPUs that a run needs for a number of nodes."""

    nodes: int
    cores: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class LeaseRequest:
    """A run's queue request: ports, GPU share, priority and time limit."""

    ports: int = 0
    gpu_share: float = 1.0
    priority: str = "normal"
    limit_s: float | None = None

    @classmethod
    def of_job(cls, job: Job, ports: int = 0) -> LeaseRequest:
        limit_s = job.max_run_duration_seconds
        return cls(ports=ports, gpu_share=job.gpu_share, priority=job.priority, limit_s=limit_s)

    def to_ticket(self) -> Ticket:
        return {
            "gpu_share": self.gpu_share,
            "port_count": self.ports,
            "priority": self.priority,
            "limit_s": self.limit_s,
            "granted": None,
        }


def is_shared() -> bool:
    """Return whether all users of this machine have one queue."""
    return os.path.exists(host_leases.shares_path())


def lease_key(run_dir: Path) -> str:
    """Return a run's key in the shared queue: time of submission and id."""
    record = read_json(RunFolder(run_dir).job)
    created = record.get("created_utc", "") if isinstance(record, dict) else ""
    return f"{created}_{run_dir.name}"


def leases_dir() -> Path:
    """Return the folder of this user's leases on this machine.

    Raises:
        TargetError: The home folder can't be written to, and the fallback in /tmp belongs to another user.
    """
    named = os.environ.get(LEASES_VARIABLE)
    if named:
        return Path(named)
    # Name the folder by the host, since several machines may share the home folder.
    folder = state_folder() / "leases" / socket.gethostname()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    own = _own_folder()
    try:
        make_own(own)
    except OSError as error:
        raise TargetError(
            f"this machine's leases can't be kept: {str(folder)!r} can't be written to, and {error} Or name a folder "
            f"({LEASES_VARIABLE})."
        ) from error
    return own / "leases"


def _own_folder() -> Path:
    return Path(f"/tmp/paceline-{os.getuid()}")


class _MachineQueue(ABC):
    """The common base class of this machine's queues."""

    def __init__(self, queue: Queue, cores: int, gpus: tuple[str, ...]) -> None:
        self._queue, self._cores, self._gpus = queue, cores, gpus

    def most_nodes(self, run_dir: Path, demands: Sequence[LocalDemand]) -> int:
        """Return how many nodes the run could have if it returned its lease.

        demands: The run's demands for several numbers of nodes, the largest first. If none fits, the result is 0.

        Raises:
            LookupError: The run has no ticket.
        """
        with self._locked():
            mine, others = self._split(run_dir)
        blocked = self._queue.outside(self._gpus, [*others, {**mine, "granted": None}])
        gpus = [gpu for gpu in self._gpus if gpu not in blocked]
        return next((one.nodes for one in demands if has_room({**mine, **_asked(one)}, others, self._cores, gpus)), 0)

    def renew_ports(self, run_dir: Path) -> tuple[int, ...]:
        """Lease other ports to the run, which keeps its cores and GPUs.

        Raises:
            TargetError: The machine has not enough free ports.
        """
        with self._locked():
            mine, others = self._split(run_dir)
            count = mine["port_count"]
            ports = machine.free_ports(count, taken_ports([mine, *others]))
            if len(ports) < count:
                raise TargetError(f"no {count} ports are free on this machine. End the programs that listen on them.")
            self._queue.mark(mine["key"], granted={**mine["granted"], "ports": ports})
        return tuple(ports)

    def _split(self, run_dir: Path) -> tuple[Ticket, list[Ticket]]:
        """Return the run's ticket, and all other tickets. Raise LookupError if the run has no ticket."""
        tickets, owners = self._queue.tickets(), (None, os.geteuid())
        mine = next((one for one in tickets if one["uid"] in owners and one.get("run_dir") == str(run_dir)), None)
        if mine is None:
            raise LookupError(f"{run_dir} has no place in the queue")
        return mine, [ticket for ticket in tickets if ticket is not mine]

    @abstractmethod
    def _locked(self) -> AbstractContextManager[None]: ...


class LocalQueue(_MachineQueue):
    """The queue of this machine for one user.

    Args:
        folder: The folder of leases, with a lock file and a ticket of each run.
        cores: Cores of the machine, for all runs together; `gpus` are its GPUs.
    """

    def __init__(self, folder: Path, cores: int, gpus: tuple[str, ...]) -> None:
        self._guard = folder / "guard"
        own = str(folder / "tickets")
        # Accept tickets (queue entries) of all users, because a group of users may share this folder.
        queue = Queue(own, lambda: [(None, own)], self._locked, _is_looked_after, machine.free_ports)
        super().__init__(queue, cores, gpus)
        self._keys: dict[Path, str] = {}

    def enqueue(self, run_dir: Path, demand: LocalDemand, request: LeaseRequest) -> None:
        """Append a run's ticket, with its demand, to the queue."""
        with self._locked():
            # The lock keeps other processes from using the same ticket number. In an empty queue the numbers start at 1.
            numbers = [int(ticket["key"]) for ticket in self._queue.tickets()]
            ticket = {
                "key": f"{max(numbers, default=0) + 1:08d}",
                "run_id": RunFolder(run_dir).run_id,
                "run_dir": str(run_dir),
                "all_gpus": list(self._gpus),
                **_asked(demand),
                **request.to_ticket(),
            }
            self._queue.write(ticket)

    def try_grant(self, run_dir: Path, demands: Sequence[LocalDemand] = ()) -> Lease | list[Ticket]:
        """Return the run's lease if its turn has come, else tickets to wait for.

        demands: Alternatives to the ticket's demand, largest first. If none fits now, the run waits for the smallest.

        Raises:
            LookupError: The run has no ticket.
        """
        found: LeaseAnswer = self._queue.unchanged(self._keys.get(run_dir, "")) or {}
        if found:
            return list(found["ahead"] or found["holders"])
        with self._locked():
            mine, others = self._split(run_dir)
            self._keys[run_dir] = mine["key"]
            for demand in demands or (None,):
                if demand is not None and mine["granted"] is None:
                    mine |= _asked(demand)
                at_once = demand is not None and demand is not demands[-1]
                found = self._queue.grant(mine, others, self._cores, self._gpus, at_once)
                if "granted" in found:
                    return _lease(mine, found["granted"])
        return list(found["ahead"] or found["holders"])

    def release(self, run_dir: Path) -> None:
        """Delete the run's ticket, which gives up its lease or its queue position."""
        # Don't call `tickets` here: it ends leftover processes of dead runs, and could end this run's processes.
        with self._locked():
            for _, ticket, _ in self._queue.files():
                if ticket is not None and ticket.get("run_dir") == str(run_dir):
                    self._queue.remove(ticket["key"])

    def look(self) -> LeaseAnswer:
        """Return the machine's resources, and living runs' tickets in order of service."""
        answer: LeaseAnswer = {"cores": self._cores, "gpus": list(self._gpus)}
        with self._locked():
            answer["tickets"] = self._queue.tickets()
        answer["shares"] = host_leases.describe(self._queue, answer)
        return answer

    def leave_reason(self, run_dir: Path) -> str:
        """Record that the run lives. Return why it must release its lease, such as an urgent run, or ""."""
        key = self._keys.get(run_dir)
        return self._queue.leave_reason(key, self._cores, self._gpus) if key is not None else ""

    def note_hang(self, run_dir: Path, since: str | None) -> None:
        """Record in the run's ticket since when the run hangs; None clears it."""
        with contextlib.suppress(TargetError, OSError), self._locked():  # ignore a full disk
            self._queue.mark(self._keys.get(run_dir, ""), hangs_since=since)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        Path(self._queue.own).mkdir(parents=True, exist_ok=True)
        try:
            # The queue's lock is rarely busy for long: other users can't open its file, and so can't hold the lock.
            with locks.locked(self._guard, patience_s=_GUARD_S):
                yield
        except locks.LockHeldError as error:
            raise TargetError(f"this machine's leases can't be read: {error}") from error


class SharedQueue(_MachineQueue):
    """The queue of all users of this machine, with the methods of `LocalQueue`.

    A run's position depends on its time of submission. So the supervisor may write the ticket at any time after the submission.
    """

    def __init__(self, cores: int, gpus: tuple[str, ...]) -> None:
        super().__init__(host_leases.host_queue(machine.free_ports), cores, gpus)
        self._request: Ticket | None = None

    def enqueue(self, run_dir: Path, demand: LocalDemand, request: LeaseRequest) -> None:
        self._request = {
            "key": lease_key(run_dir),
            "run_id": RunFolder(run_dir).run_id,
            "run_dir": str(run_dir),
            "pid": os.getpid(),
            # The parent process ends the workers if the supervisor dies. So the lease lasts until the parent process ends.
            "guardian": os.getppid(),
            "all_cores": self._cores,
            "all_gpus": list(self._gpus),
            **_asked(demand),
            **request.to_ticket(),
        }

    def try_grant(self, run_dir: Path, demands: Sequence[LocalDemand] = ()) -> Lease | list[Ticket]:
        if self._request is None:
            raise LookupError(f"{run_dir} has not stated its demand")
        found: LeaseAnswer = {}
        for demand in demands or (None,):
            asked = self._request | (_asked(demand) if demand is not None else {})
            asked["at_once"] = demand is not None and demand is not demands[-1]
            try:
                found = host_leases.take(asked, machine.free_ports)
            except OSError as error:
                # Another user's process may hold the lock. Return this as the reason why the run waits. The caller tries again.
                return [{"why": f"this machine's queue can't be read: {error}"}]
            if "granted" in found:
                return _lease(asked, found["granted"])
        if why := found.get("why"):
            return [{"why": why}]
        return list(found["ahead"] or found["holders"])

    def release(self, run_dir: Path) -> None:
        with (
            contextlib.suppress(TargetError),
            self._locked(),
        ):  # if the lock stays taken, the lease ends with this process
            self._queue.remove(lease_key(run_dir))

    def look(self) -> LeaseAnswer:
        return host_leases.look({"gpus": self._gpus})

    def leave_reason(self, run_dir: Path) -> str:
        return self._queue.leave_reason(lease_key(run_dir), self._cores, self._gpus)

    def note_hang(self, run_dir: Path, since: str | None) -> None:
        with contextlib.suppress(OSError):  # don't record the hang if another user's process holds the lock
            host_leases.note({"key": lease_key(run_dir), "hangs_since": since})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with host_leases.locked():
                yield
        except OSError as error:
            raise TargetError(f"this machine's queue can't be read: {error}") from error


def open_queue(cores: int, gpus: tuple[str, ...]) -> LocalQueue | SharedQueue:
    """Return this machine's shared queue, or else this user's queue."""
    return SharedQueue(cores, gpus) if is_shared() else LocalQueue(leases_dir(), cores, gpus)


def _lease(ticket: Ticket, granted: GrantedShare) -> Lease:
    ports = tuple(granted["ports"])
    return Lease(nodes=ticket.get("nodes", 1), cores=ticket["cores"], gpus=tuple(granted["gpus"]), ports=ports)


def _asked(demand: LocalDemand) -> dict[str, int]:
    return {"nodes": demand.nodes, "cores": demand.cores, "gpu_count": demand.gpus}


def _is_looked_after(ticket: Ticket) -> bool:
    """Return whether a ticket's run lives: a process holds the lock of its folder."""
    if not isinstance(ticket.get("run_dir"), str) or not ticket["key"].isdecimal():
        return False
    folder = RunFolder(Path(ticket["run_dir"]))
    if locks.is_held(folder.lock):
        return True
    # Reading a dead run's record ends the run's leftover processes. Do this before another run gets their cores.
    with contextlib.suppress(PacelineError, OSError):
        read.record(folder)
    return False
