"""DTensors (tensors split over ranks), and the whole tensors that they are parts of."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

#: torch's logger for changes of a DTensor's placement. It warns about extra messages, which Paceline's users can't avoid.
_TORCHS = logging.getLogger("torch.distributed.tensor._redistribute")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def is_part(tensor: object) -> TypeGuard[DTensor]:
    """Return whether the tensor is a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Gather a DTensor. Return any other tensor unchanged."""
    if not is_part(tensor):
        return tensor
    # Add a filter instead of setting a level: a new level would clear the caches of all loggers, of which torch has a thousand.
    _TORCHS.addFilter(_is_error)
    try:
        return tensor.full_tensor()
    finally:
        _TORCHS.removeFilter(_is_error)


def cut_as(whole: DTensor, part: Tensor) -> DTensor:
    """Wrap this rank's `part` as a DTensor with the layout of `whole`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def axes_of(tensor: Tensor) -> set[str]:
    """Return the mesh's axes along which a tensor is split."""
    if not is_part(tensor):
        return set()
    assert not any(placement.is_partial() for placement in tensor.placements), "it has to be summed first"
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    # Don't use `is_shard()`, which is False for `_StridedShard`, the placement of a tensor split along two axes.
    return {axis for axis, placement in axes if not placement.is_replicate()}
