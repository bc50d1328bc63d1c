"""TorchState: models, optimizers and samplers as elastic state."""

from __future__ import annotations

import copy
from typing import Any

import torch

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.elastic import Kept, ObjectState, from_first
from paceline.compat.horovod.torch.elastic.sampler import ElasticSampler
from paceline.compat.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """A model, an optimizer, samplers, and plain values, each an attribute.

    Saving copies values that have a handler (models, optimizers, ElasticSamplers and registered types). Other values are not
    copied.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._handlers = {name: made for name, value in given.items() if (made := _handler(value)) is not None}
        for name, handler in self._handlers.items():
            # Past `__setattr__` below, which would save the value a second time.
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in given.items() if name not in self._handlers}
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
        # Sort by name: another order of the keyword arguments on another rank would mix up the broadcasts.
        for name in sorted(self._handlers):
            self._handlers[name].sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def kept(self) -> dict[str, Any] | None:
        # A user's handler may store its saved value in another attribute.
        saved = {name: handler.__dict__.get("_saved") for name, handler in self._handlers.items()}
        return {**(super().kept() or {}), "handlers": saved}

    def take_kept(self, kept: dict[str, Any]) -> None:
        for name, saved in kept["handlers"].items():
            if name in self._handlers and saved is not None:
                self._handlers[name]._saved = saved
        super().take_kept(kept)

    def __setattr__(self, name: str, value: Any) -> None:
        # By way of `__dict__`, as the constructor sets attributes before there are handlers.
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler(Kept):
    """The saving, restoring and broadcasting of one value. Subclasses can be registered for other types."""

    _saved: Any

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Replace the value, and save it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """A handler of a value with a `state_dict`. Subclasses broadcast the first rank's."""

    def save(self) -> None:
        # A copy, for a module's state_dict refers to the parameters themselves.
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self._spread()
        # After a failure, all ranks return to the present values.
        self.save()

    def _spread(self) -> None:
        raise NotImplementedError


class ModelStateHandler(StateDictHandler):
    """A handler of a module's parameters and buffers."""

    def _spread(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """A handler of an optimizer's state and options."""

    def _spread(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateDictHandler):
    """A handler of an ElasticSampler's progress."""

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
    """Return (type, handler) pairs in the order of their use."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Use these handlers for new states."""
    global _registry
    _registry = registry


def _handler(value: Any) -> StateHandler | None:
    made = next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
    if made is not None:
        made.save()
    return made
