"""How far two tensors lie apart, in few passes over their memory: gradients are as large as the model. Imports torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scale_of(x: Tensor) -> float:
    """The largest magnitude of the tensor's finite numbers; 0.0 if there are none. Of complex ones, of their parts."""
    if not x.numel():
        return 0.0
    x = _real(x)
    low, high = (float(bound) for bound in torch.aminmax(x.detach()))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def within(x: Tensor, y: Tensor, allowed: float) -> bool:
    """True if no number differs by more, a nan being equal to a nan, and an infinite one to itself alone.

    Of complex numbers both parts are compared.
    """
    x, y = _real(x), _real(y)
    # torch.allclose, and abs().max() too, take more than ten times as long as aminmax.
    if not x.numel():
        return True
    low, high = torch.aminmax((x - y).detach())
    # A nan is at most nothing.
    if float(high) <= allowed and -float(low) <= allowed:
        return True
    return torch.allclose(x, y, rtol=0.0, atol=allowed, equal_nan=True)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x
