"""`hvd.elastic`: training that continues after a failed collective.

This module has TorchState, the state of models, optimizers and samplers, and ElasticSampler, which divides the rest of
an epoch among the ranks. `horovod.torch.elastic.state` and `.sampler` are aliases of this module.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.elastic import Kept, ObjectState, from_first, run
from paceline.compat.horovod.common.types import KeptState
from paceline.compat.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "TorchState", "run"]


class ElasticSampler(Sampler[int]):
    """A sampler of this rank's share of an epoch's remaining samples.

    All ranks get equally many samples, so some samples may be repeated. Call record_batch after each batch, and
    set_epoch at the END of an epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, with no samples processed yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed a batch of this size."""
        # The ranks take the samples of the epoch's order in turn, so the processed samples are the first ones of this order.
        # After a change of the number of ranks, the new ranks share the remaining samples.
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the dataset indices of this rank's batch number `batch_idx`."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the epoch's remaining samples among the present ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        left = list(range(len(self.dataset)))
        if self.shuffle:
            # A string as seed gives one order in every process, for any PYTHONHASHSEED. torch's random state stays unchanged.
            random.Random(f"{self.seed}-{self.epoch}").shuffle(left)
        left = left[self.processed_num :]
        self.num_samples = math.ceil(len(left) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        while left and len(left) < self.total_size:
            # Repeat samples from the beginning of the list, several times if there are fewer samples than ranks.
            left += left[: self.total_size - len(left)]
        self.remaining_indices = left
        self.indices = left[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """An elastic training state: model, optimizer, samplers and plain values, as attributes.

    Saving copies the state of models, optimizers, ElasticSamplers and other types with a registered handler. Plain
    values are kept without copying.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: object
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self._handlers = {name: made for name, value in values.items() if (made := _handler(value)) is not None}
        for name, handler in self._handlers.items():
            # Bypass `__setattr__` below, which would save the value a second time.
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(from_first, basics.rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        # Sort by name, so that all ranks broadcast in one order, whatever the order of their keyword arguments.
        for name in sorted(self._handlers):
            self._handlers[name].sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def kept(self) -> KeptState | None:
        # A user's handler may store its value in an attribute other than `_saved`. Store None for such a handler.
        saved = {name: handler.__dict__.get("_saved") for name, handler in self._handlers.items()}
        return {"values": self._saved_state, "handlers": saved}

    def take_kept(self, kept: KeptState) -> None:
        for name, saved in kept["handlers"].items():
            if name in self._handlers and saved is not None:
                self._handlers[name]._saved = saved
        super().take_kept(kept)

    def __setattr__(self, name: str, value: object) -> None:
        # Read `__dict__`, because the constructor sets attributes before `_handlers` exists.
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler(Kept):
    """A handler that saves, restores and broadcasts one value of an elastic state."""

    _saved: object

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: object) -> None:
        """Replace the value, and save the new value."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """A handler that saves and restores a value with a `state_dict`."""

    def save(self) -> None:
        # Copy the state, because a module's state_dict refers to the parameters themselves.
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Copy the state again, because an optimizer keeps the loaded tensors and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self._spread()
        self.save()

    def _spread(self) -> None:
        raise NotImplementedError


class ModelStateHandler(StateDictHandler):
    """A handler that saves, restores and synchronizes a module's state."""

    def _spread(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """A handler that saves, restores and broadcasts an optimizer's state."""

    def _spread(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateDictHandler):
    """A handler that saves, restores and synchronizes an ElasticSampler's progress."""

    def _spread(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="sampler_state"))

    def reset(self) -> None:
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return (type, handler class) pairs for values of elastic states; the first match counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Use these (type, handler class) pairs for elastic states created afterwards."""
    global _registry
    _registry = registry


def _handler(value: object) -> StateHandler | None:
    made = next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
    if made is not None:
        made.save()
    return made


# Makes `from horovod.torch.elastic import state` work.
sampler = state = sys.modules[__name__]
