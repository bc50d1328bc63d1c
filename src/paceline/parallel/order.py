"""Which samples are in each global batch of an epoch: the same on every rank, with any number of them. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from paceline.parallel.mesh import World
from paceline.parallel.randomness import derive, generators


class Order:
    """The samples of each global batch, the same on every rank."""

    def __init__(self, loader: DataLoader[Any], seed: int, world: World) -> None:
        self._loader = loader
        self._world = world
        generator = getattr(loader.sampler, "generator", None) or loader.generator
        # A generator that the user has seeded says which order he wants; rank 0's counts.
        self._seed = derive("generator", seed, generator.initial_seed()) if generator is not None else seed
        self._seed = _from_first(self._seed, world)

    def batches(self, epoch: int, start: int) -> Iterator[list[Any]]:
        """Each batch's samples, from the `start`-th of the epoch on."""
        if type(self._loader.batch_sampler) is not BatchSampler:
            done = 0
            for batch in self._drawn(self._loader.batch_sampler, epoch):
                done += len(batch)
                if done > start:
                    yield list(batch)
            return
        size = self._loader.batch_size
        assert size is not None
        samples = self._drawn(self._loader.sampler, epoch)
        for first in range(start, len(samples), size):
            batch = samples[first : first + size]
            if len(batch) == size or not self._loader.drop_last:
                yield batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)

    def _drawn(self, sampler: Any, epoch: int) -> Any:
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        seed = derive("order", self._seed, epoch)
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            # As a tensor: a list of so many numbers would take several times the memory.
            return torch.randperm(len(sampler), generator=torch.Generator().manual_seed(seed))
        own = getattr(sampler, "generator", None) or getattr(getattr(sampler, "sampler", None), "generator", None)
        drawn = None
        if self._world.rank == 0:
            with generators(seed, torch.device("cpu")):
                if own is not None:
                    own.manual_seed(seed)
                drawn = list(sampler)
        # Not drawn on each rank: it may use random numbers that are not torch's.
        return _from_first(drawn, self._world)


def _from_first(value: Any, world: World) -> Any:
    """Rank 0's value."""
    if world.size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu") if world.device.type == "cpu" else None)
    return values[0]
