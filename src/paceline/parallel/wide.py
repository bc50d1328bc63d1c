"""Optimizers that compute a part of a step in a narrower type, made to compute it in float64. Imports torch.

Muon's Newton-Schulz iteration converts each matrix to bfloat16 by itself, of whatever type the parameters are. Where two
layouts are compared in float64, those eight bits would hide a difference, or be taken for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = {torch.bfloat16, torch.float16, torch.float32}
_BY_NAME: Any = (Tensor.bfloat16, Tensor.half, Tensor.float)


class Wide(TorchFunctionMode):
    """While it is active, a float64 tensor that is converted to a narrower type of floating point stays float64.

    The result is a copy, as the conversion's would be: what is changed in place is not the tensor itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64 and _narrows(func, args, kwargs):
            return args[0].clone()
        return func(*args, **kwargs)


def _narrows(func: Any, args: Any, kwargs: Any) -> bool:
    if func in _BY_NAME:
        return True
    return func in (Tensor.to, Tensor.type) and any(
        isinstance(one, torch.dtype) and one in _NARROW for one in (*args[1:], *kwargs.values())
    )
