"""The stages' parts of a model for each shape of microbatch, traced when the shape first occurs."""

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

#: A cache keeps traces for at most this many combinations of input shapes and mode (training or evaluation).
KEPT = 64


_Value = TypeVar("_Value")

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

#: The largest level to try: the model may be cut inside blocks that are nested this many levels deep.
LEVELS = 4


class _Latest(dict[Hashable, _Value]):
    """A cache that keeps its first two entries and the newest ones."""

    def keep(self, key: Hashable, value: _Value) -> None:
        self[key] = value
        if len(self) > KEPT:
            del self[list(self)[2]]


class Programs:
    """The traces of a model, all cut at the same module calls (marks).

    All ranks of a pipeline make the same cuts without communication, because each rank knows all shapes from its
    replica's whole batch. To open a module means to trace its forward too. Modules are opened level by level, until
    there are marks for all `stages`, or until the trace calls the modules in `cut`.
    """

    def __init__(
        self, task: Task, device: torch.device, sample: Microbatch, stages: int, cut: Sequence[str] = ()
    ) -> None:
        self._task = task
        self._device = device
        self._mode = task.model.training
        # This cache never drops its first entry, the sample batch's trace: for some models no other trace can be made.
        self._traced: _Latest[Traced] = _Latest()
        self._known: _Latest[tuple[Segment, ...]] = _Latest()
        #: A text about the last change of a value that the code of the model's forward reads, or "" if no value has changed.
        self.changed = ""
        for level in range(LEVELS + 1):
            self._tracer = Tracer(task.model, opened_modules(task.model, level=level, cut=cut).__contains__, device)
            self._traced.clear()
            traced = self.trace(sample)
            if cut or len(Boundaries(traced).marks()) >= stages - 1:
                break

    def trace(self, micro: Microbatch, training: bool | None = None) -> Traced:
        """Return the traced graph of the model for this microbatch's shapes.

        `training` selects training or evaluation mode. None takes the model's mode when this object was made.
        """
        key = self._key(micro, training)
        traced = self._traced.get(key)
        if traced is None:
            with self._task.autocast(self._device):
                traced = self._tracer.trace(micro.args, micro.kwargs, training=training)
            self._traced.keep(key, traced)
        return traced

    def segments(self, micro: Microbatch, training: bool | None, marks: Sequence[Mark]) -> tuple[Segment, ...]:
        """Return the parts of the model between the marks (module calls).

        The parts are made for this microbatch's shapes. `training` selects training or evaluation mode; None takes the model's.
        """
        key = self._key(micro, training)
        segments = self._known.get(key)
        if segments is None:
            boundaries = Boundaries(self.trace(micro, training))
            segments = split(boundaries, [boundaries.find(mark) for mark in marks])
            self._known.keep(key, segments)
        return segments

    def _key(self, micro: Microbatch, training: bool | None) -> Hashable:
        return key_of(micro.args, micro.kwargs, self._mode if training is None else training)

    def refresh(self) -> None:
        """Drop traces for which a value read during tracing has changed.

        The next microbatch is then traced again, and cut at the same marks.
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
        """Name -> reason, for each module whose forward could not be traced."""
        return self._tracer.shut

    def forget(self) -> None:
        """Release the traced model and its memory."""
        self._tracer.forget()


def opened_modules(model: nn.Module, *, level: int = 0, cut: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of the modules inside which the model may be cut.

    These are `nn.Sequential`, modules that contain a list of modules, and the parents of such modules and of the
    modules in `cut`. A block is a module in a list with other modules of its class. Modules inside more than `level`
    nested blocks are left out.
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
            # Open the module's parents too: a trace records calls inside a module only if the module is opened.
            found |= {name, *_parents(name)}
    return frozenset(found)


def _is_block(module: nn.Module, owner: nn.Module) -> bool:
    return isinstance(owner, _LISTS) and sum(type(other) is type(module) for other in owner.children()) > 1


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
