"""Tensors put together from their parts."""

from __future__ import annotations

import logging
from typing import Any

#: It tells of two messages where one might do, in lines that nobody who trains can do anything about.
_TORCHS = logging.getLogger("torch.distributed.tensor._redistribute")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def is_part(tensor: Any) -> bool:
    """Say if it is in parts (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """The whole of a tensor that is in parts (a DTensor), on all ranks that hold them; anything else as it is."""
    if not is_part(tensor):
        return tensor
    # A filter, not a level: to set one makes Python go through all loggers, of which torch has a thousand.
    _TORCHS.addFilter(_is_error)
    try:
        return tensor.full_tensor()
    finally:
        _TORCHS.removeFilter(_is_error)


def cut_as(whole: Any, part: Any) -> Any:
    """This rank's part of a tensor that is in parts as `whole` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def axes_of(tensor: Any) -> set[str]:
    """The axes of the mesh along which it is in parts."""
    split: set[str] = set()
    placements: Any = getattr(tensor, "placements", None)
    if placements is not None:
        names = tensor.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(names, placements, strict=True):
            assert not placement.is_partial(), "it has to be summed first"
            # A tensor that is cut along two axes of the mesh has a placement (`_StridedShard`) which says no to
            # `is_shard()`.
            if not placement.is_replicate():
                split.add(axis)
    return split
