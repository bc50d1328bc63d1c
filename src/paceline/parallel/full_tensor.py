"""Tensors put together from their parts."""

from __future__ import annotations

import logging
from typing import Any

#: It tells of two messages where one might do, in lines that nobody who trains can do anything about.
_TORCHS = logging.getLogger("torch.distributed.tensor._redistribute")


def is_part(tensor: Any) -> bool:
    """Say if it is in parts (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """The whole of a tensor that is in parts (a DTensor), on all ranks that hold them; anything else as it is."""
    if not is_part(tensor):
        return tensor
    level = _TORCHS.level
    _TORCHS.setLevel(logging.ERROR)
    try:
        return tensor.full_tensor()
    finally:
        _TORCHS.setLevel(level)
