"""The runs of `local` share this machine: `paceline.targets.leases` with a user's own folder, and with ports.

    tickets/00000041.ticket     its number gives the order, which is that of submission
    guard                       locked by whoever reads or changes tickets

A ticket names a run's folder. It counts as long as somebody holds the lock of that folder, so a killed supervisor gives
everything back at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, TargetError
from paceline.remote.agent import machine
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.system.files import make_own
from paceline.targets.leases import Queue, has_room

if TYPE_CHECKING:
    from paceline.targets.leases import Ticket

#: Where the tickets lie, in place of the user's state folder.
LEASES_VARIABLE = "PACELINE_LEASES"
#: Whoever holds the guard does so for moments, but for the end of a killed run's processes.
_GUARD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A run's share of a machine. nodes: for how many it is enough, of those that an elastic run has asked for."""

    nodes: int = 1
    cores: int
    gpus: tuple[str, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LocalDemand:
    """What a run asks of a machine for so many nodes."""

    nodes: int
    cores: int
    gpus: int


def leases_dir() -> Path:
    """The folder of this machine's tickets, one for each user.

    Raises:
        TargetError: the user's home can't be written to, and the folder in its place is somebody else's.
    """
    named = os.environ.get(LEASES_VARIABLE)
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    # The home may be shared by several machines.
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
    """The queue of this machine. folder: where its tickets lie. cores, gpus: what there is to share out."""

    def __init__(self, folder: Path, cores: int, gpus: tuple[str, ...]) -> None:
        self._guard = folder / "guard"
        self._cores, self._gpus = cores, gpus
        own = str(folder / "tickets")
        # Whoever may write to the folder may put tickets there: a group may have named one that they share.
        self._queue = Queue(own, lambda: [(None, own)], self._locked, _is_looked_after, machine.free_ports)

    def enqueue(self, run_dir: Path, *, cores: int, gpus: int, ports: int, gpu_share: float = 1.0) -> None:
        """Put the run, which asks for so much, at the end of the queue. gpu_share: of each of its GPUs."""
        with self._locked():
            # Under the guard, so no two runs get one number. A number is used again once the queue is empty.
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
        """The run's lease, if it is its turn and there is room; else the tickets of the runs that it waits for.

        demands: what it takes in place of what its ticket says, the largest first; it waits for the last.

        Raises:
            LookupError: the run has no ticket.
        """
        with self._locked():
            mine, others = self._split(run_dir)
            found: dict[str, Any] = {}
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
        """The nodes of the first of these demands, the largest first, for which there would be room if the run gave back what
        it holds; 0 where there is none.

        Raises:
            LookupError: the run has no ticket.
        """
        with self._locked():
            mine, others = self._split(run_dir)
            for demand in demands:
                if has_room({**mine, **_asked(demand)}, others, self._cores, self._gpus):
                    return demand.nodes
        return 0

    def renew_ports(self, run_dir: Path) -> tuple[int, ...]:
        """Lease the run other ports than those it holds, in which it keeps its turn.

        Raises:
            TargetError: there are not enough.
        """
        with self._locked():
            mine, others = self._split(run_dir)
            count = mine["port_count"]
            ports = machine.free_ports(count, self._queue.taken("ports", [mine, *others]))
            if len(ports) < count:
                raise TargetError(f"no {count} ports are free on this machine. End what listens on them.")
            mine["granted"]["ports"] = ports
            self._queue.write(mine)
            return tuple(ports)

    def release(self, run_dir: Path) -> None:
        """Give back what the run holds, or its place."""
        # `files`, not `tickets`: those look at whether runs live, and end what is left of dead ones, which may be this one.
        with self._locked():
            for _, ticket, _ in self._queue.files():
                if ticket is not None and ticket.get("run_dir") == str(run_dir):
                    self._queue.remove(ticket["key"])

    def tickets(self) -> list[Ticket]:
        """The tickets of the runs that somebody looks after, in order."""
        with self._locked():
            return self._queue.tickets()

    def _split(self, run_dir: Path) -> tuple[Ticket, list[Ticket]]:
        """The run's ticket, and all others.

        Raises:
            LookupError: the run has none.
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
            # The guard is this user's alone, or a group's: nobody else can open it.
            with locks.locked(self._guard, patience_s=_GUARD_S):
                yield
        except locks.LockHeldError as error:
            raise TargetError(f"this machine's leases can't be read: {error}") from error


def _asked(demand: LocalDemand) -> dict[str, int]:
    return {"nodes": demand.nodes, "cores": demand.cores, "gpu_count": demand.gpus}


def _is_looked_after(ticket: Ticket) -> bool:
    """True if somebody holds the lock of the ticket's run."""
    if not isinstance(ticket.get("run_dir"), str) or not ticket["key"].isdecimal():
        return False
    folder = RunFolder(Path(ticket["run_dir"]))
    if locks.is_held(folder.lock):
        return True
    # Before its cores are given to another, whatever a killed supervisor may have left on them is ended.
    with contextlib.suppress(PacelineError, OSError):
        read.record(folder)
    return False
