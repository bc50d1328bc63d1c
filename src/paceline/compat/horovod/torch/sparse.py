"""allreduce of sparse tensors: their indices and values are gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.ops import Average, Sum
from paceline.compat.horovod.common.process_sets import (
    ProcessSet,
    checked_members,
    global_process_set,
)
from paceline.compat.horovod.torch.gather import allgather_async


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """A function that waits for the sum (or average) of the ranks' sparse tensors and returns it, sparse.

    Indices and values are gathered from all ranks; what stands at the same place is added up where the tensor is
    coalesced.

    Raises:
        NotImplementedError: `op` is neither Average nor Sum. ValueError: the tensor isn't sparse.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            "sparse tensors can be reduced with op=hvd.Average or op=hvd.Sum; convert others with to_dense()."
        )
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async takes a sparse COO tensor, not one of layout {tensor.layout}.")
    own = tensor.detach().coalesce()
    # One row for each entry: allgather joins along the first dimension, in which the ranks may differ.
    indices = allgather_async(own.indices().t(), None if name is None else f"{name}.indices", process_set)
    values = allgather_async(own.values(), None if name is None else f"{name}.values", process_set)

    def result() -> torch.Tensor:
        everywhere, summed = handles.synchronize(indices), handles.synchronize(values)
        if op == Average:
            # Integers are cut toward 0, as those of dense tensors are.
            rounding = None if summed.dtype.is_floating_point or summed.dtype.is_complex else "trunc"
            summed = torch.div(summed, len(checked_members(process_set)), rounding_mode=rounding)
        return torch.sparse_coo_tensor(everywhere.t(), summed, own.shape, check_invariants=False)

    return result
