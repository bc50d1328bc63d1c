"""Traces of a model's outer forward (the code outside of its blocks) as graphs of blocks.

A graph is valid for one signature (a microbatch's shapes) and one mode (training or not), because it fixes sizes and
the branches of Python code. For a new signature Paceline traces a copy of the model with fake tensors, which have
shapes but no memory. A block that reads the values of tensors fails on fake tensors. Then Paceline traces the model
with real tensors, and supports only this signature.
"""

from __future__ import annotations

import contextlib
import traceback
import zlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from paceline.parallel.deterministic_rng import GENERATORS, generators_kept
from paceline.parallel.errors import ParallelError, error_summary
from paceline.parallel.large.meta_parameters import stand_ins
from paceline.parallel.pytree import map_tensors, signature, tensors_in
from paceline.parallel.tracing.fake_model import (
    AttributeMirror,
    Contents,
    attributes_kept,
    contents,
    eager,
    make_shadow,
    names_by_module,
    names_by_tensor,
    unlogged,
    untouched,
)
from paceline.parallel.tracing.fingerprint import Fingerprint
from paceline.parallel.tracing.reads import Reads, noting
from paceline.parallel.tracing.recorder import CannotRecordError, GraphRecorder, Ran, recording
from paceline.parallel.tracing.source import Line, error_line, find_line, shown
from paceline.torch_private import VALUE_NEEDED, FakeTensorMode

#: A tracer remembers at most this many lists of calls. Each list was confirmed: a second run of the model made the same calls.
_REMEMBERED = 64


@dataclass(kw_only=True, eq=False)
class Traced:
    """A graph of a model's calls outside of its blocks, for given shapes.

    Attributes:
        order: The graph's nodes, without placeholders and output.
        inputs: One placeholder for each tensor of (args, kwargs).
        entries: (module's name, number of nodes before the call) of each module call.
        leaves: The modules whose call is a single node.
        constants: Name of a `get_attr` node -> its value, if that is no tensor of the model.
        reads: The variables whose values are fixed in the graph.
    """

    order: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    entries: tuple[tuple[str, int], ...]
    leaves: frozenset[str]
    constants: dict[str, object]
    reads: Reads

    def calls(self) -> list[Hashable]:
        """Return the traced calls with arguments, in a form that processes can compare."""
        index = {node: number for number, node in enumerate((*self.inputs, *self.order))}
        taken = Fingerprint(by_content=True)

        def named(value: fx.node.Argument) -> object:
            return fx.node.map_arg(value, lambda node: f"value {index[node]}")

        def target(node: fx.Node) -> Hashable:
            if str(node.target) in self.constants:
                return taken.of(self.constants[str(node.target)])
            if isinstance(node.target, str):
                return node.target
            return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"

        return [
            (node.op, target(node), taken.of(named(node.args)), taken.of(named(node.kwargs)))
            for node in (*self.order, self.output)
        ]

    def difference(self, other: Traced) -> Line | None:
        """Return the line of user code at which two traces differ, or None."""
        pairs = enumerate(zip_longest(self.calls(), other.calls()))
        number = next((number for number, (one, two) in pairs if one != two), None)
        return None if number is None else self._line(number) or other._line(number)

    @cached_property
    def digest(self) -> int:
        """A 32-bit hash of the calls, equal on all ranks with equal calls."""
        # Do not use hash(), because its results differ between processes.
        return zlib.crc32(repr(self.calls()).encode())

    def _line(self, number: int) -> Line | None:
        # The graph's output has no source line, so use the source line of the last call.
        order = [*self.order, *self.order[-1:]]
        line: Line | None = order[number].meta["line"] if number < len(order) else None
        return line


class Record(Protocol):
    """A function that runs a model and returns the trace of its calls.

    It first calls `begin` with its `GraphRecorder`. `with_reads` also records reads of variables, which is slow.
    """

    def __call__(self, begin: Callable[[GraphRecorder], None], *, with_reads: bool = True) -> Traced: ...


class Tracer:
    """A tracer of a model, by means of a copy with fake tensors.

    `opened(name)` returns whether to trace the forward of the module `name` too, instead of recording one call.
    """

    def __init__(self, model: nn.Module, opened: Callable[[str], bool], device: torch.device | None = None) -> None:
        self._opened = opened
        #: Name of a module -> the reason why tracing inside it has failed. The tracer now treats this module as a block.
        self.shut: dict[str, str] = {}
        self._model: nn.Module | None = model
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        _check_hooks(model)
        self._fake, self._plain = make_shadow(model, self._mode, device)
        self._device = device or torch.device("cpu")
        self._mirror = AttributeMirror(model, self._fake)
        self._names = names_by_module(self._fake)
        self._ran: Ran = {}
        #: The lists of calls that a second run of the model has confirmed. Later traces with the same calls need no second run.
        self._repeated: set[tuple[Hashable, ...]] = set()
        self._changed = ""

    def forget(self) -> None:
        """Release the traced model and its memory."""
        self._model = None

    def trace(self, args: tuple[object, ...], kwargs: dict[str, object], *, training: bool | None = None) -> Traced:
        """Return the graph of the model's calls, for arguments of these shapes.

        `training` selects training or evaluation mode. None keeps the model's present mode.

        Raises:
            ParallelError: Code outside of blocks cannot be recorded, or differs between two calls. The message names its line.
        """
        if training is not None:
            self._fake.train(training)
        self._forget_blocks(self._mirror.follow(self._fake_of))
        while True:
            try:
                try:
                    return self._trace_fake(args, kwargs)
                except _InBlockError as failed:
                    if self._model is None:
                        raise self._without_values(failed) from failed.__cause__
                # Retry outside of `except`, where Python would show a new error as raised "during handling of" the first error.
                with stand_ins(self._real, self._device):
                    return self._trace_real(args, kwargs, training)
            except _ShutError as shut:
                self.shut[shut.name] = shut.reason
            except ParallelError:
                raise
            except Exception as error:
                self._run_plain(args, kwargs, training)
                if lacking := _not_collected(error):
                    raise ParallelError(
                        f"{type(self._fake).__name__} can't be cut into stages: at {error_line(error)} it reads {lacking} of its "
                        f"own layers (output_{lacking}=True), which transformers collects by hooks in one process. Use "
                        "DataParallel() or FullyShard(), where each worker runs all layers."
                    ) from error
                raise ParallelError(
                    f"{type(self._fake).__name__} can't be cut into stages: {error_line(error)}: {error_summary(error)}. "
                    "In one process it can be computed, but not be noted call by call; move that line into "
                    "a module of its own (one block stays in one stage), or use DataParallel() or FullyShard()."
                ) from error

    def _run_plain(self, args: tuple[object, ...], kwargs: dict[str, object], training: bool | None) -> None:
        """Run the plain model, so that a faulty model raises its own error."""
        if self._model is None:
            return
        kept = untouched(self._model, training), attributes_kept(self._model), generators_kept(), torch.enable_grad()
        with stand_ins(self._model, self._device), contextlib.ExitStack() as stack:
            for context in kept:
                stack.enter_context(context)
            own_args, own_kwargs = map_tensors((args, kwargs), torch.clone)
            self._model.forward(*own_args, **own_kwargs)

    def _forget_blocks(self, changed: list[nn.Module]) -> None:
        """Drop stored results of the blocks that contain a module in `changed`."""
        names = {f"{self._names.get(id(module), '')}." for module in changed}
        for key in [key for key in self._ran if any(name.startswith(f"{key[0]}.") for name in names)]:
            del self._ran[key]

    def note_changed(self, text: str) -> None:
        """Store `text`, which names changed variables, for the errors of later traces."""
        self._changed = text

    def _without_values(self, failed: Exception) -> ParallelError:
        if self._changed:
            return ParallelError(
                f"{self._changed} was changed, which the model's outer forward reads, and what it does now can't be noted: "
                f"{failed} Read it inside of a block, where any change is followed, or set it before parallelize."
            )
        return ParallelError(
            f"{failed} A microbatch of another shape than the first needs the model's shapes, which can't be found without "
            "running that block. Give all microbatches one shape: drop_last=True and a number of rows that microbatches divides."
        )

    @property
    def _real(self) -> nn.Module:
        assert self._model is not None
        return self._model

    def _fake_of(self, tensor: Tensor) -> Tensor:
        fake: Tensor = self._mode.from_tensor(tensor.detach().requires_grad_(tensor.requires_grad))
        self._plain[id(fake)] = tensor
        return fake

    def _trace_fake(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Traced:
        def record(begin: Callable[[GraphRecorder], None], *, with_reads: bool = True) -> Traced:
            with torch.enable_grad():
                fake_args, fake_kwargs = map_tensors((args, kwargs), self._mode.from_tensor)
            state = names_by_tensor(self._fake)
            with self._mode:
                return self._record(self._fake, fake_args, fake_kwargs, state, begin, with_reads)

        with attributes_kept(self._fake) as put_back, generators_kept(), unlogged():
            return self._twice(self._fake, record, put_back)

    def _trace_real(self, args: tuple[object, ...], kwargs: dict[str, object], training: bool | None) -> Traced:
        model = self._real

        def record(begin: Callable[[GraphRecorder], None], *, with_reads: bool = True) -> Traced:
            with untouched(model, training):
                # Copy the arguments: the forward may change them, and the second run must start with the same values.
                own_args, own_kwargs = map_tensors((args, kwargs), torch.clone)
                return self._record(model, own_args, own_kwargs, names_by_tensor(model), begin, with_reads)

        with attributes_kept(model) as put_back, generators_kept():
            return self._twice(model, record, put_back)

    def _twice(self, model: nn.Module, record: Record, put_back: Callable[[], None]) -> Traced:
        """Trace the model twice. Raise ParallelError unless both traces are equal."""
        cannot = f"{type(model).__name__} can't be cut into stages"

        def line_where(probe: Callable[[], Hashable]) -> Line | None:
            put_back()
            running: list[GraphRecorder] = []
            is_outer = lambda: bool(running) and running[-1].is_outer  # noqa: E731
            return find_line(lambda: record(running.append), probe, is_outer)

        before = contents(model)
        states = [state() for _, state in GENERATORS]
        traced = record(lambda recorder: None)
        for (name, state), earlier in zip(GENERATORS, states, strict=True):
            # If no line of the forward draws from the generator (`line_where` finds none), another thread has drawn from it.
            if state() != earlier and (line := line_where(state)) is not None:
                raise ParallelError(
                    f"{cannot}: {shown(line)}: it draws from {name}, and a stage would repeat the first call's "
                    "numbers. Draw with torch (torch.rand(())), inside a block."
                )
        if written := self._written(before, contents(model), traced):
            key, name = written
            if self._settles(model, key, traced, record):
                return self._settled(traced)
            line = line_where(lambda: contents(model).get(key))
            raise ParallelError(
                f"{cannot}: {shown(line)}: it changes {name!r}, or puts something new in the "
                f"place of {name!r}, which a stage of a pipeline would not do. Change a tensor in place "
                "(`self.x.copy_(new)`, `self.x.add_(1)`), or do it inside a block."
            )
        if changed := traced.reads.changed():
            read = changed[0]
            line = line_where(lambda: Fingerprint().of(read.look()))
            raise ParallelError(
                f"{cannot}: {shown(line)}: it changes {read.text}, which it reads, and a "
                "stage would not do so again. Do it inside a block, or in the loop, before step()."
            )
        calls = tuple(traced.calls())
        # Skip the second run if an earlier one has confirmed these calls. Traces in other modes or sizes often have equal calls.
        is_new = calls not in self._repeated
        if is_new and (line := traced.difference(record(lambda recorder: None, with_reads=False))) is not None:
            raise ParallelError(
                f"{cannot}: {shown(line)}: a second call with the same shapes does something else there, and a stage would "
                "repeat what the first one did. Has it to do with time, with a file, with random numbers that are not torch's, "
                "or with what an earlier call has left? Do that inside a block."
            )
        if len(self._repeated) < _REMEMBERED:
            self._repeated.add(calls)
        return self._settled(traced)

    def _settled(self, traced: Traced) -> Traced:
        traced.reads = traced.reads.moved(self._mirror.original)
        return traced

    def _settles(self, model: nn.Module, key: tuple[int, str], traced: Traced, record: Record) -> bool:
        """Return whether a second call changes no attribute and has the same trace.

        `key` is (module's id, name) of an attribute that the first call changed. `traced` is the first call's trace.
        """
        value = vars(next(module for module in model.modules() if id(module) == key[0])).get(key[1])
        if tensors_in([value, getattr(value, "__dict__", None)]):
            return False
        before = contents(model)
        again = record(lambda recorder: None)
        is_settled = self._written(before, contents(model), again) is None and not again.reads.changed()
        return is_settled and traced.difference(again) is None

    def _written(self, before: Contents, after: Contents, traced: Traced) -> tuple[tuple[int, str], str] | None:
        changed = {
            key: (before.get(key) or after[key])[0] for key in before | after if before.get(key) != after.get(key)
        }
        # Ignore attributes that a block changes in its own modules, because the block also changes them when its stage runs.
        blocks = tuple(f"{leaf}." for leaf in traced.leaves)
        return next(((key, name) for key, name in changed.items() if not name.startswith(blocks)), None)

    def _record(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        state: dict[int, str],
        begin: Callable[[GraphRecorder], None],
        with_reads: bool,
    ) -> Traced:
        names = names_by_module(model)

        def opened(name: str) -> bool:
            return name not in self.shut and self._opened(name)

        is_fake = model is self._fake
        recorder = GraphRecorder(
            names={key: name for key, name in names.items() if key != id(model)},
            state=state,
            plain=self._plain if is_fake else {},
            opened=opened,
            ran=self._ran if is_fake else None,
        )
        begin(recorder)
        inputs = tuple(
            recorder.add_input(f"input_{index}", tensor) for index, tensor in enumerate(tensors_in((args, kwargs)))
        )
        reads = Reads()
        noted: AbstractContextManager[None] = contextlib.nullcontext()
        if with_reads:
            noted = noting(reads, lambda: recorder.is_outer, lambda module: names.get(id(module)))
        try:
            with torch.enable_grad(), eager(), recording(recorder), noted:
                result = model.forward(*args, **kwargs)
            output = recorder.finish(result)
        except Exception as error:
            self._refuse(error, recorder, model)
        return Traced(
            order=tuple(recorder.order),
            inputs=inputs,
            output=output,
            entries=tuple(recorder.entries),
            leaves=frozenset(recorder.leaves),
            constants=recorder.constants,
            reads=reads,
        )

    def _refuse(self, error: Exception, recorder: GraphRecorder, model: nn.Module) -> None:
        if isinstance(error, ParallelError):
            raise error
        own_line = error.line if isinstance(error, CannotRecordError) else None
        where = error_line(error) if own_line is None else shown(own_line)
        needs_values = isinstance(error, VALUE_NEEDED)
        if recorder.inside is not None:
            if model is self._fake:
                raise _InBlockError(
                    f"{recorder.inside} can't run on shapes alone ({where}: {type(error).__name__}: {error})."
                ) from error
            raise error
        reason = (
            str(error) if isinstance(error, CannotRecordError) else "what it does next depends on a tensor's values"
        )
        # If a module's inside cannot be traced, treat it as a block. The whole model can't be one, so raise an error.
        cannot = needs_values or isinstance(error, CannotRecordError)
        if cannot and own_line is None and (name := recorder.opened_now):
            raise _ShutError(name, f"{where}: {reason}") from error
        if cannot:
            raise ParallelError(
                f"{type(model).__name__} can't be cut into stages: {where}: {reason}. Its own forward has to be the same calls "
                "for every batch of one shape; move that line into a module of its own (one block stays in one stage), or "
                "use DataParallel() or FullyShard()."
            ) from error
        raise error


class _ShutError(Exception):
    """A module's forward cannot be traced, so its call must be one graph node."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} can't be cut: {reason}")
        self.name = name
        self.reason = reason


class _InBlockError(Exception):
    """A block cannot run on fake tensors."""


def key_of(args: tuple[object, ...], kwargs: dict[str, object], training: bool | None) -> Hashable:
    """Return a key of the arguments; calls with equal keys have the same graph."""
    return signature((args, kwargs)), training


def _check_hooks(model: nn.Module) -> None:
    """Raise ParallelError if the root module has hooks, which stages never call."""
    for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for hook in getattr(model, table).values():
            raise ParallelError(
                f"{type(model).__name__} has the hook {getattr(hook, '__qualname__', hook)!r} on itself, which no stage of a "
                "pipeline would call. Put it on one of its modules, or remove it first."
            )


def _not_collected(error: BaseException) -> str:
    """Return the name ("hidden_states", "attentions") of an output that transformers left empty, or ""."""
    values = (value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values())
    # Look only at dataclasses, because reading an attribute of another object may run the object's code.
    outputs = ((value, name) for value in values if is_dataclass(value) for name in ("hidden_states", "attentions"))
    return next((name for value, name in outputs if getattr(value, name, None) == ()), "")
