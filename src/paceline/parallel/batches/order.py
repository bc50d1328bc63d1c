"""The samples in each global batch of an epoch: the same on every rank, with any number of them. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from paceline.parallel.errors import ParallelError, by_value, named_ranks
from paceline.parallel.exchange import NotPlainError, from_first, gather
from paceline.parallel.mesh import World
from paceline.parallel.randomness import derive, generators


class Order:
    """The samples of each global batch, the same on every rank."""

    def __init__(self, loader: DataLoader[Any], seed: int, world: World) -> None:
        self._loader = loader
        self._world = world
        # `loader.sampler` is a default one that nobody uses where the user has given a batch sampler.
        sampler = getattr(loader.batch_sampler, "sampler", None)
        generator = getattr(sampler, "generator", None) or loader.generator
        # A generator that the user has seeded chooses the order; that of rank 0 counts.
        self._seed = derive("generator", seed, generator.initial_seed()) if generator is not None else seed
        size = getattr(loader.batch_sampler, "batch_size", None)
        self._seed = _agreed(self._seed, f"{_length(loader.dataset)} samples in batches of {size or 'any size'}", world)

    def batches(self, epoch: int, start: int) -> Iterator[list[Any]]:
        """Each batch's samples, from the `start`-th of the epoch on."""
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
        seed = derive("order", self._seed, epoch)
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            # A tensor: a list of as many numbers would take several times the memory.
            return torch.randperm(len(sampler), generator=torch.Generator().manual_seed(seed), device="cpu")
        own = getattr(sampler, "generator", None) or getattr(getattr(sampler, "sampler", None), "generator", None)
        drawn = None
        if self._world.rank == 0:
            with generators(seed, torch.device("cpu")):
                if own is not None:
                    own.manual_seed(seed)
                drawn = list(sampler)
        try:
            # Rank 0 draws for all: a sampler may use random numbers that are not torch's, and differ from rank to rank.
            return from_first(drawn)
        except NotPlainError as error:
            raise ParallelError(
                f"the sampler gives a {error.kind}, and rank 0 tells the others which samples are drawn. Let it give "
                "numbers or texts."
            ) from error


def _agreed(seed: int, about: str, world: World) -> int:
    """Rank 0's seed.

    Raises:
        ParallelError: on every rank, where the loaders differ: each would take other rows for those of a batch.
    """
    if world.size == 1:
        return seed
    everyone = gather((seed, about))
    loaders = by_value(text for _, text in everyone)
    if len(loaders) > 1:
        shown = "; ".join(f"{text} on {named_ranks(ranks)}" for text, ranks in loaders.items())
        raise ParallelError(
            f"the ranks don't have the same loader: {shown}. Give each rank the whole dataset, and the batch_size of all "
            "workers together; parallelize cuts the batches."
        )
    return int(everyone[0][0])


def _length(dataset: Any) -> Any:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return "unknown"
