"""DistributedOptimizer: an optimizer whose gradients are averaged over the ranks while they are being computed.

backward:  a gradient is complete -> its hook submits it; the rest of the backward pass goes on meanwhile
step:      waits for all of them, then the wrapped optimizer's own step
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.arguments import chosen_groups
from paceline.compat.horovod.common.ops import Adasum, Average, resolve_op
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    check_adasum,
    global_process_set,
    registered_ranks,
)
from paceline.compat.horovod.torch.compression import Compression
from paceline.compat.horovod.torch.delta_optimizer import AdasumOptimizer
from paceline.compat.horovod.torch.gradient_optimizer import GradientOptimizer, GradientReduction, check_passes
from paceline.compat.horovod.torch.parameter_names import in_groups, parameter_names

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
#: Scripts name it in type hints.
_DistributedOptimizer = GradientOptimizer


def DistributedOptimizer(  # noqa: N802
    optimizer: O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> O:
    """The optimizer again, as an instance of a subclass of its own class that reduces gradients over the ranks.

    It shares parameter groups and state with the one that was given; one that was wrapped before takes on these settings.

    backward_passes_per_step: gradients of so many backward passes are added up (not averaged) before they are reduced.
    gradient_predivide_factor: averages are divided by this before the sum and by the rest of the size after it.
    groups: so many groups of parameters (or these lists of parameters), each reduced as one; num_groups: its old name.
    sparse_as_dense: sparse gradients are reduced as dense ones, and are sparse again for the step.
    process_set: its ranks reduce among themselves; on any other rank each step is the wrapped optimizer's.

    Raises:
        ValueError: the arguments contradict each other, or name the optimizer's parameters incompletely.
        NotImplementedError: Adasum over a process set, or over a number of ranks that is no power of 2.
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
    base: type[Any] = GradientOptimizer
    # Alone there are no steps to combine, and the plain class does what the wrapped optimizer does.
    if op == Adasum and basics.size() > 1:
        check_adasum(process_set)
        base = AdasumOptimizer
    is_member = basics.rank() in registered_ranks(process_set)
    # One that was wrapped before is wrapped anew, not twice.
    wrapped = next(cls for cls in type(optimizer).__mro__ if not issubclass(cls, GradientOptimizer))
    # Under the name of its own class, which schedulers and checkpoints look at; its module tells a script that it is wrapped.
    cls: Any = type(wrapped.__name__, (base, wrapped), {"__module__": __name__})
    # Without `__init__`, which would make parameter groups and a state of its own.
    made = cls.__new__(cls)
    # A scheduler may have put a `step` of the wrapped one there, which would go round this class.
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")})
    made._begin(
        reduction=reduction,
        names=names,
        # To form groups the members talk to each other, so a rank outside the set must not take part.
        groups=in_groups(names, groups, process_set) if op != Adasum and is_member else [],
        passes=backward_passes_per_step,
        # With HOROVOD_ELASTIC=1 a world of one may grow, and its parameters need their hooks then.
        hooked=is_member and (basics.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"),
    )
    return cast(O, made)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} object"
