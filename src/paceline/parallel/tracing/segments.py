"""The parts of a cut model, each a function over the model's modules.

    forward(self, received values..., tensors of the batch..., constants...) -> the next part's inputs, or the output

`self` is the model itself, or a stage made by `stage_module`, which has the part's modules and parameters under the
model's names. So a stage's parameters keep their names, and `.train()` and `.eval()` reach its blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from paceline.parallel.tied_parameters import all_names
from paceline.parallel.tracing.boundaries import Boundaries
from paceline.parallel.tracing.trace import Traced

_Module = TypeVar("_Module", bound=nn.Module)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class Value:
    """The shape and dtype of a tensor that is sent across a cut."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """One part of a cut model, for batches of given shapes.

    Attributes:
        receives, sends: The tensors that the part gets from the previous part, and that it returns for the next part.
        inputs: The indices of the batch's tensors that the part needs.
        uses: Names of the modules, parameters and buffers that the part uses.
    """

    function: Callable[..., object]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    inputs: tuple[int, ...]
    constants: tuple[object, ...]
    uses: tuple[str, ...]
    source: str

    def __call__(self, owner: nn.Module, received: Sequence[Tensor], batch: Sequence[Tensor]) -> object:
        """Run the part with the modules of `owner`, and return its outputs."""
        return self.function(owner, *received, *(batch[index] for index in self.inputs), *self.constants)


def split(boundaries: Boundaries, places: Sequence[int]) -> tuple[Segment, ...]:
    """Cut a traced model into segments before the nodes at the ascending indices `places`."""
    ends = [0, *places, len(boundaries.traced.order)]
    return tuple(_segment(boundaries, first, last) for first, last in pairwise(ends))


def stage_module(model: nn.Module, names: Iterable[str], kind: type[_Module]) -> _Module:
    """Return a module of class `kind` with the model's submodules and tensors `names`."""
    return _filled(kind(), model, [(model, frozenset(names))])


def joined(model: nn.Module, stages: Iterable[tuple[nn.Module, frozenset[str]]]) -> nn.Module:
    """Return one module with the modules and tensors of several stages."""
    return _filled(nn.Module(), model, list(stages))


def _filled(top: _Module, model: nn.Module, held: Sequence[tuple[nn.Module, frozenset[str]]]) -> _Module:
    top.training = model.training
    # Keep the model's order, because all replicas sum gradients in it. Modules come first, because they contain parameters.
    ordered = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in [*ordered, *(name for name, _ in all_names(model))]:
        for source, names in held:
            if name in names and not _has(top, name):
                _put(top, source, name)
    return top


def _segment(boundaries: Boundaries, first: int, last: int) -> Segment:
    traced = boundaries.traced
    is_last = last == len(traced.order)
    receives, sends = boundaries.live(first), () if is_last else boundaries.live(last)
    own = traced.order[first:last]
    needed = _closure([*own, *([traced.output] if is_last else [])], boundaries.recomputed)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: graph.placeholder(f"received_{node.name}") for node in receives}
    inputs = [index for index, node in enumerate(traced.inputs) if node in needed]
    for index in inputs:
        made[traced.inputs[index]] = graph.placeholder(f"input_{index}")
    constants = [
        node for node in traced.order if str(node.target) in traced.constants and (node in needed or node in own)
    ]
    for node in constants:
        made[node] = graph.placeholder(str(node.target))
    for node in receives:
        # Clone a received tensor that this part of the model changes in place: autograd forbids it for leaf tensors.
        if node.meta["requires_grad"] and boundaries.written_after(node, first):
            made[node] = graph.call_method("clone", (made[node],))
    uses: list[str] = []
    outside = {node for node in needed if node.op == "get_attr"}
    _emit(graph, traced, made, set(own) | (needed & boundaries.recomputed) | outside, uses)
    if is_last:
        graph.output(map_arg(traced.output.args[0], lambda node: made[node]))
    else:
        # Return the tensors in the order in which the next stage's `receives` lists them.
        graph.output(tuple(made[node] for node in sends))
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, f"<part of the model from call {first} to {last}>", "exec"), names)
    return Segment(
        function=names["forward"],
        receives=tuple(map(_value, receives)),
        sends=tuple(map(_value, sends)),
        inputs=tuple(inputs),
        constants=tuple(traced.constants[str(node.target)] for node in constants),
        uses=tuple(dict.fromkeys(uses)),
        source=code.src,
    )


def _emit(graph: fx.Graph, traced: Traced, made: dict[fx.Node, fx.Node], wanted: set[fx.Node], uses: list[str]) -> None:
    """Copy the traced nodes `wanted` to `graph`, and keep their no_grad blocks.

    `made` maps traced nodes to copies. `uses` collects the names of modules and parameters.
    """
    before: fx.Node | None = None
    for node in traced.order:
        if node not in wanted or node in made:
            continue
        if node.op != "get_attr" and node.meta["no_grad"] != (before is not None):
            if before is None:
                before = graph.call_function(_stop_gradients)
            else:
                graph.call_function(_restore_gradients, (before,))
                before = None
        if node.op in ("call_module", "get_attr"):
            uses.append(str(node.target))
        args = map_arg(node.args, lambda source: made[source])
        made[node] = graph.create_node(node.op, node.target, args, map_arg(node.kwargs, lambda source: made[source]))
    # If this part of the model ends within a no_grad block, switch gradients on again for later code.
    if before is not None:
        graph.call_function(_restore_gradients, (before,))


def _closure(nodes: Iterable[fx.Node], recomputed: frozenset[fx.Node]) -> set[fx.Node]:
    """Return direct and indirect inputs of `nodes` that each stage has or computes itself."""
    closure: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in closure and (source in recomputed or source.op in ("get_attr", "placeholder")):
                closure.add(source)
                todo.append(source)
    return closure


def _stop_gradients() -> bool:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    return before


def _restore_gradients(before: bool) -> None:
    torch.set_grad_enabled(before)


def _value(node: fx.Node) -> Value:
    meta = node.meta
    return Value(name=node.name, shape=meta["shape"], dtype=meta["dtype"], requires_grad=meta["requires_grad"])


def _has(top: nn.Module, name: str) -> bool:
    try:
        operator.attrgetter(name)(top)
    except AttributeError:
        return False
    return True


def _put(top: nn.Module, model: nn.Module, name: str) -> None:
    owner, source = top, model
    *parents, last = name.split(".")
    for part in parents:
        source = source.get_submodule(part)
        if part not in owner._modules:
            # Copy a list as an nn.ModuleList, in which FullyShard looks for blocks. Copy an nn.Sequential as an nn.ModuleList
            # too: the stage calls only its entries, and FullyShard would treat the nn.Sequential as a single block.
            is_list = isinstance(source, _LISTS) or isinstance(owner, nn.ModuleList)
            container: nn.Module = nn.ModuleList() if is_list else nn.Module()
            container.training = source.training
            owner.add_module(part, container)
        owner = owner.get_submodule(part)
    if last in source._modules:
        owner._modules[last] = source._modules[last]
    elif last in source._parameters:
        owner.register_parameter(last, source._parameters[last])
    else:
        owner.register_buffer(last, source._buffers[last], persistent=last not in source._non_persistent_buffers_set)
