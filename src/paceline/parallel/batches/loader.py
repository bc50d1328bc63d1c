"""The batches of an epoch, of which each rank loads only its own rows.

    global order     from the loader's sampler, seed and epoch: the same with any number of workers
    global batch     the next `batch_size` samples of that order, for all workers together
    own rows         the rows of this rank's replica; this rank reads and collates no other rows

So an epoch and a number of consumed samples describe a position, for any number of workers. Only torch's DataLoader
over a map-style dataset is loaded like this. Any other loader must yield whole global batches, equal on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.parallel.batches.batch import own_rows
from paceline.parallel.batches.microbatches import GlobalBatch, OwnBatch, agree_on_batch, split
from paceline.parallel.batches.rows import Rows
from paceline.parallel.batches.same_data import agree_on_data
from paceline.parallel.deterministic_rng import OrderState, Streams, derive, generators
from paceline.parallel.errors import ParallelError, by_value, named_ranks
from paceline.parallel.exchange import NotPlainError, from_first, gather
from paceline.parallel.mesh import World
from paceline.parallel.task import Task
from paceline.system import step_clock


def feed(loader: object, task: Task, world: World) -> Feed:
    """Return the source of this rank's batches from the user's loader.

    Raises:
        ParallelError: The loader has a DistributedSampler, or is not iterable.
    """
    # A DataLoader subclass with its own `__iter__` may ignore the sampler, so Paceline can only use the batches it yields.
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
        if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            raise ParallelError(
                "the loader has a DistributedSampler, which gives each rank samples of its own; parallelize cuts each batch "
                "itself. Give the loader of a plain script: shuffle=True, and batch_size for all workers together."
            )
        if not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
            return _MapFeed(loader, task, world)
    if not isinstance(loader, Iterable):
        raise ParallelError(f"loader={loader!r} can't be iterated; give a DataLoader or any iterable of batches.")
    return _WholeFeed(loader, task, world)


class Feed:
    """A source of one rank's batches.

    Attributes:
        is_local: Whether a rank can find its batches from any point of an epoch without messages to other ranks.
        order: The order of the samples for a checkpoint, or None if only the user's loader knows it.
    """

    is_local = False
    order: OrderState | None = None
    _streams: Streams

    def adopt(self, seed: int, order: OrderState | None) -> None:
        """Continue with a checkpoint's seeds. `order`: None for a checkpoint without it."""
        self._streams.seed = seed
        if self.order and order:
            self.order["seed"] = order["seed"]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[OwnBatch | GlobalBatch]:
        """Yield the epoch's batches after its first `start` samples. Every rank must call this."""
        raise NotImplementedError

    def sample(self) -> object:
        """Return the first batch of epoch 0 without consuming it.

        Return None if the loader can be read only once, or is empty.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class _MapFeed(Feed):
    """A source of batches that reads only this rank's rows of a map-style dataset."""

    def __init__(self, loader: DataLoader[object], task: Task, world: World) -> None:
        self._given = loader
        self._world = world
        self._order = Order(loader, task.seed, world)
        self.is_local, self.order = self._order.is_local, self._order.state
        agree_on_data(loader, world)
        self._sampler = _OwnRows(self._order, task, world)
        self._streams = Streams(
            seed=task.seed, replica=world.replica, stage=0, device=torch.device("cpu"), active=world.size > 1
        )
        # With a single rank keep the script's generator, so that the loader draws the same numbers as in a plain loop.
        self._generator = torch.Generator() if world.size > 1 else loader.generator
        self._loader = _rebuilt(loader, self._sampler, self._generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[OwnBatch | GlobalBatch]:
        for thing in (self._given.sampler, self._given.batch_sampler, self._given.dataset):
            _set_epoch(thing, epoch)
        self._sampler.begin(epoch, start)
        if self._world.size > 1:
            assert self._generator is not None
            # The DataLoader seeds its worker processes by this generator. Replicas need different seeds.
            self._generator.manual_seed(derive("workers", self._streams.seed, epoch, self._world.replica))
        known = self._sampler.known
        # Make the DataLoader's generator on the CPU, which it requires, even if the default device is a GPU.
        on_cpu = torch.device("cpu") if self._world.size > 1 else contextlib.nullcontext()
        # A DataLoader draws a number when it begins. A resumed epoch began before the checkpoint, which has the generator.
        with torch.random.fork_rng([], start > 0 and self._world.size == 1), self._streams.use("data", epoch), on_cpu:
            batches = iter(self._loader)
        for number in itertools.count():
            # Seed this process, which augments data if there are no workers: a replica's stages must draw the same.
            with self._streams.use(f"data {epoch}", number):
                try:
                    data = next(batches)
                except StopIteration:
                    return
            yield replace(known.popleft(), data=data)

    def sample(self) -> object:
        with generators(0, torch.device("cpu")):
            indices = next(iter(self._order.batches(0, 0)), None)
            if not indices:
                return None
            rows = [self._given.dataset[index] for index in indices]
        collate: Callable[[list[object]], object] = self._given.collate_fn
        return collate(rows)

    def __len__(self) -> int:
        return len(self._given)


class _WholeFeed(Feed):
    """A source of whole global batches, equal on every rank."""

    def __init__(self, loader: Iterable[object], task: Task, world: World) -> None:
        self._loader = loader
        self._task = task
        self._world = world
        self._streams = Streams(seed=task.seed, replica=0, stage=0, device=torch.device("cpu"), active=world.size > 1)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[OwnBatch | GlobalBatch]:
        for thing in (self._loader, getattr(self._loader, "dataset", None), getattr(self._loader, "sampler", None)):
            _set_epoch(thing, epoch)
        consumed = number = 0
        is_one = self._world.size == 1
        # A resumed single process keeps its generator while it skips batches that it drew before the checkpoint.
        with torch.random.fork_rng([], is_one and consumed < start), self._streams.use("data", epoch):
            batches = iter(self._loader)
        while True:
            # All ranks draw from the same stream, because they must see the same batches.
            with torch.random.fork_rng([], is_one and consumed < start), self._streams.use(f"data {epoch}", number):
                # Count the time of waiting for data here, because only a DataLoader has Paceline's hook that counts it.
                data = step_clock.timed(next, step_clock.DATA)(batches, None)
            agree_on_batch(data, self._world)
            if data is None:
                break
            number += 1
            consumed += Rows(split(data, self._task)).count
            # An iterable cannot start in the middle, so resume within an epoch by reading and skipping the earlier batches.
            if consumed > start:
                yield GlobalBatch(data=data, epoch=epoch, consumed=consumed)
        if number == 0 and isinstance(self._loader, Iterator):
            raise ParallelError(
                f"the loader gave no batch for epoch {epoch}: it is an iterator ({type(self._loader).__name__}), "
                "which can be gone through once. Give a list, or an object whose __iter__ restarts."
            )

    def sample(self) -> object:
        if isinstance(self._loader, Iterator):
            return None
        with generators(0, torch.device("cpu")):
            return next(iter(self._loader), None)

    def __len__(self) -> int:
        loader: Any = self._loader
        return len(loader)


class _OwnRows:
    """A batch sampler that yields this rank's rows of each global batch."""

    def __init__(self, order: Order, task: Task, world: World) -> None:
        self._order = order
        self._task = task
        self._world = world
        self._at = (0, 0)
        #: Batches whose indices the DataLoader has read, and whose data it has not delivered yet.
        self.known: deque[OwnBatch] = deque()

    def begin(self, epoch: int, start: int) -> None:
        """Set the epoch, and the sample from which the next iteration starts."""
        self._at = (epoch, start)
        # Make a new queue, because an abandoned iteration leaves batches in the old queue.
        self.known = deque()

    def __iter__(self) -> Iterator[list[object]]:
        epoch, consumed = self._at
        known = self.known
        for indices in self._order.batches(epoch, consumed):
            consumed += len(indices)
            ranges = own_rows(len(indices), self._task.microbatches, self._world.replicas, self._world.replica)
            own = [indices[row] for span in ranges for row in span]
            known.append(OwnBatch(data=None, rows=len(own), global_rows=len(indices), epoch=epoch, consumed=consumed))
            # A replica without rows of this batch loads one row as padding, so that all ranks do equally many steps.
            yield own or indices[:1]


def _rebuilt(
    loader: DataLoader[object], sampler: Iterable[list[object]], generator: torch.Generator | None
) -> DataLoader[object]:
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    # Pass these options only with worker processes, because DataLoader refuses them otherwise.
    if loader.num_workers > 0:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    # Drop `in_order=False`: with reordered batches, ranks would take rows of different batches in one step.
    return DataLoader(loader.dataset, batch_sampler=sampler, generator=generator, **options)


def _set_epoch(thing: object, epoch: int) -> None:
    method: Callable[[int], object] = getattr(thing, "set_epoch", lambda epoch: None)
    method(epoch)


class Order:
    """The dataset indices of each global batch, the same on every rank."""

    def __init__(self, loader: DataLoader[object], seed: int, world: World) -> None:
        self._loader = loader
        self._world = world
        # If the script has its own batch sampler, `loader.sampler` is an unused default, so don't use it.
        sampler = getattr(loader.batch_sampler, "sampler", None)
        generator = getattr(sampler, "generator", None) or loader.generator
        # If the script has seeded a generator for the loader, derive the order from this generator's seed on rank 0.
        seed = derive("generator", seed, generator.initial_seed()) if generator is not None else seed
        size = getattr(loader.batch_sampler, "batch_size", None)
        #: Whether each rank computes the order of the samples without messages to other ranks.
        self.is_local = type(loader.batch_sampler) is BatchSampler and (
            type(sampler) is SequentialSampler or _is_permutation(sampler)
        )
        length = _length(loader.dataset)
        seed = _agreed(seed, f"{length} samples in batches of {size or 'any size'}", world)
        #: The order that a checkpoint stores.
        self.state = OrderState(seed=seed, length=length, sampler=type(sampler or loader.batch_sampler).__name__)

    def batches(self, epoch: int, start: int) -> Iterator[list[object]]:
        """Yield each batch's dataset indices, after the first `start` samples."""
        batch_sampler = self._loader.batch_sampler
        if type(batch_sampler) is not BatchSampler:
            done = 0
            for batch in self._drawn(batch_sampler, epoch):
                done += len(batch)
                if done > start:
                    yield list(batch)
            return
        size = batch_sampler.batch_size
        samples = self._drawn(batch_sampler.sampler, epoch)
        for first in range(start, len(samples), size):
            batch = samples[first : first + size]
            if len(batch) == size or not batch_sampler.drop_last:
                yield batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)

    def _drawn(self, sampler: Any, epoch: int) -> Any:
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        seed = derive("order", self.state["seed"], epoch)
        if _is_permutation(sampler):
            # Return a tensor: a list of as many Python numbers would take several times the memory.
            return torch.randperm(len(sampler), generator=torch.Generator().manual_seed(seed), device="cpu")
        owners = sampler, getattr(sampler, "sampler", None)
        drawn: list[object] = []
        if self._world.rank == 0:
            with generators(seed, torch.device("cpu")):
                for own in filter(None, (getattr(owner, "generator", None) for owner in owners)):
                    own.manual_seed(seed)
                drawn = list(sampler)
        try:
            # Rank 0 draws the order for all ranks: a sampler may use random numbers that differ between ranks.
            return from_first(drawn)
        except NotPlainError as error:
            raise ParallelError(
                f"the sampler gives a {error.kind}, and rank 0 tells the others which samples are drawn. Let it give "
                "numbers or texts."
            ) from error


def _is_permutation(sampler: Any) -> bool:
    return type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)


def _agreed(seed: int, about: str, world: World) -> int:
    """Return rank 0's seed. Raise if the loaders, described by `about`, differ."""
    everyone = gather((seed, about))
    loaders = by_value(text for _, text in everyone)
    if len(loaders) > 1:
        shown = "; ".join(f"{text} on {named_ranks(ranks)}" for text, ranks in loaders.items())
        raise ParallelError(
            f"the ranks don't have the same loader: {shown}. Give each rank the whole dataset, and the batch_size of all "
            "workers together; parallelize cuts the batches."
        )
    return everyone[0][0]


def _length(dataset: Any) -> int | str:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return "unknown"
