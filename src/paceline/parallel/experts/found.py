"""Which modules of a model are experts. Loaded on use: it imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

#: The name of a list of experts, and how the forward of transformers' fused ones begins.
LIST = "experts"
FUSED = ("hidden_states", "top_k_index", "top_k_weights")


def list_of(mixture: nn.Module) -> nn.ModuleList | None:
    """The list of experts that this module holds, or None."""
    found = mixture._modules.get(LIST)
    return found if isinstance(found, nn.ModuleList) and len(found) > 1 else None


def is_fused(module: nn.Module) -> bool:
    """Say if all of its parameters have a first dimension of experts, and it is called as transformers' are."""
    own = list(module.parameters(recurse=False))
    if not own or len(own) != len(list(module.parameters())):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)[1:4]
    return names == FUSED and all(param.dim() > 1 for param in own) and len({len(param) for param in own}) == 1


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all experts."""
    for module in model.modules():
        if is_fused(module):
            yield from module.parameters()
        elif (listed := list_of(module)) is not None:
            yield from listed.parameters()
