"""A distributed sampler for `torch.utils.data.DataLoader`, resumable at any world size.

    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
    for epoch in range(sampler.epoch, 10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            train(x, y)
            sampler.advance(len(x))
            checkpoint(sampler.state_dict())

Call `sampler.load_state_dict(state)` before the loop to resume. The module needs no torch: a DataLoader accepts any iterable
with a length as a sampler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import length_hint
from typing import TypedDict

from paceline.data.sampling.order import GlobalOrder
from paceline.data.sampling.world import check_tail, length_of, own_positions, own_rank
from paceline.errors import DataError

_VERSION = 1


class SamplerState(TypedDict):
    """The state of a sampler, the same for all ranks."""

    version: int
    length: int
    seed: int
    shuffle: bool
    epoch: int
    position: int


class DistributedSampler:
    """A sampler of this rank's sample numbers.

    If all ranks together use B samples in a step, step k uses positions k B .. (k + 1) B - 1 of the order. So 8 workers with
    batches of 32 samples see the same samples in each step as 4 workers with batches of 64.

    Args:
        data_source_or_length: The data set, or its number of samples.
        rank: This rank; give it together with world_size. Default: `torch.distributed` if initialised, else RANK and
            WORLD_SIZE. Without a run or a launcher: rank 0 of 1.
        world_size: Number of ranks.
        seed: Seed of the order, equal on every rank.
        shuffle: False keeps the order of the data set.
        drop_last: Leave out the last samples that do not divide evenly among the ranks.
        pad: Repeat the epoch's first samples until all ranks have equally many. Without drop_last and pad, some ranks have one
            sample more, and perhaps one batch more. Then wrap the loop in DDP's `join()`, or the last step waits forever.

    Raises:
        DataError: A value is invalid.
        RunContextError: RANK or WORLD_SIZE is missing in a worker.
    """

    def __init__(
        self,
        data_source_or_length: object,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        pad: bool = False,
    ) -> None:
        check_tail(drop_last, pad)
        self._length = length_of(data_source_or_length, "DistributedSampler")
        self.rank, self.world_size = own_rank(rank, world_size)
        self._order = GlobalOrder(self._length, seed, shuffle=shuffle)
        self._tail = {"drop_last": bool(drop_last), "pad": bool(pad)}
        # Position at which the next iteration starts: 0, or the position of a loaded state.
        self._next_start = 0
        # Each iteration stores a new object here, which distinguishes the newest iterator from older ones.
        self._iteration = object()
        # Number of samples that `advance` has reported in this iteration; None before its first call.
        self._used: int | None = None
        # The iterator over the current chunk. Once it is exhausted, `_drawn_after` samples have been handed out.
        self._drawing: Iterator[int] = iter(())
        self._drawn_after = 0
        self._done: int | None = None  # the finished epoch, if a state from the end of an epoch was loaded
        self._is_set = False
        self._to(0, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the sampler's next iteration."""
        return self._order.epoch

    @property
    def seed(self) -> int:
        return self._order.seed

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin this epoch, or resume it at a loaded position."""
        if epoch != self.epoch:
            self._to(epoch, self._length if epoch == self._done else 0)
        self._is_set = True

    def __len__(self) -> int:
        """Return the number of samples of the next iteration."""
        return len(self._positions(self._next_start))

    def __iter__(self) -> Iterator[int]:
        # Chain whole chunks, because a generator of single samples would take longer than computing the samples.
        return chain.from_iterable(self._pieces())

    def advance(self, samples: int) -> None:
        """Report that the training loop has used `samples` more samples of this rank.

        Raises:
            DataError: The count is not an integer, or the sum of all calls exceeds the samples of this iteration.
        """
        used = (self._used or 0) + samples
        self._check_used(used, f"advance({samples})")
        self._used = used

    def state_dict(self, consumed: int | None = None) -> SamplerState:
        """Return the state for `load_state_dict`: seed, epoch and global position.

        The state of rank 0 is valid for every rank and world size. With torchdata's StatefulDataLoader, neither `advance` nor
        `consumed` is needed.

        Args:
            consumed: Number of this rank's samples that the loop has used in this iteration. Default: the sum of the
                calls of `advance`. A DataLoader has drawn more samples than that, because its workers prefetch.

        Raises:
            DataError: The epoch has begun, but `consumed` is None and `advance` was not called.
        """
        if consumed is None:
            consumed = self._used
        if consumed is None and (self._handed_out == 0 or _torchdata_asks()):
            consumed = self._handed_out
        if consumed is None:
            raise DataError(
                f"state_dict() in epoch {self.epoch}: {self._handed_out} samples of this rank have been handed out, but a "
                "DataLoader draws ahead, so how many were used is not known. Call sampler.advance(len(x)) after each step, "
                "x being its batch's samples, or give consumed=, the number of this rank's own samples that this epoch has "
                "used since it began or was resumed."
            )
        self._check_used(consumed, f"consumed={consumed}")
        return {
            "version": _VERSION,
            "length": self._length,
            "seed": self.seed,
            "shuffle": self._order.shuffle,
            "epoch": self.epoch,
            # With `pad`, the last positions lie beyond the end of the dataset.
            "position": min(self._start + consumed * self.world_size, self._length),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume at the global position of the state, at any world size.

        Raises:
            DataError: The state is invalid, or its length, seed or shuffle differs from this sampler's.
        """
        for name, own in (("version", _VERSION), ("length", self._length), ("seed", self.seed)):
            _check_same(state, name, own)
        _check_same(state, "shuffle", self._order.shuffle)
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or not 0 <= position <= self._length:
            raise DataError(
                f"the sampler's state has epoch={epoch!r}, position={position!r}; the epoch is an integer and the position "
                f"one of 0 .. {self._length}. Load what state_dict() gave, unchanged."
            )
        # No rank has more samples than rank 0. So if rank 0 has no samples left, the epoch is over for all ranks.
        if len(own_positions(self._length, 0, self.world_size, start=position, **self._tail)):
            self._to(epoch, position)
            return
        # A StatefulDataLoader may load the state late, after the training loop has set the next epoch.
        self._done = epoch
        if not self._is_set or self.epoch < epoch:
            self._to(epoch + 1, 0)
        elif self.epoch == epoch:
            self._to(epoch, self._length)

    def __repr__(self) -> str:
        return (
            f"DistributedSampler({self._length}, rank={self.rank}, world_size={self.world_size}, seed={self.seed}, "
            f"epoch={self.epoch})"
        )

    def _positions(self, start: int) -> range:
        return own_positions(self._length, self.rank, self.world_size, start=start, **self._tail)

    def _pieces(self) -> Iterator[Iterator[int]]:
        self._begin(self._next_start)
        iteration = self._iteration
        for chunk in self._order.chunks(self._positions(self._start)):
            # `length_hint` of a list iterator gives the number of samples left in it, so no counter is needed.
            drawing = iter(chunk.tolist())
            if iteration is self._iteration:  # ignore an older iterator of this sampler that is still in use
                self._drawing, self._drawn_after = drawing, self._drawn_after + len(chunk)
            yield drawing
        if iteration is self._iteration and self.epoch != self._done:
            # Only the first iteration resumes. A second iteration without set_epoch yields the whole epoch.
            self._next_start = 0

    def _to(self, epoch: int, position: int) -> None:
        self._order = GlobalOrder(self._length, self.seed, epoch, shuffle=self._order.shuffle)
        self._next_start = position
        self._begin(position)

    def _begin(self, start: int) -> None:
        self._start = start
        self._drawing = iter(())
        self._drawn_after = 0
        self._used = None
        self._iteration = object()

    @property
    def _handed_out(self) -> int:
        left: int = length_hint(self._drawing)
        return self._drawn_after - left

    def _check_used(self, used: int, call: str) -> None:
        if not hasattr(used, "__index__"):
            raise DataError(f"{call}: a number of samples is an integer.")
        if not 0 <= used <= self._handed_out:
            raise DataError(
                f"{call}: that would be {used} samples used, but rank {self.rank} has been handed {self._handed_out} in "
                "this iteration. Count this rank's own samples, not those of all ranks."
            )


def _check_same(state: Mapping[str, object], name: str, own: object) -> None:
    if name not in state:
        raise DataError(f"the sampler's state has no {name!r}; load what DistributedSampler.state_dict() gave.")
    if state[name] != own:
        raise DataError(
            f"the sampler's state is of {name}={state[name]!r}, but this sampler has {name}={own!r}: positions of one order "
            "mean nothing in another. Make the sampler with the values of the run that is resumed, or start without the state."
        )


def _torchdata_asks() -> bool:
    """Return whether the caller of `state_dict` is torchdata's StatefulDataLoader.

    StatefulDataLoader calls `state_dict` for each batch that it draws, and keeps the result until the loop gets that
    batch. So only for this caller, the samples that the sampler has yielded count as used.
    """
    # Frame 0 is this function, 1 is `state_dict`, 2 its caller.
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return isinstance(caller, str) and caller.startswith("torchdata.")
