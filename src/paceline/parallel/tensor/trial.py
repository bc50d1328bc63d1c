"""Trials of cutting groups of linear layers, in one process and without messages.

The code from a group's `columns` to its `row` must treat all parts of its input alike, as attention treats heads. In a trial the
columns first return whole random outputs, then one part of them at a time. The row must then get that part of its first input.

Code that contains a number of heads (`view(batch, time, self.heads, -1)`) works only if each rank divides this number.
So the trials also divide integer attributes of the surrounding modules by the number of parts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.parallel.deterministic_rng import normal
from paceline.parallel.errors import error_summary
from paceline.parallel.pytree import tensors_in
from paceline.parallel.tensor.check import scale_of, within
from paceline.parallel.tensor.groups import Group, undisturbed
from paceline.parallel.tensor.layers import inputs, outputs, part_of

#: A pair (name of a module, name of its integer attribute), such as an attention module and its number of heads.
Attribute = tuple[str, str]
#: Try at most this many combinations of attributes (a guess). An attention module has three or four numbers to divide.
_MOST_VARIANTS = 40


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether and how a group of linear layers can be cut over workers.

    `group.pieces` is the number of pieces with which the group can be cut.

    Attributes:
        divided: The attributes that each rank must divide by the number of parts.
        reason: Why the group cannot be cut, or "".
    """

    group: Group
    divided: tuple[Attribute, ...] = ()
    reason: str = ""


def try_groups(model: nn.Module, run: Callable[[], object], groups: Sequence[Group], parts: int) -> list[Verdict]:
    """Return whether and how each group of layers can be cut. `run` calls the model."""
    modules = dict(model.named_modules())
    kinds: dict[Hashable, list[Group]] = {}
    verdicts = []
    for group in groups:
        reason = _indivisible(modules, group, parts)
        if reason:
            verdicts.append(Verdict(group=group, reason=reason))
        else:
            kinds.setdefault(_kind(modules, group), []).append(group)
    # First try to cut all kinds of layer groups together, with unchanged attributes: most models need no other trial.
    first = [replace(group, pieces=_pieces(modules, group, parts)) for alike in kinds.values() for group in alike]
    if len(kinds) > 1 and not _try(model, modules, run, first, parts, ()):
        return [*verdicts, *(Verdict(group=group) for group in first)]
    for alike in kinds.values():
        verdicts += _try_alike(model, modules, run, alike, parts)
    return verdicts


def _try_alike(
    model: nn.Module, modules: Mapping[str, nn.Module], run: Callable[[], object], groups: list[Group], parts: int
) -> list[Verdict]:
    """Try to cut groups of equal layers together. Return whether each can be cut."""
    variants = [_variants(modules, group, parts) for group in groups]
    first = ""
    # If a column layer has three times as many outputs as the row layer has inputs, these are probably q, k and v.
    pieces = list(dict.fromkeys((_pieces(modules, groups[0], parts), 1)))
    # Try variant number n on all layer groups together, because blocks of one class have equal attributes.
    for chosen in itertools.islice(zip(*variants, strict=False), _MOST_VARIANTS):
        divided = [attribute for attributes in chosen for attribute in attributes]
        for count in pieces:
            tried = [replace(group, pieces=count) for group in groups]
            reason = _try(model, modules, run, tried, parts, divided)
            if not reason:
                return [Verdict(group=group, divided=own) for group, own in zip(tried, chosen, strict=True)]
            first = first or reason
    return [Verdict(group=group, reason=first) for group in groups]


def _try(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    run: Callable[[], object],
    groups: list[Group],
    parts: int,
    divided: Sequence[Attribute],
) -> str:
    """Try to cut groups of layers into `parts`. Return why this fails, or "".

    `divided`: Attributes, such as the number of heads, that this trial divides by `parts`.
    """
    with undisturbed(model), _Stage(modules, groups, parts) as stage:
        try:
            whole = _tensors(run())
        except Exception as error:
            return f"the model fails on random numbers: {error}"
        for part in range(parts):
            stage.part = part
            with division(modules, divided, parts):
                try:
                    output = _tensors(run())
                except Exception as error:
                    return f"the code around {stage.last!r} can't take a part of its input: {error_summary(error)}"
            if stage.reason:
                return stage.reason
            if len(output) != len(whole) or not all(map(_same, output, whole)):
                columns = ", ".join(groups[0].columns)
                return f"the output of {columns} is used elsewhere too"
    return ""


class _Stage:
    """A context with fake layers in place of the groups' layers, to test cuts."""

    def __init__(self, modules: Mapping[str, nn.Module], groups: Sequence[Group], parts: int) -> None:
        self.part: int | None = None
        self.reason = ""
        self.last = groups[0].row
        self._modules = modules
        self._groups = groups
        self._parts = parts
        self._inputs: dict[str, Tensor] = {}

    def __enter__(self) -> _Stage:
        for group in self._groups:
            for name in group.columns:
                # Set `forward` on the instance, where it hides the class's method until the end of the `with` block.
                self._modules[name].forward = self._column(name, group.pieces)
            self._modules[group.row].forward = self._row(group.row)
        return self

    def __exit__(self, *exception: object) -> None:
        for group in self._groups:
            for name in (*group.columns, group.row):
                del self._modules[name].forward

    def _column(self, name: str, pieces: int) -> Callable[[Tensor], Tensor]:
        module = self._modules[name]

        def forward(x: Tensor) -> Tensor:
            self.last = name
            if self.part is None:
                self._inputs[name] = x.detach()
            elif not self.reason and not _same(x, self._inputs[name]):
                # An earlier layer, divided by columns, has passed only a part to this layer, as with LoRA. Training would fail.
                self.reason = f"{name!r} needs all of its input, and would be given a part"
            whole = _random(name, (*x.shape[:-1], outputs(module)), x)
            return whole if self.part is None else part_of(whole, pieces, self.part, self._parts)

        return forward

    def _row(self, name: str) -> Callable[[Tensor], Tensor]:
        module = self._modules[name]

        def forward(x: Tensor) -> Tensor:
            if self.part is None:
                self._inputs[name] = x.detach()
            elif not self.reason and not _same(x, part_of(self._inputs[name], 1, self.part, self._parts)):
                self.reason = f"what leads to {name!r} mixes the parts, so that none can be computed alone"
            # Return the same random numbers in each run. Then two runs differ only if an earlier module mixes the parts.
            return _random(name, (*x.shape[:-1], outputs(module)), x)

        return forward


@contextlib.contextmanager
def division(modules: Mapping[str, nn.Module], attributes: Sequence[Attribute], parts: int) -> Iterator[None]:
    """Within the block, divide attributes such as head counts by `parts`."""
    before = [(name, attribute, getattr(modules[name], attribute)) for name, attribute in attributes]
    try:
        for name, attribute, value in before:
            setattr(modules[name], attribute, value // parts)
        yield
    finally:
        for name, attribute, value in before:
            setattr(modules[name], attribute, value)


def _variants(modules: Mapping[str, nn.Module], group: Group, parts: int) -> Iterator[tuple[Attribute, ...]]:
    """Yield sets of up to three module attributes that a trial divides, such as head counts."""
    attributes = [
        (name, attribute)
        for name in _around(group)
        for attribute, value in vars(modules[name]).items()
        # Compare the exact type, because isinstance would also accept a bool as an int.
        if type(value) is int and value > 1 and value % parts == 0 and not attribute.startswith("_")
    ]
    attributes.sort(key=lambda item: "head" not in item[1])
    for count in range(4):
        yield from itertools.combinations(attributes, count)


def _around(group: Group) -> list[str]:
    """Return the names of modules around the group's layers, from the inside out."""
    members = [name.split(".")[:-1] for name in (*group.columns, group.row)]
    common = 0
    while all(len(path) > common for path in members) and len({path[common] for path in members}) == 1:
        common += 1
    names = [".".join(path[:length]) for path in members for length in range(len(path), common - 1, -1)]
    return list(dict.fromkeys(names))


def _kind(modules: Mapping[str, nn.Module], group: Group) -> Hashable:
    around = _around(group)
    shapes = [tuple(modules[name].get_parameter("weight").shape) for name in (*group.columns, group.row)]
    return (
        tuple(type(modules[name]) for name in around),
        tuple(name.rpartition(".")[2] for name in group.columns),
        *shapes,
    )


def _indivisible(modules: Mapping[str, nn.Module], group: Group, parts: int) -> str:
    for name in group.columns:
        if outputs(modules[name]) % parts:
            return f"{name!r} has {outputs(modules[name])} outputs, which {parts} does not divide"
    if inputs(modules[group.row]) % parts:
        return f"{group.row!r} has {inputs(modules[group.row])} inputs, which {parts} does not divide"
    return ""


def _pieces(modules: Mapping[str, nn.Module], group: Group, parts: int) -> int:
    """Guess how many pieces, such as q, k and v, the outputs of `columns` have."""
    (size, *others), of_row = {outputs(modules[name]) for name in group.columns}, inputs(modules[group.row])
    return 1 if others or size % of_row or of_row % parts else size // of_row


def _random(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return normal(shape, "tensor " + name).to(like.device, like.dtype)


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    # Allow only rounding errors: 50 times the eps of the dtype, relative to the largest number.
    return within(x, y, 50 * torch.finfo(x.dtype).eps * scale_of(y))


def _tensors(output: object) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors_in(output)]
