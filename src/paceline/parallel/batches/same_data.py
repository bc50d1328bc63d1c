"""A check that all ranks have the same dataset, from which each rank reads only its own rows.

Datasets of equal length differ if they are drawn without a seed, or split at random or by rank. Training would then
repeat some samples and skip others. Each rank reads the first and last sample twice, with one seed:

    a rank's two readings differ                  the dataset uses its own random numbers, so there is no result
    each rank's readings agree, but ranks differ  the ranks have different datasets, and the check fails

So augmentation may be random. Small differences are allowed, because machines may decode an image slightly differently.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from paceline.parallel.deterministic_rng import generators, generators_kept, numpys_random
from paceline.parallel.errors import ParallelError, named_ranks
from paceline.parallel.exchange import gather
from paceline.parallel.mesh import World
from paceline.parallel.pytree import in_reals, sampled, tensors_in

#: How many numbers of each tensor to compare between the ranks, taken at even distances from the whole tensor.
SAMPLED = 64
#: Two ranks' numbers count as equal up to this fraction of the largest number. Integers (except uint8) must be equal.
TOLERANCE = 0.02

#: For each tensor of a sample: its shape, whether its numbers must be equal, and some of its numbers.
Summary = list[tuple[list[int], bool, list[float]]]

_T = TypeVar("_T")
_agreed: weakref.WeakSet[object] = weakref.WeakSet()


def agree_on_data(loader: DataLoader[object], world: World) -> None:
    """Raise unless all ranks have the same dataset.

    Every rank must call this. The check compares the first and the last sample.

    Raises:
        ParallelError: On every rank, with the sample that differs, and the ranks.
    """
    if world.size == 1 or _is_known(loader.dataset):
        return
    try:
        own = read_twice(loader)
    except Exception:
        # Skip the check if the dataset can't be read. Training reads the dataset too, and reports the error to all ranks.
        own = {}
    everyone = gather(own)
    everyone[world.rank] = own  # for a rank that replaces a lost rank, `gather` has returned the lost rank's samples
    for index in own:
        summaries = [summary for of_rank in everyone if (summary := of_rank.get(index)) is not None]
        others = [rank for rank, summary in enumerate(summaries) if not are_alike(summaries[0], summary)]
        if len(summaries) == world.size and others:
            raise ParallelError(
                f"the ranks don't have the same dataset: sample {index} is {_shown(summaries[0])} on rank 0, "
                f"{_shown(summaries[others[0]])} on {named_ranks(others)}. Each rank reads its own rows of one dataset: set the "
                "same seed on all ranks before making it (torch.manual_seed(0), or random_split(..., "
                "generator=torch.Generator().manual_seed(0))), and don't split it by rank."
            )


def read_twice(loader: DataLoader[object]) -> dict[int, Summary | None]:
    """Return index -> summary of the first and the last sample.

    A summary is None if two readings of the sample differ. A worker process of the loader, if it has any, reads the samples.
    """
    dataset: Any = loader.dataset
    indices = sorted({0, len(dataset) - 1})
    probe = _Probe(dataset, loader.collate_fn)
    if loader.num_workers == 0:
        return {index: probe[index] for index in indices}
    # Read in a worker process: a dataset may keep a file open, whose position workers that are forked later would share.
    there: DataLoader[Summary | None] = DataLoader(
        probe,
        batch_size=None,
        sampler=indices,
        collate_fn=_as_it_is,
        num_workers=1,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
        generator=torch.Generator().manual_seed(0),
    )
    # The seeds of the loader's workers come from the CPU's generator, also if the script's default device is a GPU.
    with torch.device("cpu"):
        return dict(zip(indices, there, strict=True))


def _as_it_is(value: _T) -> _T:
    return value


class _Probe(torch.utils.data.Dataset[Summary | None]):
    """A dataset of summaries of another dataset's samples, None if two readings differ."""

    def __init__(self, dataset: Any, collate: Callable[[list[object]], object]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, index: int) -> Summary | None:
        first, second = self._read(index), self._read(index)
        return first if first == second else None

    def _read(self, index: int) -> Summary:
        many = getattr(self._dataset, "__getitems__", None)
        with _seeded():
            return summarise(self._collate(many([index]) if callable(many) else [self._dataset[index]]))


def summarise(sample: object) -> Summary:
    """Return the shape and sampled values of a sample's tensors, to compare readings."""
    summary: Summary = []
    for tensor in tensors_in(sample):
        flat = in_reals(sampled(tensor, SAMPLED)[:SAMPLED])
        is_exact = not flat.is_floating_point() and flat.dtype != torch.uint8
        summary.append((list(tensor.shape), is_exact, flat.double().nan_to_num().tolist()))
    return summary


def are_alike(first: Summary, second: Summary) -> bool:
    """Return whether two summaries agree up to small differences between machines."""
    if [shape for shape, _, _ in first] != [shape for shape, _, _ in second]:
        return False
    for (_, exact, left), (_, _, right) in zip(first, second, strict=True):
        scale = 0.0 if exact else TOLERANCE * max(map(abs, [*left, *right]), default=0.0)
        if any(abs(a - b) > scale for a, b in zip(left, right, strict=True)):
            return False
    return True


@contextmanager
def _seeded() -> Iterator[None]:
    with generators_kept(), generators(0, torch.device("cpu")):
        random.seed(0)
        for generator in numpys_random():
            generator.seed(0)
        yield


def _is_known(dataset: object) -> bool:
    try:
        known = dataset in _agreed
        _agreed.add(dataset)
    except TypeError:
        return False
    return known


def _shown(summary: Summary) -> str:
    parts = []
    for shape, _, numbers in summary[:2]:
        begin = " ".join(f"{number:.4g}" for number in numbers[:3])
        parts.append(f"{shape} ({begin}{' ...' * (len(numbers) > 3)})")
    return " and ".join(parts) or "nothing"
