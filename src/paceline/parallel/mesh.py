"""This process's rank, device and process groups.

    axes, outermost first        pipe  data  shard  context  expert  tensor

Ranks of one tensor group are neighbours, because they communicate most.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from paceline import torch_private
from paceline.collectives import store_listener
from paceline.parallel import regroup
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import from_first
from paceline.parallel.strategy import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.torch_private import Store

_T = TypeVar("_T")

AXES = ("pipe", "data", "shard", "context", "expert", "tensor")


@dataclass(frozen=True, kw_only=True, eq=False)
class WorldPlace:
    """This process's rank, the world size and its device."""

    rank: int
    size: int
    device: torch.device


@dataclass(frozen=True, kw_only=True, eq=False)
class World(WorldPlace):
    """This process's rank and device, with the process groups of its layout.

    Attributes:
        mesh: A mesh of the axes in `AXES` that have more than one rank. None in a world of one process.
        store: The key-value store for the ranks' messages, or None in a world of one process.
        groups: Axes -> the group of ranks along these axes.
    """

    layout: Layout
    mesh: DeviceMesh | None = None
    store: Store | None = None
    groups: dict[frozenset[str], dist.ProcessGroup | None] = field(default_factory=dict)

    def renew(self) -> None:
        """Use torch's new default process group, after a lost rank was replaced."""
        mesh, groups = _mesh_and_groups(self, self.layout)
        for name, value in (("mesh", mesh), ("groups", groups), ("store", _message_store(self))):
            object.__setattr__(self, name, value)

    def axes(self, *names: str) -> DeviceMesh:
        """Return the submesh of these axes, which all have several ranks."""
        assert self.mesh is not None
        return self.mesh[names]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of the ranks along these axes; None for one rank."""
        active = frozenset(axis for axis in axes if self.extent(axis) > 1)
        return self.groups[active] if active else None

    def extent(self, axis: str) -> int:
        """Return the number of ranks along an axis such as "data"."""
        return int(getattr(self.layout, axis))

    def coordinate(self, axis: str) -> int:
        """Return this rank's index along the axis."""
        return coordinates(self.layout, self.rank)[axis]

    @property
    def replicas(self) -> int:
        """The number of replicas; each batch is split among them."""
        return self.layout.replicas

    @property
    def replica(self) -> int:
        """The index of this rank's replica."""
        return self.coordinate("data") * self.layout.shard + self.coordinate("shard")

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that compute different rows with the same model part; None if alone."""
        return self.group("data", "shard")

    @property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """The ranks over which gradients are summed; None if this rank is alone."""
        return self.group("data", "shard", "context")

    @property
    def model_group(self) -> dist.ProcessGroup | None:
        """The ranks that together hold one copy of all parameters; None if alone."""
        return self.group("pipe", "shard", "expert", "tensor")

    @property
    def holder_axis(self) -> str:
        """The axis along which ranks hold different parameters: "expert" or "pipe"."""
        return "expert" if self.layout.expert > 1 else "pipe"


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Return the rank's index along each axis of the layout."""
    indices: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, indices[axis] = divmod(rank, int(getattr(layout, axis)))
    return indices


def start(device: torch.device | str | None = None) -> WorldPlace:
    """Join the process group. Return this process's rank, world size and device.

    The script's own process group is used if it exists. Without such a group and without a launcher, the world has one process.

    Raises:
        ParallelError: The launcher's variables are incomplete, or joining the world fails.
    """
    if dist.is_available() and not dist.is_initialized():
        _initialise(device)
    if not dist.is_available() or not dist.is_initialized():
        return WorldPlace(rank=0, size=1, device=_device(device, 0))
    # A group over Gloo or MPI supports only CPU tensors, so do not choose a GPU by default.
    chosen = _device(device, dist.get_rank()) if _backend_has_cuda() else torch.device(device or "cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return WorldPlace(rank=dist.get_rank(), size=dist.get_world_size(), device=chosen)


def joined(place: WorldPlace) -> World:
    """Return this process's `World` before a layout is chosen. Every rank must call this."""
    store = _message_store(place) if place.size > 1 else None
    return World(**vars(place), layout=Layout(data=place.size), store=store)


def build(place: WorldPlace, layout: Layout) -> World:
    """Make a layout's process groups, and return the `World` with them.

    Every rank must call this.

    Raises:
        ParallelError: The script's own process group does not support this layout on GPUs.
    """
    if place.size == 1:
        return World(**vars(place), layout=layout)
    # On tensors of a GPU, Gloo supports sums (data parallelism). Other operations kill the process without a message.
    if place.device.type == "cuda" and layout.data != layout.size and not _backend_has_cuda():
        raise ParallelError(
            f"{layout} on GPUs needs NCCL, and the script has made its process group with the backend {dist.get_backend()!r}. "
            "Make it with init_process_group('cpu:gloo,cuda:nccl'), or leave that to parallelize."
        )
    mesh, groups = _mesh_and_groups(place, layout)
    return World(**vars(place), layout=layout, mesh=mesh, store=_message_store(place), groups=groups)


#: Shape -> mesh and groups. Cached for the current process group, because creating mesh and groups takes many messages.
_made: dict[tuple[tuple[str, int], ...], tuple[DeviceMesh, dict[frozenset[str], dist.ProcessGroup | None]]] = {}
_made_for: object = None


def _mesh_and_groups(
    place: WorldPlace, layout: Layout
) -> tuple[DeviceMesh, dict[frozenset[str], dist.ProcessGroup | None]]:
    global _made_for
    from torch.distributed.device_mesh import init_device_mesh

    # Skip axes of one rank: torch makes a group for each axis, and each Gloo group has three threads, one of them always busy.
    axes = tuple(axis for axis in AXES if getattr(layout, axis) > 1)
    shape = tuple((axis, int(getattr(layout, axis))) for axis in axes)
    # Drop the cached meshes and groups if the script has made a new process group, which makes them invalid.
    if _made_for is not dist.group.WORLD:
        _made.clear()
        _made_for = dist.group.WORLD
    if shape not in _made:
        mesh = init_device_mesh(place.device.type, tuple(extent for _, extent in shape), mesh_dim_names=axes)
        active = set(axes)
        groups: dict[frozenset[str], dist.ProcessGroup | None]
        groups = {frozenset({axis}): mesh.get_group(axis) for axis in active}
        # Axes that together span all ranks use the world's group, because each further group costs connections between its ranks.
        groups.setdefault(frozenset(active), dist.group.WORLD)
        for together in (("data", "shard"), ("data", "shard", "context"), ("pipe", "shard", "expert", "tensor")):
            spanned = frozenset(together) & active
            # Every rank has the same layout, so all ranks make the same groups in the same order, as torch requires.
            if spanned and spanned not in groups:
                groups[spanned] = group_over(layout, spanned, range(place.size))
        _made[shape] = mesh, groups
    return _made[shape]


def group_over(layout: Layout, axes: frozenset[str], ranks: Iterable[int]) -> dist.ProcessGroup | None:
    """Group the ranks that differ only along `axes`. Return this rank's group.

    Every rank of the world must call this, in the same order. The result is None if this rank is not in `ranks`.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        place = coordinates(layout, rank)
        members.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
    make: Callable[..., tuple[dist.ProcessGroup | None, object]] = dist.new_subgroups_by_enumeration
    return make(list(members.values()))[0]


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
        if backend == "gloo" and regroup.first_generation() is not None:
            regroup.start()
        else:
            dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ParallelError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} could not join the others with the backend "
            f"{backend!r} (MASTER_ADDR:MASTER_PORT is {where}): {error}. Were all ranks started, with the same variables?"
        ) from error
    atexit.register(_leave if "nccl" in backend else _let_gloo_finish)


def choose_backend(environment: Mapping[str, str], has_cuda: bool) -> str | None:
    """Return torch's backend for the launcher's processes, or None without a launcher.

    Raises:
        ParallelError: A launcher started several processes, but did not tell this process its rank.
    """
    mpi_size = environment.get("OMPI_COMM_WORLD_SIZE")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environment.get(name)]
    if has_cuda and not missing:
        # NCCL supports only GPU tensors, so messages of CPU tensors use Gloo.
        return "cpu:gloo,cuda:nccl"
    if mpi_size is not None and environment.get("WORLD_SIZE", mpi_size) == mpi_size:
        if mpi_size == "1" and missing:
            return None
        if has_cuda:
            raise ParallelError(
                "mpirun started this process without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which NCCL needs to find "
                "the other ranks. Submit the job with Paceline, which sets them, or use torchrun."
            )
        if _has_mpi4py():
            return "mpi"
    if not missing:
        return "gloo"
    # A shell may export MASTER_ADDR, MASTER_PORT or WORLD_SIZE=1 for another program. But RANK, or a number of processes above 1,
    # shows that a launcher has started this process as one of several.
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PACELINE_WORLD_SIZE")
    started = next((environment[name] for name in sizes if environment.get(name)), None)
    if environment.get("RANK", "").isdecimal() or (started is not None and started != "1"):
        raise ParallelError(
            f"a launcher started this process as one of {started or 'several'}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. torchrun and Paceline's jobs set them; with mpirun "
            "install mpi4py, or set them for each process; for one process alone unset RANK and WORLD_SIZE."
        )
    return None


def _has_mpi4py() -> bool:
    from importlib.util import find_spec

    return find_spec("mpi4py") is not None


def _backend_has_cuda() -> bool:
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())


def _device(device: torch.device | str | None, rank: int) -> torch.device:
    chosen = torch.device(device or "cuda")
    if device is None and not torch.cuda.is_available():
        return torch.device("cpu")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise ParallelError(f"device={str(device)!r}, but torch sees no GPU here. Leave it out, or use 'cpu'.")
    if device is not None and chosen.index is not None:
        return chosen
    # Take the remainder, because some launchers show each process only its own GPU, which then has the number 0.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % max(torch.cuda.device_count(), 1))


#: Empty before the first use. Then it has one entry: (world's group, store for Paceline's messages, process's first store).
_stores: list[tuple[object, Store, Store]] = []


def _message_store(place: WorldPlace) -> Store:
    """Return a separate connection to the world's key-value store."""
    for group, known, _ in _stores:
        if group is dist.group.WORLD:
            return known
    store: Any = _store_of_rank_0(place) if str(dist.get_backend()) == "mpi" else torch_private.default_store()
    number = _torchs.PrefixStore("paceline/parallel", store).add(f"count/{place.rank}", 1)
    own = store
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        own = store.clone()
    # Keep the process's first store, too: with MPI this object is the store's server, which ends when Python deletes the object.
    _stores[:] = [(dist.group.WORLD, _torchs.PrefixStore(f"paceline/parallel/{number}", own), store)]
    return _stores[0][1]


#: torch.distributed's type stubs do not export its stores.
_torchs: Any = dist


def _store_of_rank_0(place: WorldPlace) -> Store:
    """Return a key-value store that rank 0 serves, for a world over MPI."""
    if place.rank > 0:
        host, port = from_first(("", 0))
        name = "127.0.0.1" if host == socket.gethostname() else host
        client: Store = _torchs.TCPStore(name, port, is_master=False, wait_for_workers=False)
        return client
    # A TCPStore accepts any client, so let it listen only at MASTER_ADDR, on the run's network. If that fails, use loopback.
    host = at = os.environ.get("MASTER_ADDR", "")
    options = {"master_listen_fd": store_listener(host, 0)}
    if options["master_listen_fd"] is None:
        host, at, options = socket.gethostname(), "127.0.0.1", {}
    server = _torchs.TCPStore(at, 0, is_master=True, wait_for_workers=False, **options)
    from_first((host, server.port))
    store: Store = server
    return store


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _let_gloo_finish() -> None:
    """Wait for Gloo's threads: one that holds a tensor at exit aborts the process."""
    # Without this sleep torch 2.13 may abort the process: https://github.com/pytorch/pytorch/pull/179291
    time.sleep(0.05)


def decide(world: WorldPlace, find: Callable[[], _T], kinds: Sequence[type] = (), what: str = "") -> _T:
    """Call `find` on rank 0 and return its result on every rank.

    Every rank must call this. Measurements and rounding may differ between machines, so one rank decides.

    Args:
        world: This rank and the world size.
        find: The function that rank 0 calls.
        kinds: The classes of the dataclasses that the result may contain.
        what: A description of the call for error messages. With "", only a ParallelError is sent to the other ranks.

    Raises:
        ParallelError: On every rank, if `find` failed.
    """
    own: tuple[Any, str] = (None, "")
    try:
        if world.rank == 0:
            own = find(), ""
    except Exception as error:
        if not what and not isinstance(error, ParallelError):
            raise
        # The other ranks wait for rank 0's message, so send them the error as the message.
        is_known = isinstance(error, ParallelError)
        from_first((None, str(error) if is_known else f"{what} failed on rank 0: {type(error).__name__}: {error}"))
        raise
    answer, reason = from_first(own, kinds)
    if reason:
        raise ParallelError(reason)
    decided: _T = answer
    return decided
