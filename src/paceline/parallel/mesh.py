"""This process's place in the world: torch.distributed started or joined, the device, and the groups of the mesh.

    axes, outermost first        pipe  data  shard  context  expert  tensor

Ranks of one tensor group are neighbours, so that what talks most is closest. Loaded on use: it imports torch.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline import torch_private
from paceline.collectives import store_listener
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import from_first
from paceline.parallel.strategy import Layout

AXES = ("pipe", "data", "shard", "context", "expert", "tensor")


@dataclass(frozen=True, kw_only=True, eq=False)
class WorldPlace:
    """This process among all: what is known before the layout is."""

    rank: int
    size: int
    device: torch.device


@dataclass(frozen=True, kw_only=True, eq=False)
class World(WorldPlace):
    """This process among all, and the groups that its layout makes.

    mesh: with those axes of `AXES` that have more than one rank.
        None in a world of one, where there may be no process group at all.
    store: what the ranks leave messages in, or None in a world of one.
    """

    layout: Layout
    mesh: Any = None
    store: Any = None
    groups: dict[frozenset[str], Any] = field(default_factory=dict)

    def group(self, *axes: str) -> Any:
        """The process group of the ranks that differ from this one along these axes alone; None if that is it alone."""
        active = frozenset(axis for axis in axes if self.extent(axis) > 1)
        return self.groups[active] if active else None

    def extent(self, axis: str) -> int:
        """The number of ranks along the axis."""
        return int(getattr(self.layout, axis))

    def coordinate(self, axis: str) -> int:
        """This rank's place along the axis, from 0."""
        return coordinates(self.layout, self.rank)[axis]

    @property
    def replicas(self) -> int:
        """The number of parts that each batch is cut into."""
        return self.layout.replicas

    @property
    def replica(self) -> int:
        """The number of this rank's part."""
        return self.coordinate("data") * self.layout.shard + self.coordinate("shard")

    @property
    def replica_group(self) -> Any:
        """The ranks that compute other rows with the same part of the model."""
        return self.group("data", "shard")

    @property
    def gradient_group(self) -> Any:
        """The ranks over which gradients are summed: other rows, or other parts of their sequences."""
        return self.group("data", "shard", "context")

    @property
    def model_group(self) -> Any:
        """The ranks that together hold one copy of all parameters."""
        return self.group("pipe", "shard", "expert", "tensor")

    @property
    def holder_axis(self) -> str:
        """The axis along which a rank may lack a whole parameter that others have: stages, or workers with other experts."""
        return "expert" if self.layout.expert > 1 else "pipe"


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Axis -> where the rank stands along it."""
    found: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, int(getattr(layout, axis)))
    return found


def start(device: torch.device | str | None = None) -> WorldPlace:
    """This process's rank, the world's size and its device; torch.distributed is started where a launcher asks for it.

    A process group that is there already is used as it is. With neither a group nor a launcher it is a world of one.

    Raises:
        ParallelError: the launcher's variables are incomplete, or the world can't be joined.
    """
    if not dist.is_available():
        return WorldPlace(rank=0, size=1, device=_device(device, 0))
    if not dist.is_initialized():
        _initialise(device)
    if not dist.is_initialized():
        return WorldPlace(rank=0, size=1, device=_device(device, 0))
    # A process group over Gloo or MPI carries tensors on the CPU alone, so a GPU is not chosen by itself.
    chosen = _device(device, dist.get_rank()) if _backend_has_cuda() else torch.device(device or "cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return WorldPlace(rank=dist.get_rank(), size=dist.get_world_size(), device=chosen)


def joined(place: WorldPlace) -> World:
    """The world before it has a layout: without groups, and with the store for messages. Called on all ranks."""
    store = _message_store(place) if place.size > 1 else None
    return World(**vars(place), layout=Layout(data=place.size), store=store)


def build(place: WorldPlace, layout: Layout) -> World:
    """The world with the groups of this layout. Called on all ranks.

    Raises:
        ParallelError: the script's own process group carries too little for this layout on GPUs.
    """
    if place.size == 1:
        return World(**vars(place), layout=layout)
    # Gloo sums tensors on GPUs; of what other layouts send there it ends the process without a word.
    if place.device.type == "cuda" and layout.data != layout.size and not _backend_has_cuda():
        raise ParallelError(
            f"{layout} on GPUs needs NCCL, and the script has made its process group with the backend {dist.get_backend()!r}. "
            "Make it with init_process_group('cpu:gloo,cuda:nccl'), or leave that to parallelize."
        )
    mesh, groups = _mesh_and_groups(place, layout)
    return World(**vars(place), layout=layout, mesh=mesh, store=_message_store(place), groups=groups)


#: What was made for the world's process group of now: shape -> mesh and groups. Making them takes many messages.
_made: dict[tuple[tuple[str, int], ...], Any] = {}
_made_for: Any = None


def _mesh_and_groups(place: WorldPlace, layout: Layout) -> tuple[Any, dict[frozenset[str], Any]]:
    global _made_for
    from torch.distributed.device_mesh import init_device_mesh

    # No axis of one rank: torch makes a group for each axis, however short, and each group over Gloo has three threads, of which
    # one wakes a hundred times a second.
    axes = tuple(axis for axis in AXES if getattr(layout, axis) > 1)
    shape = tuple((axis, int(getattr(layout, axis))) for axis in axes)
    # A script may end its process group and make another one; meshes and groups of the first one are dead then.
    if _made_for is not dist.group.WORLD:
        _made.clear()
        _made_for = dist.group.WORLD
    if shape not in _made:
        mesh = init_device_mesh(place.device.type, tuple(extent for _, extent in shape), mesh_dim_names=axes)
        active = set(axes)
        groups: dict[frozenset[str], Any] = {frozenset({axis}): mesh.get_group(axis) for axis in active}
        # Axes that have all ranks are the world's own group; each further group costs connections between all of its
        # ranks.
        groups.setdefault(frozenset(active), dist.group.WORLD)
        for together in (("data", "shard"), ("data", "shard", "context"), ("pipe", "shard", "expert", "tensor")):
            wanted = frozenset(together) & active
            # Every rank comes here with the same layout, so all make the same groups in the same order, which torch
            # requires.
            if wanted and wanted not in groups:
                groups[wanted] = group_over(layout, wanted, range(place.size))
        _made[shape] = mesh, groups
    found: tuple[Any, dict[frozenset[str], Any]] = _made[shape]
    return found


def group_over(layout: Layout, axes: frozenset[str], ranks: Iterable[int]) -> Any:
    """The group of those of the ranks that share all coordinates but those along these axes.

    Every rank of the world makes all of them, in the same order.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        place = coordinates(layout, rank)
        members.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
    make: Any = dist.new_subgroups_by_enumeration
    group, _ = make(list(members.values()))
    return group


def _initialise(device: torch.device | str | None) -> None:
    wants_cuda = torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda"
    backend = choose_backend(os.environ, wants_cuda)
    if backend is None:
        return
    if backend == "mpi":
        from paceline.torch_mpi import install

        install()
    if wants_cuda:
        torch.cuda.set_device(_device(device, int(os.environ["RANK"])))
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ParallelError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} could not join the others with the backend "
            f"{backend!r} (MASTER_ADDR:MASTER_PORT is {where}): {error}. Were all ranks started, with the same variables?"
        ) from error
    atexit.register(_leave if "nccl" in backend else _let_gloo_finish)


def choose_backend(environment: Mapping[str, str], has_cuda: bool) -> str | None:
    """The backend that the launcher's variables and the machine call for; None where nothing launched this process.

    Raises:
        ParallelError: a launcher has started several processes, but has not said which this one is.
    """
    mpi_size = environment.get("OMPI_COMM_WORLD_SIZE")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environment.get(name)]
    if has_cuda and len(given) == len(names):
        # NCCL carries nothing but tensors on GPUs; what the ranks tell each other besides goes over Gloo.
        return "cpu:gloo,cuda:nccl"
    if mpi_size is not None and environment.get("WORLD_SIZE", mpi_size) == mpi_size:
        if mpi_size == "1" and len(given) < len(names):
            return None
        if has_cuda:
            raise ParallelError(
                "mpirun started this process without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which NCCL needs to find "
                "the other ranks. Submit the job with Paceline, which sets them, or use torchrun."
            )
        if _has_mpi4py():
            return "mpi"
    if len(given) == len(names):
        return "gloo"
    # MASTER_ADDR or MASTER_PORT alone, or WORLD_SIZE=1, may have been exported in a shell for another program, and says
    # nothing. A rank, or a number of processes above 1, says that a launcher has started this process as one of several.
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PACELINE_WORLD_SIZE")
    started = next((environment[name] for name in sizes if environment.get(name)), None)
    if environment.get("RANK", "").isdigit() or (started is not None and started != "1"):
        missing = ", ".join(name for name in names if name not in given)
        raise ParallelError(
            f"a launcher started this process as one of {started or 'several'}, but {missing} "
            f"{'is' if missing.count(',') == 0 else 'are'} not set. torchrun and Paceline's jobs set them; with mpirun "
            "install mpi4py, or set them for each process; for one process alone unset RANK and WORLD_SIZE."
        )
    return None


def _has_mpi4py() -> bool:
    from importlib.util import find_spec

    return find_spec("mpi4py") is not None


def _backend_has_cuda() -> bool:
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())


def _device(device: torch.device | str | None, rank: int) -> torch.device:
    if device is not None and torch.device(device).type != "cuda":
        return torch.device(device)
    if not torch.cuda.is_available():
        if device is not None:
            raise ParallelError(f"device={str(device)!r}, but torch sees no GPU here. Leave it out, or use 'cpu'.")
        return torch.device("cpu")
    if device is not None and torch.device(device).index is not None:
        return torch.device(device)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    # Some launchers show each process its own GPU alone, which has the number 0 then, whatever LOCAL_RANK is.
    return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))


_stores: list[tuple[Any, Any, Any]] = []


def _message_store(place: WorldPlace) -> Any:
    """A connection of its own to a store that all ranks reach: one that waits must not keep others waiting.

    One for each process group that was the world's, however many models are spread over it.
    """
    # The type stubs of torch.distributed don't export its stores.
    stores: Any = dist
    for group, found, _ in _stores:
        if group is dist.group.WORLD:
            return found
    # A world over MPI has no store.
    store = torch_private.default_store() if str(dist.get_backend()) != "mpi" else None
    if store is None:
        there: Any = None
        if place.rank == 0:
            # A TCPStore serves whoever connects. So it listens at MASTER_ADDR alone, on the run's own network, or without
            # that at loopback.
            address = os.environ.get("MASTER_ADDR", "")
            fd = store_listener(address, 0)
            given = {} if fd is None else {"master_listen_fd": fd}
            at = "127.0.0.1" if fd is None else address
            store = stores.TCPStore(at, 0, is_master=True, wait_for_workers=False, **given)
            there = (socket.gethostname() if fd is None else address, store.port)
        host, port = from_first(there)
        if place.rank != 0:
            name = "127.0.0.1" if host == socket.gethostname() else host
            store = stores.TCPStore(name, port, is_master=False, wait_for_workers=False)
    assert store is not None
    number = stores.PrefixStore("paceline/parallel", store).add(f"count/{place.rank}", 1)
    own = store
    try:
        own = store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        pass
    # The first connection is kept as well: with MPI it is the server itself, which ends when its object is collected.
    _stores[:] = [(dist.group.WORLD, stores.PrefixStore(f"paceline/parallel/{number}", own), store)]
    return _stores[0][1]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _let_gloo_finish() -> None:
    """Give Gloo's threads a moment: one that still holds the last collective's tensor aborts a process that closes.

    "terminate called without an active exception", in 2 of 60 programs on torch 2.13
    (https://github.com/pytorch/pytorch/pull/179291). Paceline's own workers wait as well.
    """
    time.sleep(0.05)


def decide(world: WorldPlace, find: Callable[[], Any], kinds: Sequence[type] = (), what: str = "") -> Any:
    """The result of `find` on rank 0. Called on all ranks, of which the others wait.

    kinds: the dataclasses that may be in it (see `exchange`). what: what the others are told to have failed where `find` raises
        anything else than a ParallelError, which rank 0 raises itself; "": they are left to hear of it as of any failure.

    Raises:
        ParallelError: on every rank, where `find` raised it.
    """
    found, failed, told = None, None, None
    if world.rank == 0:
        try:
            found = find()
        except Exception as error:
            is_known = isinstance(error, ParallelError)
            if not is_known and not what:
                raise
            # Raised only when the others have been told, for they wait for the answer.
            failed = error
            told = str(error) if is_known else f"{what} failed on rank 0: {type(error).__name__}: {error}"
    answer, reason = from_first((found, told), kinds)
    if failed is not None:
        raise failed
    if reason is not None:
        raise ParallelError(reason)
    return answer
