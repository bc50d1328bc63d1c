"""A model's outer forward as a graph of calls, its blocks as single nodes. Loaded on use: it imports torch.

A graph holds for one signature (the shapes of a microbatch) and one mode (training or not): sizes are numbers in it, and
the branches that Python took are taken for good. So a new signature is traced anew, on a copy of the model whose tensors
are fake: shapes without memory. A block that can't run on these (it looks at values inside) is run once for real instead;
then there is no second signature.
"""

from __future__ import annotations

import linecache
import random
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.tracing.containers import map_tensors, signature, tensors_at
from paceline.parallel.tracing.recorder import CannotRecordError, Recorder, recording
from paceline.parallel.tracing.shadow import contents, make_shadow, names_by_tensor, untouched
from paceline.torch_private import VALUE_NEEDED, FakeTensorMode

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """What the outer forward does for one signature; the metadata of the nodes is the recorder's.

    order: the calls, without placeholders and output. inputs: one placeholder for each tensor of (args, kwargs).
    entries: (module's name, number of nodes before its call). leaves: the modules that are single nodes.
    constants: what `get_attr` nodes name that is not the model's.
    """

    graph: fx.Graph
    order: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    entries: tuple[tuple[str, int], ...]
    leaves: frozenset[str]
    constants: dict[str, Any]


class Tracer:
    """Traces a model; keeps a copy of it without memory, so that it can do so after the model has been cut.

    opened: says of a module's name whether its forward is traced too.
    """

    def __init__(self, model: nn.Module, opened: Callable[[str], bool]) -> None:
        self._opened = opened
        self._shut: set[str] = set()
        self._model: nn.Module | None = model
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        _check_hooks(model)
        self._fake, self._plain = make_shadow(model, self._mode)

    def forget(self) -> None:
        """Let go of the real model: from here on only fake tensors are used."""
        self._model = None

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool | None = None) -> Traced:
        """The graph for a microbatch such as this one, in the given mode; None: in the modes that its modules are in.

        Raises:
            ParallelError: the outer forward can't be noted; the message names the line that prevents it.
        """
        if training is not None:
            self._fake.train(training)
        while True:
            try:
                return self._trace_fake(args, kwargs)
            except _ShutError as shut:
                self._shut.add(shut.name)
            except _InBlockError as failed:
                if self._model is None:
                    raise ParallelError(
                        f"{failed} A microbatch of another shape than the first needs the model's shapes, which can't be "
                        "found without running that block. Give all microbatches one shape: drop_last=True and a number of "
                        "rows that microbatches divides."
                    ) from failed.__cause__
                break
        # Not where the error is handled: one of the block's own would be told as a second one.
        return self._trace_real(args, kwargs, training)

    def _trace_fake(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        with torch.enable_grad():
            fake_args, fake_kwargs = map_tensors((args, kwargs), self._mode.from_tensor)
        before = contents(self._fake)
        with self._mode:
            traced = self._record(self._fake, fake_args, fake_kwargs, names_by_tensor(self._fake), self._plain)
        after = contents(self._fake)
        for name in before:
            # What blocks change, inside of them, they will change in their stage.
            if after.get(name) != before[name] and not any(name.startswith(f"{leaf}.") for leaf in traced.leaves):
                raise ParallelError(
                    f"{type(self._fake).__name__}.forward puts something new in the place of {name!r}, which a stage of a "
                    "pipeline would not do. Change a tensor in place (`self.x.copy_(new)`, `self.x.add_(1)`), or do it inside a "
                    "block."
                )
        return traced

    def _trace_real(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None) -> Traced:
        model = self._model
        assert model is not None
        with untouched(model, training):
            own_args, own_kwargs = map_tensors((args, kwargs), torch.clone)
            return self._record(model, own_args, own_kwargs, names_by_tensor(model), {})

    def _record(
        self, model: nn.Module, args: Any, kwargs: Any, state: dict[int, str], plain: dict[int, Tensor]
    ) -> Traced:
        names: dict[int, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), name)
        names.pop(id(model))

        def opened(name: str) -> bool:
            return name not in self._shut and self._opened(name)

        recorder = Recorder(names=names, state=state, plain=plain, opened=opened)
        inputs = tuple(
            recorder.add_input(f"input_{index}", tensor) for index, (_, tensor) in enumerate(tensors_at((args, kwargs)))
        )
        python_state = random.getstate()
        try:
            with torch.enable_grad(), recording(recorder):
                result = model.forward(*args, **kwargs)
            output = recorder.finish(result)
        except Exception as error:
            self._refuse(error, recorder, model)
        if random.getstate() != python_state:
            random.setstate(python_state)
            raise ParallelError(
                f"{type(model).__name__}.forward draws from Python's `random`; a stage would repeat what was drawn once. "
                "Draw with torch (torch.rand(())), inside a block."
            )
        return Traced(
            graph=recorder.graph,
            order=tuple(recorder.order),
            inputs=inputs,
            output=output,
            entries=tuple(recorder.entries),
            leaves=frozenset(recorder.leaves),
            constants=recorder.constants,
        )

    def _refuse(self, error: Exception, recorder: Recorder, model: nn.Module) -> None:
        where, module = _user_line(error)
        if isinstance(error, ParallelError):
            raise error
        needs_values = isinstance(error, VALUE_NEEDED)
        if recorder.inside is not None:
            if isinstance(model, nn.Module) and model is self._fake:
                raise _InBlockError(
                    f"{recorder.inside} can't run on shapes alone ({where}: {type(error).__name__}: {error})."
                ) from error
            raise error
        # Not the outermost forward: that module can be one block instead.
        name = {id(item): name for name, item in model.named_modules()}.get(id(module), "")
        if name and (needs_values or isinstance(error, CannotRecordError)):
            raise _ShutError(name) from error
        if isinstance(error, CannotRecordError) or needs_values:
            reason = (
                str(error) if isinstance(error, CannotRecordError) else "what it does next depends on a tensor's values"
            )
            raise ParallelError(
                f"{type(model).__name__} can't be cut into stages: {where}: {reason}. Its own forward has to be the same calls "
                "for every batch of one shape; move that line into a module of its own (one block stays in one stage), or "
                "use Data() or FullyShard()."
            ) from error
        raise error


class _ShutError(Exception):
    """An opened module can't be traced."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _InBlockError(Exception):
    """A block can't run on fake tensors."""


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None) -> Hashable:
    """What two calls have in common that one graph is good for."""
    return signature((args, kwargs)), training


def _check_hooks(model: nn.Module) -> None:
    """Hooks of blocks run with them; there is no call of the whole model that its own could belong to."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for table in tables:
        for hook in getattr(model, table).values():
            raise ParallelError(
                f"{type(model).__name__} has the hook {getattr(hook, '__qualname__', hook)!r} on itself, which no stage of a "
                "pipeline would call. Put it on one of its modules, or remove it first."
            )


def _user_line(error: BaseException) -> tuple[str, Any]:
    """file:line: `source` of the innermost line that is the user's, and the `self` there."""
    found, owner = type(error).__name__, None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith((_TORCH, _HERE)):
            continue
        source = linecache.getline(file, line).strip()
        found = f"{file}:{line}: `{source}`" if source else f"{file}:{line}"
        if isinstance(frame.f_locals.get("self"), nn.Module):
            owner = frame.f_locals["self"]
    return found, owner
