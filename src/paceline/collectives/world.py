"""The ranks that were started together with this process: the transport between them, and their machines.

HOROVOD_CONTROLLER or HOROVOD_CPU_OPERATIONS is mpi or gloo     that transport
an mpirun, or srun --mpi, has started this process              MPI
RANK and WORLD_SIZE name several ranks                          Gloo (torchrun, distributed_backend "gloo", "nccl")
otherwise                                                       MPI if mpi4py is installed, else this rank alone
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.collectives import mpi
from paceline.collectives.errors import ArgumentError, CollectivesError, LostRankError
from paceline.collectives.liveness import PeerPlace
from paceline.collectives.transport import Alone, Transport
from paceline.system.run_variables import GENERATION_VARIABLE

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

MPI, GLOO, ALONE = "mpi", "gloo", "alone"
_CHOICES = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
#: Environment variables of MPI launchers: Open MPI, MPICH and similar libraries, PMIx (srun --mpi=pmix), Cray.
_MPI_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "PALS_RANKID")

#: World (MPI, or size, host and port) -> counter of its engines. A replaced worker begins at the others' next number.
_generations: defaultdict[object, Iterator[int]] = defaultdict(itertools.count)
_comm: Intracomm | None = None
_comm_places: Sequence[PeerPlace] = ()
#: The last world's lost ranks; and this process's (rank, size, host, port) there, with which it can't join again.
_lost: tuple[set[int], object] = (set(), None)
_lost_of_mpi: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class RankedWorld:
    """The ranks that were started together, and the transport between them.

    Attributes:
        name: The transport's name: "mpi", "gloo" or "alone".
        lost_ranks: The ranks whose processes have died so far.
        generation: The number of earlier engines in this process.
    """

    name: str
    transport: Transport
    places: Sequence[PeerPlace]
    lost_ranks: set[int] = field(default_factory=set)
    generation: int = 0


def join(environ: Mapping[str, str]) -> RankedWorld:
    """Connect the ranks that were started together. Return them with their transport."""
    name = choice(environ)
    if name == ALONE:
        return _alone(name, environ)
    return _join_mpi(environ) if name == MPI else _join_gloo(environ)


def _alone(name: str, environ: Mapping[str, str]) -> RankedWorld:
    transport = Alone()
    return RankedWorld(name=name, transport=transport, places=PeerPlace.of_all(transport, environ))


def choice(environ: Mapping[str, str]) -> str:
    """Return the transport to use: "mpi", "gloo" or "alone".

    If HOROVOD_CONTROLLER and HOROVOD_CPU_OPERATIONS are unset: MPI for mpirun's processes, Gloo for several other ranks.
    """
    chosen = {name: value for name in _CHOICES if (value := environ.get(name, "").strip().lower())}
    for variable, value in chosen.items():
        if value not in (MPI, GLOO):
            raise ArgumentError(f"{variable}={environ[variable]!r}: collectives go over 'mpi' or 'gloo'. Name one.")
    if len(set(chosen.values())) > 1:
        both = " and ".join(f"{variable}={value}" for variable, value in chosen.items())
        raise ArgumentError(f"{both} contradict each other: one transport does both. Set them to the same.")
    if chosen:
        return next(iter(chosen.values()))
    # Under torchrun or Paceline, ignore the variables of an MPI launcher: both may run below an mpirun or in a Slurm step.
    if any(name in environ for name in _MPI_LAUNCHERS) and "TORCHELASTIC_USE_AGENT_STORE" not in environ:
        return MPI
    size = environ.get("WORLD_SIZE") or environ.get("HOROVOD_SIZE") or ""
    if size.isdecimal() and int(size) > 1:
        return GLOO
    return MPI if importlib.util.find_spec("mpi4py") is not None else ALONE


def _join_mpi(environ: Mapping[str, str]) -> RankedWorld:
    from paceline.collectives.mpi_transport import MpiTransport

    global _comm, _comm_places
    world = mpi.world()
    if mpi.is_abandoned():
        advice = "Let the run be restarted (max_restarts)."
        if not _lost_of_mpi:
            raise CollectivesError(f"communication has failed before, and MPI can't go on in this process. {advice}")
        names = ", ".join(map(str, sorted(_lost_of_mpi)))
        raise LostRankError(
            f"rank {names} was lost, and MPI can't go on in this process without it. {advice}", min(_lost_of_mpi)
        )
    generation = next(_generations[MPI])
    # Use one communicator for all engines: a new one would need all ranks, and a rank may be dead. Messages have the
    # engine's number as their tag, so that an engine gets no messages of earlier engines.
    if _comm is None:
        _comm = world.Dup()
        _comm_places = PeerPlace.of_all(MpiTransport(_comm), environ)
    transport = MpiTransport(_comm, generation) if _comm.size > 1 else Alone()
    return RankedWorld(
        name=MPI, transport=transport, places=_comm_places, lost_ranks=_lost_of_mpi, generation=generation
    )


def _join_gloo(environ: Mapping[str, str]) -> RankedWorld:
    from paceline.collectives import rendezvous
    from paceline.collectives.gloo_transport import GlooTransport

    global _lost
    rank, size, host, port = where = rendezvous.place(environ)
    if size == 1:
        return _alone(GLOO, environ)
    if _lost[0] and _lost[1] == where and GENERATION_VARIABLE not in environ:
        names = ", ".join(map(str, sorted(_lost[0])))
        raise LostRankError(
            f"rank {names} of {size} was lost and not started again: this process still has RANK={rank}, "
            f"WORLD_SIZE={size}, MASTER_ADDR={host}, MASTER_PORT={port}. Let the run be restarted (max_restarts), or "
            "set these variables to those of the ranks that are left, and a free port, before hvd.init().",
            min(_lost[0]),
        )
    if 0 in _lost[0]:
        rendezvous.forget_store(host, port)
    if where[1:] not in _generations:
        _generations[where[1:]] = itertools.count(int(environ.get(GENERATION_VARIABLE, "0")))
    generation = next(_generations[where[1:]])
    try:
        meeting = rendezvous.meet(environ, generation)
    except CollectivesError:
        if rank == 0 or not _lost[0] or GENERATION_VARIABLE not in environ:
            raise
        # Shortly after the ranks in `_lost`, rank 0 was lost too, which served the store. Meet at a new store.
        rendezvous.forget_store(host, port)
        meeting = rendezvous.meet(environ, generation)
    transport = GlooTransport(meeting, range(size))
    lost: set[int] = set()
    _lost = (lost, where)
    return RankedWorld(
        name=GLOO,
        transport=transport,
        places=PeerPlace.of_all(transport, environ),
        lost_ranks=lost,
        generation=generation,
    )
