"""DistributedOptimizer: average gradients over the ranks while the backward pass computes them.

backward:  a gradient is complete -> its hook submits it, and the backward pass continues
step:      wait for all gradients, then take the wrapped optimizer's own step
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.ops import Adasum, Average, resolve_op
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    check_adasum,
    checked_members,
    global_process_set,
    registered_ranks,
)
from paceline.compat.horovod.common.reduction import Compressor, check_groups, chosen_groups, in_parts
from paceline.compat.horovod.torch.compression import Compression
from paceline.compat.horovod.torch.functions import broadcast_object
from paceline.compat.horovod.torch.gradient_optimizer import (
    AdasumOptimizer,
    GradientOptimizer,
    GradientReduction,
    check_passes,
)

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
#: Scripts use this name in type hints.
_DistributedOptimizer = GradientOptimizer


def DistributedOptimizer(  # noqa: N802
    optimizer: O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> O:
    """Return the optimizer as an instance of a class that reduces gradients.

    The new optimizer shares parameter groups and state with `optimizer`. If `optimizer` is distributed already, the
    result has the new settings.

    Args:
        optimizer: Any torch optimizer.
        named_parameters: `model.named_parameters()`. Ranks match gradients by these names; None: by positions.
        compression: hvd.Compression.none or hvd.Compression.fp16.
        backward_passes_per_step: Sum (not average) the gradients of this many backward passes before the reduction.
        op: hvd.Average, hvd.Sum or hvd.Adasum.
        gradient_predivide_factor: Divides gradients before the sum, so that float16 does not overflow. Multiplies the
            average, so that the result stays the same.
        num_groups: Old name of `groups`.
        groups: Number of groups of parameters, or lists of parameters, each reduced as one operation.
        sparse_as_dense: Make sparse gradients dense for the reduction, and sparse for the step.
        process_set: The ranks that reduce their gradients. Other ranks take steps with their own gradients.

    Raises:
        ValueError: The arguments contradict each other, or do not name all parameters.
        NotImplementedError: Adasum over a process set, or over a number of ranks that is not a power of 2.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"optimizer={_shown(optimizer)} is not an optimizer of torch. Give an instance, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())."
        )
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression={_shown(compression)}: give hvd.Compression.none or hvd.Compression.fp16.")
    op = resolve_op(op, None)
    reduction = GradientReduction(
        compression=compression,
        op=op,
        gradient_predivide_factor=float(gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    check_passes(backward_passes_per_step)
    groups = chosen_groups(groups, num_groups)

    names = parameter_names(optimizer, named_parameters)
    base: type[GradientOptimizer] = GradientOptimizer
    # Combine steps only if there are several ranks. One rank keeps the plain class, which steps like the wrapped optimizer.
    if op == Adasum and basics.size() > 1:
        check_adasum(process_set)
        base = AdasumOptimizer
    is_member = basics.rank() in registered_ranks(process_set)
    wrapped = next(cls for cls in type(optimizer).__mro__ if not issubclass(cls, GradientOptimizer))
    # Keep the class's name, which schedulers and checkpoints read. Only `__module__` shows that the optimizer is wrapped.
    cls: Any = type(wrapped.__name__, (base, wrapped), {"__module__": __name__})
    # Skip `__init__`, which would create new parameter groups and a new state.
    made = cls.__new__(cls)
    # Drop a `step` that a scheduler has set on the wrapped optimizer, because it would bypass this class.
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")})
    made._begin(
        reduction=reduction,
        names=names,
        # Forming groups is a collective of the process set, so ranks outside of the set must not take part.
        groups=in_groups(names, groups, process_set) if op != Adasum and is_member else [],
        passes=backward_passes_per_step,
        # With HOROVOD_ELASTIC=1, a world of one rank may grow, so even a single rank needs hooks.
        hooked=is_member and (basics.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"),
    )
    return cast(O, made)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} object"


def parameter_names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the parameters' names in the order of the parameter groups.

    Raises:
        ValueError: `named` has no pairs, has a duplicate name, or lacks a parameter.
    """
    params = [
        (group, index, p)
        for group, members in enumerate(optimizer.param_groups)
        for index, p in enumerate(members["params"])
    ]
    pairs = list(named or [])
    if not pairs:
        return {p: f"allreduce.noname.{group}.{index}" for group, index, p in params}
    if any(not isinstance(item, tuple) or len(item) != 2 for item in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    known = {p: name for name, p in pairs}
    missing = [f"{index} of group {group}" for group, index, p in params if p not in known]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: number "
            f"{', '.join(missing)}. Python object ids differ between ranks, so each of them needs a name."
        )
    return {p: known[p] for _, _, p in params}


def in_groups(
    names: dict[torch.Tensor, str], groups: int | Sequence[Sequence[torch.Tensor]] | None, process_set: ProcessSet
) -> list[tuple[str, list[torch.Tensor]]]:
    """Return (name, parameters) of each group that is reduced as one operation.

    `groups` is the number of groups to make of all parameters in the first rank's order. It may also be lists of
    parameters; parameters of other optimizers in these lists are ignored.

    Raises:
        ValueError: The number is negative, `groups` has another type, or a parameter appears twice.
    """
    trained = {p: name for p, name in names.items() if p.requires_grad}
    if groups is None or groups == 0:
        return []
    check_groups(groups, "parameters")
    if isinstance(groups, int):
        by_name = {name: p for p, name in trained.items()}
        # Use the first rank's order, because members of a group are matched by their position in it.
        order = broadcast_object(list(by_name), checked_members(process_set)[0], process_set=process_set)
        lists = [[by_name[name] for name in part] for part in in_parts(order, groups)]
    else:
        lists = [list(members) for members in groups]
    seen: set[int] = set()
    for members in lists:
        for p in members:
            if not isinstance(p, torch.Tensor):
                raise ValueError(f"groups names {p!r}, which is not a parameter. Give lists of the model's parameters.")
            if id(p) in seen:
                known = names.get(p, "of another optimizer")
                raise ValueError(f"groups names the parameter {known!r} twice; each belongs to one group at most.")
            seen.add(id(p))
    # Leave frozen parameters out: their group would wait for a gradient that never comes.
    kept = ([p for p in members if p in trained] for members in lists)
    return [(f"group.{names[members[0]]}", members) for members in kept if members]
