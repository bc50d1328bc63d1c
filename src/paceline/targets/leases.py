"""Several runs share one machine: a queue of tickets, and what each run holds of cores, GPUs and ports.

A ticket is a small file that names a run's folder. Its number gives the order, which is that of submission. A ticket
counts as long as somebody holds the lock of that run's folder, so a killed supervisor gives everything back at once
and nothing has to be cleaned up: whoever looks next removes its ticket. No process serves the queue.

    tickets/00000041.json   {"run_dir": ..., "cores": 2, "gpus": 0, "ports": 2, "granted": {...} or absent}

Runs are served strictly in order: a run that needs much is not overtaken for ever by runs that need little.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, TargetError
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.system.files import make_own, read_json, write_json

#: Where the tickets lie, in place of the user's state folder.
LEASES_VARIABLE = "PACELINE_LEASES"
#: Whoever holds the guard does so for moments, but for the end of a killed run's processes.
_GUARD_S = 60.0
#: Below the range from which Linux takes ports for outgoing connections (32768 and up), above most services.
_PORTS = range(20000, 32000)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run asks of a machine."""

    cores: int
    gpus: int
    ports: int


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a run holds of a machine."""

    cores: int
    gpus: tuple[str, ...]
    ports: tuple[int, ...]


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


class Queue:
    """The queue of one machine. cores, gpus: what there is to share out."""

    def __init__(self, folder: Path, cores: int, gpus: tuple[str, ...]) -> None:
        self._tickets = folder / "tickets"
        self._guard = folder / "guard"
        self._counter = folder / "counter"
        self._cores = cores
        self._gpus = gpus

    def enqueue(self, run_dir: Path, demand: Demand) -> None:
        """Put the run at the end of the queue."""
        with self._locked():
            number = int(read_json(self._counter) or 0) + 1
            for name, _ in self._living():
                number = max(number, int(name.split(".")[0]) + 1)
            write_json(self._counter, number)
            ticket = {"run_dir": str(run_dir), "cores": demand.cores, "gpus": demand.gpus, "ports": demand.ports}
            write_json(self._tickets / f"{number:08d}.json", ticket)

    def try_grant(self, run_dir: Path) -> Lease | list[str]:
        """The run's lease, if it is its turn and there is room; else the ids of the runs that it waits for.

        Raises:
            LookupError: the run has no ticket.
        """
        with self._locked():
            tickets = self._living()
            mine = next((item for item in tickets if item[1]["run_dir"] == str(run_dir)), None)
            if mine is None:
                raise LookupError(f"{run_dir} has no place in the queue")
            name, ticket = mine
            if "granted" not in ticket:
                ahead = [other for _, other in tickets[: tickets.index(mine)] if "granted" not in other]
                holders = [other for _, other in tickets if "granted" in other]
                lease = None if ahead else self._fit(ticket, holders)
                if lease is None:
                    return [RunFolder(Path(other["run_dir"])).run_id for other in (ahead or holders)]
                ticket["granted"] = {"gpus": list(lease.gpus), "ports": list(lease.ports)}
                write_json(self._tickets / name, ticket)
            granted = ticket["granted"]
            return Lease(cores=ticket["cores"], gpus=tuple(granted["gpus"]), ports=tuple(granted["ports"]))

    def renew_ports(self, run_dir: Path) -> tuple[int, ...]:
        """Lease the run other ports than those it holds, in which it keeps its turn.

        Raises:
            TargetError: there are not enough.
        """
        with self._locked():
            tickets = [(name, ticket) for name, ticket in self._living() if "granted" in ticket]
            taken = {port for _, ticket in tickets for port in ticket["granted"]["ports"]}
            name, ticket = next(item for item in tickets if item[1]["run_dir"] == str(run_dir))
            ports = free_ports(ticket["ports"], taken)
            if len(ports) < ticket["ports"]:
                raise TargetError(f"no {ticket['ports']} ports are free on this machine. End what listens on them.")
            ticket["granted"]["ports"] = list(ports)
            write_json(self._tickets / name, ticket)
            return ports

    def release(self, run_dir: Path) -> None:
        """Give back what the run holds, or its place."""
        with self._locked():
            for name, ticket in self._all():
                if ticket.get("run_dir") == str(run_dir):
                    (self._tickets / name).unlink(missing_ok=True)

    def _fit(self, ticket: dict[str, Any], holders: list[dict[str, Any]]) -> Lease | None:
        used = sum(other["cores"] for other in holders)
        taken = {gpu for other in holders for gpu in other["granted"]["gpus"]}
        free = [gpu for gpu in self._gpus if gpu not in taken]
        if used + min(ticket["cores"], self._cores) > self._cores or ticket["gpus"] > len(free):
            return None
        ports = free_ports(ticket["ports"], {port for other in holders for port in other["granted"]["ports"]})
        if len(ports) < ticket["ports"]:
            return None
        return Lease(cores=ticket["cores"], gpus=tuple(free[: ticket["gpus"]]), ports=ports)

    def _living(self) -> list[tuple[str, dict[str, Any]]]:
        """(file name, ticket) in order; tickets of runs that nobody looks after any more are removed."""
        living = []
        for name, ticket in self._all():
            folder = RunFolder(Path(ticket["run_dir"]))
            if locks.is_held(folder.lock):
                living.append((name, ticket))
                continue
            # Before its cores are given to another, whatever a killed supervisor may have left on them is ended.
            with contextlib.suppress(PacelineError, OSError):
                read.record(folder)
            (self._tickets / name).unlink(missing_ok=True)
        return living

    def _all(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for name in sorted(os.listdir(self._tickets)):
            ticket = read_json(self._tickets / name) if name[0].isdigit() else None
            if isinstance(ticket, dict) and isinstance(ticket.get("run_dir"), str):
                found.append((name, ticket))
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._tickets.mkdir(parents=True, exist_ok=True)
        try:
            with locks.locked(self._guard, patience_s=_GUARD_S):
                yield
        except locks.LockHeldError as error:
            raise TargetError(f"this machine's leases can't be read: {error}") from error


def free_ports(count: int, taken: set[int]) -> tuple[int, ...]:
    """`count` ports of this machine on which nobody listens, not among `taken`."""
    # Start somewhere else for each caller, so that a port just given up is not given out again at once.
    start = int.from_bytes(os.urandom(2), "big") % len(_PORTS)
    found: list[int] = []
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        if port not in taken and _is_free(port):
            found.append(port)
            if len(found) == count:
                break
    return tuple(found)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
