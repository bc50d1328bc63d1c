"""A sampler that remembers the processed samples of an epoch, so that other ranks can share the rest."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from paceline.compat.horovod.common import basics


class ElasticSampler(Sampler[int]):
    """A sampler of each rank's share of the rest of an epoch.

    All ranks get equally many samples, so some samples appear twice. Call record_batch after each batch, and set_epoch at the END
    of an epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with no sample processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch of this size."""
        # Each rank takes every n-th sample of the epoch's order, so the processed samples are a prefix of it, and another
        # number of ranks can share the rest.
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's samples of a batch."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share the rest among the present ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        left = list(range(len(self.dataset)))
        if self.shuffle:
            # A text as seed gives the same order in every process, for any PYTHONHASHSEED, and leaves torch's random state alone.
            random.Random(f"{self.seed}-{self.epoch}").shuffle(left)
        left = left[self.processed_num :]
        self.num_samples = math.ceil(len(left) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        while left and len(left) < self.total_size:
            # From the front again, more than once where fewer samples are left than there are ranks.
            left += left[: self.total_size - len(left)]
        self.remaining_indices = left
        self.indices = left[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return self.num_samples
