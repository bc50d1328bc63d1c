"""Groups of linear layers that can be cut together, found in the graph of a forward pass.

    x -> q, k, v -> attention -> o -> y          columns (q, k, v), row o
    x -> gate, up -> silu(gate) * up -> down     columns (gate, up), row down

The input of the layer `row` depends on the outputs of the layers `columns`, and on no other parameter. Autograd's graph of one
pass shows this, whatever Python code connects the layers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from paceline.parallel.deterministic_rng import Steady
from paceline.parallel.pytree import tensors_in
from paceline.parallel.recompute import checkpoints_opened
from paceline.parallel.replicas import normalization
from paceline.parallel.tensor.layers import linear_kind
from paceline.parallel.tracing.fake_model import attributes_kept, untouched


@dataclass(frozen=True, kw_only=True)
class Group:
    """Linear layers to cut together: `columns` by their outputs, `row` by its inputs.

    `pieces` is the number of pieces in the output of each of the `columns`, such as 3 for joined q, k and v. Each worker has a
    part of each piece.
    """

    columns: tuple[str, ...]
    row: str
    pieces: int = 1


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Facts about a model, found in one forward pass.

    Attributes:
        calls: Module's name -> the number of its calls, in the order of first calls.
        groups: The groups in the order in which they run. A layer is in at most one group.
        direct: Parameters that are used without a call of their module, as in F.linear(x, self.embedding.weight).
        changed: Layers whose output is changed in place by later code.
    """

    calls: Mapping[str, int]
    groups: tuple[Group, ...]
    direct: frozenset[str]
    changed: frozenset[str]


def observe(model: nn.Module, run: Callable[[], object]) -> Seen:
    """Run the model by `run`, and return facts about its layers.

    The model is left unchanged.
    """
    record = _Record()
    names = {id(module): name for name, module in model.named_modules()}
    handles = []
    for module in model.modules():
        if is_plain(module):
            handles.append(module.register_forward_hook(lambda m, a, out: record.add(names[id(m)], m, a, out)))
    try:
        with undisturbed(model), torch.enable_grad(), checkpoints_opened():
            for param in model.parameters():
                # Let even frozen parameters have gradients, so that the autograd graph shows which operations use them.
                param.requires_grad_(param.is_floating_point())
            output = run()
            roots = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
            edges = Counter(id(node.variable) for node in _reached(roots) if hasattr(node, "variable"))
            direct = _direct(model, record, edges)
            groups = tuple(_groups(record, direct))
    finally:
        for handle in handles:
            handle.remove()
    # Each recorded output is a new copy with version 0. A higher version shows that later code has changed the output in place.
    changed = frozenset(name for name, output in record.outputs if output._version > 0)
    return Seen(calls=dict(record.calls), groups=groups, direct=direct, changed=changed)


def is_plain(module: nn.Module) -> bool:
    """Return whether the module is torch's own linear layer or embedding class."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else linear_kind(module)
    if kind is None or type(module).forward is not kind.forward or "forward" in module.__dict__:
        return False
    own = {name for name, param in module._parameters.items() if param is not None}
    return own <= {"weight", "bias"} and "weight" in own and not module._modules and type(module.weight) is nn.Parameter


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within the block, allow calls of the model without lasting side effects.

    The model stays in its mode (training or evaluation), because its outputs may depend on the mode.
    """
    wanted = [(param, param.requires_grad) for param in model.parameters()]
    try:
        with untouched(model), attributes_kept(model), normalization.alone(model), Steady():  # type: ignore[no-untyped-call]
            yield
    finally:
        for param, flag in wanted:
            param.requires_grad_(flag)


@dataclass
class _Record:
    """A record of the calls of layers in one forward pass.

    Attributes:
        calls: Layer's name -> the number of its calls.
        made: Node of autograd's graph -> the layer that has computed it.
        rows: (layer, node of the layer's input) for each call.
        outputs: (layer, the layer's output) for each call.
    """

    calls: dict[str, int] = field(default_factory=dict)
    made: dict[Node, str] = field(default_factory=dict)
    rows: list[tuple[str, Node]] = field(default_factory=list)
    linears: set[str] = field(default_factory=set)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)

    def add(self, name: str, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        """Record a layer's call. Return a copy of the output to pass on."""
        self.calls[name] = self.calls.get(name, 0) + 1
        if not isinstance(output, Tensor) or output.grad_fn is None:
            return output
        # Return a copy: an in-place nn.ReLU after the layer would replace the output's `grad_fn`, which identifies the layer.
        output = output.clone()
        self.outputs.append((name, output))
        assert output.grad_fn is not None
        self.made[output.grad_fn] = name
        if linear_kind(module) is not None:
            self.linears.add(name)
            if len(args) == 1 and isinstance(args[0], Tensor) and args[0].grad_fn is not None:
                self.rows.append((name, args[0].grad_fn))
        return output


def _groups(record: _Record, direct: frozenset[str]) -> Iterator[Group]:
    taken: set[str] = set()
    for row, node in record.rows:
        columns = _sources(node, record.made)
        members = {*columns, row}
        usable = (
            columns
            and members <= record.linears
            and not members & taken
            and row not in columns
            and all(record.calls[name] == 1 for name in members)
            and not any(f"{name}.{part}" in direct for name in members for part in ("weight", "bias"))
        )
        if usable:
            taken |= members
            yield Group(columns=tuple(name for name in record.calls if name in columns), row=row)


def _sources(node: Node, made: Mapping[Node, str]) -> set[str]:
    """Return the layers (in `made`) that feed an autograd node; none if a parameter does too."""
    if node in made:
        return {made[node]}
    layers: set[str] = set()
    for other in _reached([node], made):
        if other in made:
            layers.add(made[other])
        elif hasattr(other, "variable"):
            # Return no layers: the graph also uses a parameter (a node with `variable`) outside of the layers.
            return set()
    return layers


def _reached(roots: Iterable[Node], ends: Container[Node] = ()) -> Iterator[Node]:
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        for following in filter(None, (node for node, _ in waiting.pop().next_functions)):
            yield following
            if following not in seen and following not in ends:
                seen.add(following)
                waiting.append(following)


def _direct(model: nn.Module, record: _Record, edges: Mapping[int, int]) -> frozenset[str]:
    expected: dict[int, int] = {}
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and is_plain(module):
                expected[id(param)] = expected.get(id(param), 0) + record.calls.get(prefix, 0)
                names.setdefault(id(param), []).append(f"{prefix}.{name}" if prefix else name)
    return frozenset(name for key, uses in expected.items() if edges.get(key, 0) > uses for name in names[key])
