"""One epoch of a million samples shared out: what a rank spends on its part, against torch's DistributedSampler.

Time and memory of all of an epoch's sample numbers at once, and of a DataLoader's way, one number after the other, for a
world of one (all million are ours) and of eight.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from functools import partial

from torch.utils.data import DistributedSampler as TorchSampler

from common import in_turn, median, report
from paceline.data import DistributedSampler, GlobalOrder, partition

ROUNDS = 15
LENGTH = 1_000_000
WORLD_SIZES = (1, 8)


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def peak_mb(work: Callable[[], object]) -> float:
    """The most that was allocated at once, result included; what torch's tensors hold is not seen."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def at_once(world_size: int, epoch: int) -> object:
    """All numbers of the last rank in one array."""
    return GlobalOrder(LENGTH, 1, epoch).samples(partition(range(LENGTH), world_size - 1, world_size))


def one_by_one(world_size: int, epoch: int) -> object:
    sampler = DistributedSampler(LENGTH, world_size - 1, world_size, seed=1)
    sampler.set_epoch(epoch)
    return deque(sampler, maxlen=0)


def torch_one_by_one(world_size: int, epoch: int) -> object:
    sampler: TorchSampler[int] = TorchSampler(range(LENGTH), world_size, world_size - 1, seed=1)
    sampler.set_epoch(epoch)
    return deque(sampler, maxlen=0)


SIDES = {"at_once": at_once, "one_by_one": one_by_one, "torch": torch_one_by_one}


def main() -> None:
    figures: dict[str, float] = {}
    for world_size in WORLD_SIZES:
        epochs = itertools.count()
        turns = [
            lambda side=side, world_size=world_size: milliseconds(lambda: side(world_size, next(epochs)))  # noqa: B023
            for side in SIDES.values()
        ]
        for (name, side), times in zip(SIDES.items(), in_turn(ROUNDS, *turns), strict=True):
            figures[f"{name}_world_{world_size}_ms"] = median(times)
            figures[f"{name}_world_{world_size}_mb"] = peak_mb(partial(side, world_size, 0))
    ours = {name: figure for name, figure in figures.items() if not name.startswith("torch")}
    report(
        "partition",
        f"data partition of {LENGTH:,} samples, per rank, per epoch",
        "at most 50 ms and 16 MB",
        all(figure <= (50 if name.endswith("_ms") else 16) for name, figure in ours.items()),
        **figures,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
