"""Sets of ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.compat.horovod.common.exceptions import translated
from paceline.compat.horovod.common.ops import is_power_of_two
from paceline.compat.horovod.common.types import RanksOrComm

if TYPE_CHECKING:
    from mpi4py import MPI

    from paceline.collectives.engine import Engine


class ProcessSet:
    """A set of ranks, given as a list or as an mpi4py communicator.

    `process_set_id` is 0 for the set of all ranks. An unregistered set has the id None.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: MPI.Comm | None = None

    def __init__(self, ranks_or_comm: RanksOrComm) -> None:
        if isinstance(ranks_or_comm, Iterable):
            self.ranks = sorted(int(rank) for rank in ranks_or_comm)
            if not self.ranks or len(set(self.ranks)) != len(self.ranks) or self.ranks[0] < 0:
                raise ValueError(f"ProcessSet({list(ranks_or_comm)}): give at least one rank, each once, from 0 up.")
        else:
            self.mpi_comm = ranks_or_comm

    def size(self) -> int | None:
        """Return the number of ranks, or None if the set is unregistered."""
        return None if self.process_set_id is None else len(registered_ranks(self))

    def rank(self) -> int | None:
        """Return this rank's position in the set, or None if unregistered.

        Raises:
            ValueError: This rank is not in the set.
        """
        return None if self.process_set_id is None else checked_members(self).index(registry.engine().rank)

    def included(self) -> bool:
        """Return whether this rank belongs to the set."""
        return registry.engine().rank in (self.ranks or ())

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def registered_ranks(process_set: ProcessSet) -> list[int]:
    """Return the set's global ranks.

    Raises:
        ValueError: Horovod is not initialized, or the set is not registered.
    """
    registry.engine()
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r} is not a process set. Give what hvd.add_process_set returned.")
    if process_set.process_set_id is None or process_set.ranks is None:
        raise ValueError(
            f"{process_set!r} is not registered, or was removed. Give it to hvd.init(process_sets=[...]) or "
            "hvd.add_process_set on every rank."
        )
    return process_set.ranks


def checked_members(process_set: ProcessSet) -> list[int]:
    """Return the set's global ranks, which must include this rank.

    Raises:
        ValueError: Horovod is not initialized, the set is not registered, or this rank is not in it.
    """
    ranks, own = registered_ranks(process_set), registry.engine().rank
    if own not in ranks:
        raise ValueError(f"rank {own} is not a member of the provided process set. It has {ranks}.")
    return ranks


def check_root(root_rank: int, process_set: ProcessSet) -> None:
    """Raise an error for a `root_rank` outside the process set.

    Raises:
        ValueError: The rank is not in the set, or `checked_members` refuses the set.
    """
    members = checked_members(process_set)
    if root_rank not in members:
        raise ValueError(
            f"root_rank={root_rank!r} is not among the ranks {members}. It is a rank of the world, in a process set too."
        )


def check_adasum(process_set: ProcessSet) -> None:
    """Raise an error for a process set that Adasum cannot reduce over.

    Raises:
        NotImplementedError: The set is not the world, or its number of ranks is not a power of 2.
    """
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum reduces over all ranks: it can't be used with a process set.")
    size = registry.engine().size
    if not is_power_of_two(size):
        raise NotImplementedError(
            f"Adasum needs a number of ranks that is a power of 2, not {size}. Start so many, or use op=hvd.Average."
        )


class _Registry:
    """The registered process sets by id."""

    def __init__(self) -> None:
        # The constructor requires ranks, but the ranks of the world are unknown until the engine runs. Pass [0] for now.
        self.world = ProcessSet([0])
        self.world.ranks = None
        self.world.process_set_id = 0
        self._engine: Engine | None = None
        self._dynamic = False
        self._sets: dict[int, ProcessSet] = {}

    def begin(self, engine: Engine, *, dynamic: bool, first: Sequence[ProcessSet]) -> None:
        self._engine, self._dynamic = engine, dynamic
        self.world.ranks = list(range(engine.size))
        self._sets = {0: self.world}
        for process_set in first:
            if process_set is not self.world:
                self._add(process_set)

    def end(self) -> None:
        # Forget these numbers, because the restarted engine may give them to other process sets.
        for process_set in self._sets.values():
            if process_set is not self.world:
                process_set.process_set_id = None
        self.world.ranks = None
        self._sets, self._engine, self._dynamic = {}, None, False

    @property
    def is_begun(self) -> bool:
        return self._engine is not None

    def engine(self) -> Engine:
        if self._engine is None:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return self._engine

    def add(self, process_set: ProcessSet) -> None:
        self._check_dynamic("added")
        self._add(process_set)

    def remove(self, process_set: ProcessSet) -> bool:
        engine = self.engine()
        number = process_set.process_set_id
        if number == 0:
            return False
        self._check_dynamic("removed")
        if number is None or self._sets.get(number) is not process_set:
            return False
        with translated():
            if not engine.remove_process_set(number):
                return False
        # Forget the process set only after all ranks have agreed on its removal, because it is in use until then.
        del self._sets[number]
        process_set.process_set_id = None
        return True

    def _add(self, process_set: ProcessSet) -> None:
        engine = self.engine()
        # Let the engine check `ranks`. It raises errors on all ranks, so that no rank waits for a rank that has failed.
        with translated():
            # `add_process_set` is a collective of all ranks, so each rank registers the sets of all ranks in the same order.
            for ranks in self._alike(process_set):
                number = engine.add_process_set(ranks)
                if ranks == process_set.ranks:
                    process_set.process_set_id = number
                    self._sets[number] = process_set

    def _alike(self, process_set: ProcessSet) -> list[list[int]]:
        """Return the process sets to register, as lists of ranks.

        The list has one set, or one for each communicator if the ranks pass different mpi4py communicators.
        """
        if process_set.ranks is not None or process_set.mpi_comm is None:
            return [process_set.ranks or []]
        import numpy as np

        engine = self.engine()
        # Only the members call this method, so gather their ranks over the mpi4py communicator.
        process_set.ranks = sorted(int(rank) for rank in process_set.mpi_comm.allgather(engine.rank))
        # Every rank sends a row that has a 1 for each member of its set. Then all ranks know all sets.
        own = np.zeros((1, engine.size), np.uint8)
        own[0, process_set.ranks] = 1
        every = engine.allgather("process_set.communicators", own).wait()
        # All members of a set send equal rows. Return each set once, in the same order on every rank.
        return [list(ranks) for ranks in dict.fromkeys(tuple(np.flatnonzero(row).tolist()) for row in every)]

    def _check_dynamic(self, what: str) -> None:
        self.engine()
        if not self._dynamic:
            raise ValueError(
                f"process sets can be {what} after hvd.init() only with HOROVOD_DYNAMIC_PROCESS_SETS=1 or "
                "hvd.init(process_sets='dynamic')."
            )


registry = _Registry()
#: The process set that contains all ranks.
global_process_set = registry.world


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set and return it.

    Every rank of the world has to register the same sets in the same order.

    Raises:
        ValueError: Sets are fixed after `init` (not "dynamic"), a set of these ranks exists, or a rank is not in the world.
        HorovodInternalError: The ranks have named different sets. Every rank raises this error.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    registry.add(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and return whether it existed.

    Return False for an unregistered set, and for the set of all ranks, which stays. Every rank has to call this.

    Raises:
        ValueError: Sets are fixed after `init` (not "dynamic").
    """
    return registry.remove(process_set)


def is_process_set_included(process_set: ProcessSet) -> bool:
    return process_set.included()
