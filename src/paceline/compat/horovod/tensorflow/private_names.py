"""Private names of Horovod that libraries built on Horovod import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from paceline.compat.horovod.common.ops import Sum
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.reduction import Compressor
from paceline.compat.horovod.tensorflow.allreduce import allreduce, grouped_allreduce
from paceline.compat.horovod.tensorflow.arrays import Gradient
from paceline.compat.horovod.tensorflow.names import by_place, normalised
from paceline.compat.horovod.tensorflow.reduction import Reduction, reduce_gradients

_normalize_name = normalised


def _allreduce(
    tensor: tf.Tensor,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Call `allreduce` for a dense tensor, by default as a sum."""
    return allreduce(
        tensor,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )


def _grouped_allreduce(
    tensors: Sequence[tf.Tensor],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Call `grouped_allreduce` for dense tensors, by default as a sum."""
    return list(
        grouped_allreduce(
            tensors,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
            name=name,
        )
    )


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: type[Compressor],
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    groups: int | Sequence[Sequence[tf.Variable]] | None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Gradient]]:
    """Return a function `(grads, vars=None, use_generic_names=False)` that returns the reduced gradients."""
    # Without `vars`, or with `use_generic_names`, the ranks match gradients by position. The parameters device_dense and
    # device_sparse have no effect.
    how = Reduction(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=float(gradient_predivide_factor),
        groups=groups,
        process_set=process_set,
        prefix=f"{name}_Allreduce",
    )

    def reduced(
        grads: Iterable[Gradient], vars: Iterable[tf.Variable] | None = None, use_generic_names: bool = False
    ) -> list[Gradient]:
        listed = list(grads)
        named = by_place(len(listed)) if vars is None or use_generic_names else list(vars)
        with tf.name_scope(f"{name}_Allreduce"):
            return list(reduce_gradients(listed, named, how))

    return reduced
