"""The queue of this machine for runs of `local`, which leases cores, GPUs and ports. Each user has a queue.

    tickets/00000041.ticket     numbered in the order of submission, which is the order of service
    guard                       locked while tickets are read or changed

A ticket names a run's folder and is valid while a process holds that folder's lock, so a killed supervisor frees everything.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, TargetError
from paceline.remote.agent import machine
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.system.files import make_own
from paceline.targets.leases import Queue, has_room

if TYPE_CHECKING:
    from paceline.targets.leases import LeaseAnswer, Ticket

#: The environment variable that replaces the folder of leases in the user's state folder.
LEASES_VARIABLE = "PACELINE_LEASES"
#: Timeout for the guard. Processes hold the guard for milliseconds, except to end the processes of a killed run.
_GUARD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A run's share of a machine. For an elastic run, the share is enough for `nodes` nodes."""

    nodes: int = 1
    cores: int
    gpus: tuple[str, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LocalDemand:
    """The resources that a run needs on a machine for a number of nodes."""

    nodes: int
    cores: int
    gpus: int


def leases_dir() -> Path:
    """Return the folder of this user's leases on this machine.

    Raises:
        TargetError: The home folder can't be written to, and the fallback in /tmp belongs to another user.
    """
    named = os.environ.get(LEASES_VARIABLE)
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    # Several machines may share the home folder, so each host name has its own folder.
    folder = Path(state) / "paceline" / "leases" / socket.gethostname()
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


class LocalQueue:
    """The queue of this machine.

    Args:
        folder: The folder of leases, with the guard and the tickets.
        cores: Cores of the machine, for all runs together; `gpus` are its GPUs.
    """

    def __init__(self, folder: Path, cores: int, gpus: tuple[str, ...]) -> None:
        self._guard = folder / "guard"
        self._cores, self._gpus = cores, gpus
        own = str(folder / "tickets")
        # A group may share the folder: accept the tickets of all users who can write to the folder.
        self._queue = Queue(own, lambda: [(None, own)], self._locked, _is_looked_after, machine.free_ports)

    def enqueue(self, run_dir: Path, *, cores: int, gpus: int, ports: int, gpu_share: float = 1.0) -> None:
        """Add a run to the end of the queue, with its demand.

        gpu_share: The share of each GPU that the run takes.
        """
        with self._locked():
            # The guard keeps the numbers unique. They start at 1 again when the queue is empty.
            numbers = [int(ticket["key"]) for ticket in self._queue.tickets()]
            ticket = {
                "key": f"{max(numbers, default=0) + 1:08d}",
                "run_id": RunFolder(run_dir).run_id,
                "run_dir": str(run_dir),
                "cores": cores,
                "gpu_count": gpus,
                "gpu_share": gpu_share,
                "port_count": ports,
                "granted": None,
            }
            self._queue.write(ticket)

    def try_grant(self, run_dir: Path, demands: Sequence[LocalDemand] = ()) -> Lease | list[Ticket]:
        """Return the run's lease if the run is first and fits, else the tickets that the run waits for.

        demands: Alternatives that replace the ticket's demand, largest first; the run waits for the last of them.

        Raises:
            LookupError: The run has no ticket.
        """
        with self._locked():
            mine, others = self._split(run_dir)
            found: LeaseAnswer = {}
            for demand in demands or (None,):
                if demand is not None and mine["granted"] is None:
                    mine |= _asked(demand)
                at_once = demand is not None and demand is not demands[-1]
                found = self._queue.grant(mine, others, self._cores, self._gpus, at_once)
                if "granted" in found:
                    break
        if "granted" not in found:
            return list(found["ahead"] or found["holders"])
        granted = found["granted"]
        return Lease(
            nodes=mine.get("nodes", 1), cores=mine["cores"], gpus=tuple(granted["gpus"]), ports=tuple(granted["ports"])
        )

    def most_nodes(self, run_dir: Path, demands: Sequence[LocalDemand]) -> int:
        """Return the node count of the largest demand that would fit if the run returned its lease, or 0.

        demands: Alternative demands, largest first.

        Raises:
            LookupError: The run has no ticket.
        """
        with self._locked():
            mine, others = self._split(run_dir)
            for demand in demands:
                if has_room({**mine, **_asked(demand)}, others, self._cores, self._gpus):
                    return demand.nodes
        return 0

    def renew_ports(self, run_dir: Path) -> tuple[int, ...]:
        """Lease other ports to the run. The run keeps its lease of cores and GPUs.

        Raises:
            TargetError: The machine has not enough free ports.
        """
        with self._locked():
            mine, others = self._split(run_dir)
            count = mine["port_count"]
            ports = machine.free_ports(count, self._queue.taken("ports", [mine, *others]))
            if len(ports) < count:
                raise TargetError(f"no {count} ports are free on this machine. End the programs that listen on them.")
            mine["granted"]["ports"] = ports
            self._queue.write(mine)
            return tuple(ports)

    def release(self, run_dir: Path) -> None:
        """Delete the run's ticket, which gives up its lease or its queue position."""
        # Iterate over `files`: `tickets` would also end leftover processes of dead runs, perhaps of this run.
        with self._locked():
            for _, ticket, _ in self._queue.files():
                if ticket is not None and ticket.get("run_dir") == str(run_dir):
                    self._queue.remove(ticket["key"])

    def tickets(self) -> list[Ticket]:
        """Return the tickets of living runs, in the order of service."""
        with self._locked():
            return self._queue.tickets()

    def _split(self, run_dir: Path) -> tuple[Ticket, list[Ticket]]:
        """Return the run's ticket and a list of all other tickets.

        Raises:
            LookupError: The run has no ticket.
        """
        tickets = self._queue.tickets()
        mine = next((ticket for ticket in tickets if ticket["run_dir"] == str(run_dir)), None)
        if mine is None:
            raise LookupError(f"{run_dir} has no place in the queue")
        return mine, [ticket for ticket in tickets if ticket is not mine]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        Path(self._queue.own).mkdir(parents=True, exist_ok=True)
        try:
            # Only this user, or a group that shares the folder, can open the guard, so a lock error is rare.
            with locks.locked(self._guard, patience_s=_GUARD_S):
                yield
        except locks.LockHeldError as error:
            raise TargetError(f"this machine's leases can't be read: {error}") from error


def _asked(demand: LocalDemand) -> dict[str, int]:
    return {"nodes": demand.nodes, "cores": demand.cores, "gpu_count": demand.gpus}


def _is_looked_after(ticket: Ticket) -> bool:
    """Return whether a process holds the lock of the ticket's run."""
    if not isinstance(ticket.get("run_dir"), str) or not ticket["key"].isdecimal():
        return False
    folder = RunFolder(Path(ticket["run_dir"]))
    if locks.is_held(folder.lock):
        return True
    # Reading the record ends processes that a killed supervisor has left, before another run gets their cores.
    with contextlib.suppress(PacelineError, OSError):
        read.record(folder)
    return False
