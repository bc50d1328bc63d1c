"""The parts of the model for each shape that a microbatch may have, made when one first comes. Imports torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.task import Task
from paceline.parallel.tracing.boundaries import Boundaries, Mark
from paceline.parallel.tracing.segments import Segment, split
from paceline.parallel.tracing.trace import Traced, Tracer, key_of

#: So many shapes and modes are kept at a time.
KEPT = 64


_Value = TypeVar("_Value")

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

#: How deep `opened_modules` goes: 0 stops at the entries of lists, each further level opens one level of those.
LEVELS = 4


class _Latest(dict[Hashable, _Value]):
    """The values that were last asked for. The first two stay: those of the sample, in training and in evaluation."""

    def keep(self, key: Hashable, value: _Value) -> None:
        self[key] = value
        if len(self) > KEPT:
            del self[list(self)[2]]


class Programs:
    """Traces the model and cuts the traces, always at the same marks.

    The same on every rank of a pipeline: each has the whole batch of its replica, so each knows all shapes without asking.

    stages: modules are opened, one level after the other, until there are marks for so many. cut: until these are called.
    """

    def __init__(
        self, task: Task, device: torch.device, sample: Microbatch, stages: int, cut: Sequence[str] = ()
    ) -> None:
        self._task = task
        self._device = device
        self._mode = task.model.training
        # The first trace is kept: of a model that looks at values only the sample can be traced, on real tensors, before
        # it is cut.
        self._traced: _Latest[Traced] = _Latest()
        self._known: _Latest[tuple[Segment, ...]] = _Latest()
        #: What the outer forward reads and was last found to be changed, in words; "" if nothing was.
        self.changed = ""
        for level in range(LEVELS + 1):
            opened = opened_modules(task.model, level=level, cut=cut)
            self._tracer = Tracer(task.model, opened.__contains__, device)
            self._traced.clear()
            traced = self.trace(sample)
            if cut or len(Boundaries(traced).marks()) >= stages - 1:
                break

    def trace(self, micro: Microbatch, training: bool | None = None) -> Traced:
        """The outer forward for a microbatch such as this one. training: None is the mode that the model was given in."""
        key = self._key(micro, training)
        found = self._traced.get(key)
        if found is None:
            with self._task.autocast(self._device):
                found = self._tracer.trace(micro.args, micro.kwargs, training=training)
            self._traced.keep(key, found)
        return found

    def segments(self, micro: Microbatch, training: bool | None, marks: Sequence[Mark]) -> tuple[Segment, ...]:
        """The parts of the model between the marks, for this microbatch's shapes."""
        key = self._key(micro, training)
        found = self._known.get(key)
        if found is None:
            boundaries = Boundaries(self.trace(micro, training))
            found = split(boundaries, [boundaries.find(mark) for mark in marks])
            self._known.keep(key, found)
        return found

    def _key(self, micro: Microbatch, training: bool | None) -> Hashable:
        return key_of(micro.args, micro.kwargs, self._mode if training is None else training)

    def refresh(self) -> None:
        """Before a step: forget the traces of what the outer forward reads, if that is not what it was.

        Each microbatch is then traced anew, at the same marks.
        """
        stale: list[Hashable] = []
        texts: list[str] = []
        for key, traced in self._traced.items():
            if changed := traced.reads.changed():
                stale.append(key)
                texts += [read.text for read in changed]
        for key in stale:
            del self._traced[key]
            self._known.pop(key, None)
        if texts:
            self.changed = ", ".join(dict.fromkeys(texts))
            self._tracer.note_changed(self.changed)

    @property
    def shut(self) -> dict[str, str]:
        """Modules that are not traced because they can't be -> why."""
        return self._tracer.shut

    def forget(self) -> None:
        """Keep nothing of the real model."""
        self._tracer.forget()


def opened_modules(model: nn.Module, *, level: int = 0, cut: Iterable[str] = ()) -> frozenset[str]:
    """Names of the modules whose forward is traced, so that the model may be cut inside of them.

    Those are `nn.Sequential` and modules that hold a list of modules, unless they are blocks (a list with several entries of
    their class), and whatever these and the modules of `cut` lie in.
    """
    found = {parent for name in cut for parent in _parents(name)}
    depths: dict[str, int] = {"": 0}
    for name, module in model.named_modules(remove_duplicate=False):
        if not name:
            continue
        owner = name.rpartition(".")[0]
        is_block = _is_block(module, model.get_submodule(owner))
        depths[name] = depths[owner] + is_block
        if isinstance(module, nn.Sequential):
            opened = depths[name] <= level + is_block
        else:
            holds_list = any(isinstance(child, _LISTS) for child in module.children())
            own = not type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is not None
            opened = (holds_list or (own and level > 0)) and depths[name] <= level
        if opened:
            # The modules around it are opened too, or the trace would never come to it.
            found |= {name, *_parents(name)}
    return frozenset(found)


def _is_block(module: nn.Module, owner: nn.Module) -> bool:
    return isinstance(owner, _LISTS) and sum(type(other) is type(module) for other in owner.children()) > 1


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
