"""Expert parallelism: the experts of each mixture-of-experts layer are spread over the workers.

All workers of an expert group have the same rows. Each computes its own experts for these rows, and one all-reduce sums the
outputs of all experts. An all-reduce in the backward pass sums the gradients of the layer's inputs.

    kind      experts                                        each worker has
    a list    an nn.ModuleList named `experts`               some of its modules, and placeholders that return 0
    fused     parameters [experts, ...] in one module of     its part of each parameter (DTensor), and calls the module
              transformers: (hidden, top_k_index, weights)   with only the indices of its own experts
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.parallel.class_swap import SharedByCopies, apply_function, give_forward
from paceline.parallel.errors import ParallelError
from paceline.parallel.mesh import World
from paceline.parallel.pytree import map_tensors, tensors_in
from paceline.torch_private import keep_own_parts

_T = TypeVar("_T")

#: Attribute of a transformers module. If it is True, the module returns zeros for indices of experts that it does not have.
TOLD = "_is_expert_parallel"

#: LIST: the attribute with the experts in a mixture's module. FUSED: the first parameters of forward in transformers' experts.
LIST = "experts"
FUSED = ("hidden_states", "top_k_index", "top_k_weights")


def apply(model: nn.Module, world: World) -> tuple[list[str], list[nn.Parameter]]:
    """Keep only this rank's experts. Return notes, and parameters with partial gradients.

    The notes are lines for `explain`. The parameters, such as a router's, need the sum of all workers' gradients.

    Raises:
        ParallelError: The model has no experts, or their number is not divisible by the number of workers.
    """
    lines: list[str] = []
    summed: list[nn.Parameter] = []
    for name, module in list(model.named_modules()):
        if isinstance(module, Spread):
            raise ParallelError(
                f"ExpertParallel(): the experts of {name or 'the model'} are spread already. Give parallelize a model that it "
                "was not given before."
            )
        listed = list_of(module)
        if is_fused(module):
            count = len(next(module.parameters()))
            _check(name, count, world)
            _spread_fused(module, world)
        elif listed is not None:
            count = len(listed)
            _check(f"{name}.{LIST}".lstrip("."), count, world)
            summed += _spread_list(module, listed, world)
        else:
            continue
        lines.append(f"{name or 'the model'}: {count // world.layout.expert} of its {count} experts on each worker")
    if not lines:
        raise ParallelError(
            f"ExpertParallel({world.layout.expert}) finds no experts in {type(model).__name__}: neither an nn.ModuleList named "
            f"{LIST!r} nor experts of transformers (a module called with {', '.join(FUSED)}). Name the list so, or use another "
            "strategy."
        )
    return lines, summed


def _check(name: str, count: int, world: World) -> None:
    if count % world.layout.expert:
        raise ParallelError(
            f"ExpertParallel({world.layout.expert}): {name} has {count} experts, which {world.layout.expert} workers do not "
            "divide."
        )


def _spread_list(mixture: nn.Module, experts: nn.ModuleList, world: World) -> list[nn.Parameter]:
    own = len(experts) // world.layout.expert
    first = world.coordinate("expert") * own
    for index in range(len(experts)):
        if not first <= index < first + own:
            experts[index] = Elsewhere()
    group = world.group("expert")
    give_forward(mixture, Spread, _summed)
    mixture.__dict__["_paceline_group"] = _Held(group)
    among = {id(param) for param in experts.parameters()}
    return [param for param in mixture.parameters() if id(param) not in among]


class Elsewhere(nn.Module):
    """A placeholder for an expert of another worker, which returns 0."""

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        return torch.zeros_like(hidden)


def _spread_fused(experts: nn.Module, world: World) -> None:
    mesh = world.axes("expert")
    for name, param in list(experts._parameters.items()):
        assert param is not None
        value = distribute_tensor(param, mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(value, requires_grad=param.requires_grad))
        count = param.shape[0]
    keep_own_parts(experts)
    own = count // mesh.size()
    for name, number in list(vars(experts).items()):
        if type(number) is int and number == count and "expert" in name:
            setattr(experts, name, own)
    give_forward(experts, Spread, _of_indices)
    if hasattr(experts, TOLD):
        setattr(experts, TOLD, True)
    experts.__dict__["_paceline_group"] = _Held(world.group("expert"), own * world.coordinate("expert"), own)


class _Held(SharedByCopies):
    """The range of experts that this rank computes, and the group that sums all outputs."""

    def __init__(self, group: dist.ProcessGroup | None, first: int = 0, own: int = 0) -> None:
        self.group, self.first, self.own = group, first, own


def _summed(kind: type[nn.Module], self: nn.Module, /, *args: object, **kwargs: object) -> object:
    group: dist.ProcessGroup | None = vars(self)["_paceline_group"].group
    (args, kwargs), copied = _copied((args, kwargs), group)
    with _same_numbers_after(self.training):
        output = kind.forward(self, *args, **kwargs)
    first = next(iter(tensors_in(output)), None)

    def together(tensor: Tensor) -> Tensor:
        if tensor is first:
            return _sum(tensor, copied, group)
        # Each worker computes outputs such as a router's in full. Scale their gradients, because the workers sum gradients.
        count = dist.get_world_size(group)
        shared: Tensor = apply_function(_Shared, tensor, count) if tensor.requires_grad else tensor
        return shared

    return map_tensors(output, together)


def _of_indices(
    kind: type[nn.Module], self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    held: _Held = vars(self)["_paceline_group"]
    (hidden, weights), copied = _copied((hidden_states, top_k_weights), held.group)
    is_own = (top_k_index >= held.first) & (top_k_index < held.first + held.own)
    # Give rows of other workers' experts the index after the last local expert if the module's kernels support this (`TOLD`).
    # Other kernels might read out of bounds, which kills the process on a GPU. So for these kernels use index 0 and weight 0.
    index = torch.where(is_own, top_k_index - held.first, held.own if hasattr(self, TOLD) else 0)
    weights = torch.where(is_own, weights, torch.zeros_like(weights))
    with _local(self), _same_numbers_after(self.training):
        output = kind.forward(self, hidden, index, weights)
    return _sum(output, copied, held.group)


@contextlib.contextmanager
def _local(module: nn.Module) -> Iterator[None]:
    held: dict[str, Any] = module._parameters
    before = dict(held)
    try:
        for name, param in before.items():
            held[name] = param.to_local()
        yield
    finally:
        held.update(before)


@contextlib.contextmanager
def _same_numbers_after(training: bool) -> Iterator[None]:
    seed = int(torch.randint(2**62, ())) if training else None
    try:
        yield
    finally:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available():
                torch.cuda.manual_seed(seed)


def _copied(arguments: _T, group: dist.ProcessGroup | None) -> tuple[_T, tuple[Tensor, ...]]:
    learning = [tensor for tensor in tensors_in(arguments) if tensor.requires_grad]
    if not learning or not torch.is_grad_enabled():
        return arguments, ()
    copies: tuple[Tensor, ...] = apply_function(_Copy, group, *learning)
    by_id = {id(tensor): copy for tensor, copy in zip(learning, copies, strict=True)}
    return map_tensors(arguments, lambda tensor: by_id.get(id(tensor), tensor)), copies


def _sum(part: Tensor, copied: tuple[Tensor, ...], group: dist.ProcessGroup | None) -> Tensor:
    for tensor in copied:
        # Add the sum (0) of an empty slice of each tensor: a worker without routed rows must join the backward pass's collective.
        part = part + tensor.flatten()[:0].sum().to(part.dtype)
    whole: Tensor = apply_function(_Sum, part, group)
    return whole


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed = [grad.contiguous().clone() for grad in grads]
        for grad in summed:
            dist.all_reduce(grad, group=ctx.group)
        return None, *summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        whole = part.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.count = count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] / ctx.count, None


class Spread:
    """A mixin that marks mixtures of experts whose experts are spread over workers."""


def list_of(mixture: nn.Module) -> nn.ModuleList | None:
    """Return the list of experts (nn.ModuleList) in a mixture of experts, or None."""
    experts = mixture._modules.get(LIST)
    return experts if isinstance(experts, nn.ModuleList) and len(experts) > 1 else None


def is_fused(module: nn.Module) -> bool:
    """Return whether the module holds fused experts of the transformers library.

    The first dimension of its parameters is the number of experts. Its forward takes (hidden, top_k_index, weights).
    """
    own = list(module.parameters(recurse=False))
    if not own or len(own) != len(list(module.parameters())):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)[1:4]
    return names == FUSED and all(param.dim() > 1 for param in own) and len({len(param) for param in own}) == 1


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if is_fused(module):
            yield from module.parameters()
        elif (listed := list_of(module)) is not None:
            yield from listed.parameters()
