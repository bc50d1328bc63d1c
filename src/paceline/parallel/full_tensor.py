"""DTensors and the whole tensors they are parts of."""

from __future__ import annotations

import logging
from typing import Any

#: It warns about two messages where one might do, which a user cannot change.
_TORCHS = logging.getLogger("torch.distributed.tensor._redistribute")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def is_part(tensor: object) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """Gather a DTensor on all ranks that hold it. Return any other tensor unchanged."""
    if not is_part(tensor):
        return tensor
    # A filter instead of a level: setting a level makes Python visit all of torch's thousand loggers.
    _TORCHS.addFilter(_is_error)
    try:
        return tensor.full_tensor()
    finally:
        _TORCHS.removeFilter(_is_error)


def cut_as(whole: Any, part: Any) -> Any:
    """Return a DTensor of this rank's `part` with the placements of `whole`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def axes_of(tensor: Any) -> set[str]:
    """Return the axes of the mesh along which a tensor is split."""
    split: set[str] = set()
    placements: Any = getattr(tensor, "placements", None)
    if placements is not None:
        names = tensor.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(names, placements, strict=True):
            assert not placement.is_partial(), "it has to be summed first"
            # A tensor that is cut along two axes has a placement (`_StridedShard`) for which `is_shard()` is False.
            if not placement.is_replicate():
                split.add(axis)
    return split
