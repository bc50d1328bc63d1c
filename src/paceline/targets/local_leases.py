"""The queue of this machine for runs of `local`: `paceline.targets.leases` in a folder per user, with ports.

    tickets/00000041.ticket     its number gives the order, that of submission
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

#: Replaces the folder of tickets in the user's state folder.
LEASES_VARIABLE = "PACELINE_LEASES"
#: The guard is held for moments, except to end the processes of a killed run.
_GUARD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A run's share of a machine, enough for `nodes` of the nodes that an elastic run asked for."""

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
    """Return the folder of this user's tickets on this machine.

    Raises:
        TargetError: The home can't be written to, and the fallback belongs to another user.
    """
    named = os.environ.get(LEASES_VARIABLE)
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    # Several machines may share the home.
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
        folder: Of the tickets.
        cores: To share out, as `gpus`.
    """

    def __init__(self, folder: Path, cores: int, gpus: tuple[str, ...]) -> None:
        self._guard = folder / "guard"
        self._cores, self._gpus = cores, gpus
        own = str(folder / "tickets")
        # Everybody who may write to the folder may add tickets: a group may share it.
        self._queue = Queue(own, lambda: [(None, own)], self._locked, _is_looked_after, machine.free_ports)

    def enqueue(self, run_dir: Path, *, cores: int, gpus: int, ports: int, gpu_share: float = 1.0) -> None:
        """Add a run to the end of the queue, with its demand.

        gpu_share: Share of each GPU.
        """
        with self._locked():
            # The guard keeps numbers unique. They start again when the queue is empty.
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
        """Return the run's lease if it is first and fits, else the tickets that it waits for.

        demands: Override the demand of the ticket, largest first; the run waits for the last.

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
        """Return the nodes of the largest demand that would fit if the run returned its lease, or 0.

        demands: Largest first.

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
        """Lease other ports to the run, which keeps its turn.

        Raises:
            TargetError: There are not enough.
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
        """Remove the run's ticket: its lease or its place."""
        # `files`, not `tickets`, which would end leftover processes of dead runs, perhaps of this one.
        with self._locked():
            for _, ticket, _ in self._queue.files():
                if ticket is not None and ticket.get("run_dir") == str(run_dir):
                    self._queue.remove(ticket["key"])

    def tickets(self) -> list[Ticket]:
        """Return the tickets of living runs, in order."""
        with self._locked():
            return self._queue.tickets()

    def _split(self, run_dir: Path) -> tuple[Ticket, list[Ticket]]:
        """Return the run's ticket, and all others.

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
            # Only this user, or the group, can open the guard.
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
    # End what a killed supervisor has left on these cores before another run gets them.
    with contextlib.suppress(PacelineError, OSError):
        read.record(folder)
    return False
