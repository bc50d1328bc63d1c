"""A sampler for `torch.utils.data.DataLoader`: each sample once in an epoch at any world size, resumed at any other.

    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
    for epoch in range(sampler.epoch, 10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            train(x, y)
            sampler.advance(len(x))
            checkpoint(sampler.state_dict())

What takes it back is `sampler.load_state_dict(state)` before the loop. Needs no torch itself: a DataLoader takes anything that
can be iterated and has a length.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import length_hint
from typing import Any

from paceline.data.sampling.order import GlobalOrder
from paceline.data.sampling.world import check_tail, length_of, own_positions, own_rank
from paceline.errors import DataError

_VERSION = 1


class DistributedSampler:
    """The numbers of this rank's samples, epoch by epoch: of the global order, positions rank, rank + world_size, ...

    Batch k of all ranks together is positions k B .. (k + 1) B - 1 of the order, B being the batch size of all ranks
    together; so a run on 8 workers of 32 samples sees the batches of one on 4 workers of 64.

    data_source_or_length: the data set, or how many samples it has.
    rank, world_size: both or neither. Without them, those of `torch.distributed` if it is initialised, else of RANK and
        WORLD_SIZE; a world of one outside any run and launcher.
    seed: the same on every rank. shuffle: with False the order is that of the data set.
    drop_last: leave out the last samples that do not come to one for each rank. pad: fill up with the epoch's first
        samples instead. With neither, some ranks have one sample more than others, and so perhaps one batch more: wrap
        the loop in DDP's `join()`, or the last step waits for ranks that are done.

    Raises:
        DataError: a wrong value. RunContextError: a worker without RANK or WORLD_SIZE.
    """

    def __init__(
        self,
        data_source_or_length: Any,
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
        # Where the next iteration begins: at 0, or behind what a loaded state says was used.
        self._next_start = 0
        # A new object for each iteration, by which an older iterator that is still drawn from is told from the newest.
        self._iteration = object()
        # None as long as `advance` has not been called in this iteration.
        self._used: int | None = None
        # What is being drawn from, and how many will have been handed out once that is empty.
        self._drawing: Iterator[int] = iter(())
        self._drawn_after = 0
        self._done: int | None = None  # the epoch that a loaded state has the end of
        self._is_set = False
        self._to(0, 0)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives: 0 at first; after load_state_dict the state's, or if that one had come
        to its end, the next.
        """
        return self._order.epoch

    @property
    def seed(self) -> int:
        return self._order.seed

    def set_epoch(self, epoch: int) -> None:
        """Give the order of this epoch from now on, from its start. The epoch that is set already goes on where it is."""
        if epoch != self.epoch:
            self._to(epoch, self._length if epoch == self._done else 0)
        self._is_set = True

    def __len__(self) -> int:
        """The number of samples that the next iteration gives: after load_state_dict, what is left of the epoch."""
        return len(self._positions(self._next_start))

    def __iter__(self) -> Iterator[int]:
        # Not a generator of samples: passing a million of them on would take longer than computing them.
        return chain.from_iterable(self._pieces())

    def advance(self, samples: int) -> None:
        """Count so many more of this rank's own samples as used; call it after each step with its batch's number of samples.

        Raises:
            DataError: no integer, or more than this iteration has handed out.
        """
        used = (self._used or 0) + samples
        self._check_used(used, f"advance({samples})")
        self._used = used

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """The state from which the epoch goes on: seed, epoch and the global position, for `load_state_dict` at any world size.

        consumed: how many of this rank's own samples this iteration have been used; without it, what `advance` counted.
            What a DataLoader has drawn can't stand for it: its workers are ahead of the training loop.
        The state of rank 0 is good for every rank. torchdata's StatefulDataLoader keeps count itself and needs neither.

        Raises:
            DataError: the epoch has begun, and neither says how far it has got.
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
            # With `pad` the last positions lie beyond the end.
            "position": min(self._start + consumed * self.world_size, self._length),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the global sample at which the state was taken, on however many workers that was.

        Raises:
            DataError: a state of a sampler with another length, seed or shuffle, or no state at all.
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
        # By rank 0, which never has fewer than others: where nothing is left for it, the epoch is over for all.
        if len(own_positions(self._length, 0, self.world_size, start=position, **self._tail)):
            self._to(epoch, position)
            return
        # The epoch is over. A StatefulDataLoader loads the state late, when its loop may have set the next one already.
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
        """The samples, piece by piece; the iteration begins when the first is asked for."""
        self._begin(self._next_start)
        iteration = self._iteration
        for chunk in self._order.chunks(self._positions(self._start)):
            # A list's iterator tells how many it still has (`length_hint`), so nobody needs to count what is handed out.
            drawing = iter(chunk.tolist())
            if iteration is self._iteration:  # an older iterator, still drawn from, must not count
                self._drawing, self._drawn_after = drawing, self._drawn_after + len(chunk)
            yield drawing
        if iteration is self._iteration and self.epoch != self._done:
            # A resumed epoch is resumed once; whoever iterates again without set_epoch gets all of it.
            self._next_start = 0

    def _to(self, epoch: int, position: int) -> None:
        self._order = GlobalOrder(self._length, self.seed, epoch, shuffle=self._order.shuffle)
        self._next_start = position
        self._begin(position)

    def _begin(self, start: int) -> None:
        """An iteration that begins at `start`, of which nothing has been handed out or used."""
        self._start = start
        self._drawing = iter(())
        self._drawn_after = 0
        self._used = None
        self._iteration = object()

    @property
    def _handed_out(self) -> int:
        """The number of samples that the newest iteration has given."""
        left: int = length_hint(self._drawing)
        return self._drawn_after - left

    def _check_used(self, used: int, said: str) -> None:
        if not hasattr(used, "__index__"):
            raise DataError(f"{said}: a number of samples is an integer.")
        if not 0 <= used <= self._handed_out:
            raise DataError(
                f"{said}: that would be {used} samples used, but rank {self.rank} has been handed {self._handed_out} in "
                "this iteration. Count this rank's own samples, not those of all ranks."
            )


def _check_same(state: Mapping[str, Any], name: str, own: object) -> None:
    if name not in state:
        raise DataError(f"the sampler's state has no {name!r}; load what DistributedSampler.state_dict() gave.")
    if state[name] != own:
        raise DataError(
            f"the sampler's state is of {name}={state[name]!r}, but this sampler has {name}={own!r}: positions of one order "
            "mean nothing in another. Make the sampler with the values of the run that is resumed, or start afresh."
        )


def _torchdata_asks() -> bool:
    """True if state_dict() is called by torchdata's StatefulDataLoader.

    It asks each time it draws a batch, and keeps each answer until the loop has had that batch: for it alone, what is
    handed out is what is used. Nothing in the call itself tells it from a training loop's.
    """
    # Frame 0 is this function, 1 is `state_dict`, and 2 whoever called that.
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return isinstance(caller, str) and caller.startswith("torchdata.")
