"""Batch normalization over the batches of all ranks, for Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.ops import Sum
from paceline.compat.horovod.tensorflow.allreduce import allreduce

_Base: Any = tf.keras.layers.BatchNormalization
_IS_LEGACY = _Base.__module__.startswith("tf_keras")


class SyncBatchNormalization(_Base):  # type: ignore[misc]
    """Batch normalization that uses all ranks' batches while training.

    The ranks' batches may have different sizes, but every rank has to take part in every training step. In inference,
    and with one rank, the layer works like Keras's BatchNormalization. `fused` must be False.

    Raises:
        ValueError: `fused` is True.
    """

    def __init__(self, fused: bool = False, **kwargs: object) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True: leave it out.")
        if kwargs.pop("renorm", False):
            raise ValueError("SyncBatchNormalization does not support renorm=True.")
        if _IS_LEGACY:
            kwargs["fused"] = False
        kwargs.setdefault("name", None)
        super().__init__(**kwargs)

    def _moments(self, inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        if basics.size() == 1:
            mean, variance = super()._moments(inputs, *args, **kwargs)
            return mean, variance
        if _IS_LEGACY:
            return self._legacy_moments(inputs, *args, **kwargs)
        return self._moments_of_all(inputs, self._reduction_axes, *args, keepdims=False, **kwargs)

    def _legacy_moments(
        self, inputs: tf.Tensor, reduction_axes: list[int], keep_dims: bool, mask: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return self._moments_of_all(inputs, reduction_axes, mask, keepdims=keep_dims)

    def _moments_of_all(
        self, inputs: tf.Tensor, axes: list[int], mask: tf.Tensor | None = None, *, keepdims: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        # Compute the mean first, then the squared distances from it: sums of squares lose precision for a large mean.
        kind = inputs.dtype
        wide = tf.cast(inputs, tf.float64 if kind == tf.float64 else tf.float32)
        weights = tf.ones_like(wide) if mask is None else _spread(mask, wide)
        sums, counts = _both(
            tf.reduce_sum(wide * weights, axes, keepdims=True), tf.reduce_sum(weights, axes, keepdims=True)
        )
        mean = tf.math.divide_no_nan(sums, counts)
        squares = tf.reduce_sum(tf.math.square(wide - mean) * weights, axes, keepdims=True)
        variance = tf.math.divide_no_nan(allreduce(squares, op=Sum), counts)
        if not keepdims:
            mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
        return tf.cast(mean, kind), tf.cast(variance, kind)


def _both(sums: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum two tensors of the same shape over the ranks in one message."""
    # Counts have no gradient. Without stop_gradient, the backward pass would reduce a gradient for the counts, too.
    summed = allreduce(tf.stack([sums, tf.stop_gradient(counts)]), op=Sum)
    return summed[0], tf.stop_gradient(summed[1])


def _spread(mask: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    weights = tf.cast(mask, like.dtype)
    while weights.shape.rank < like.shape.rank:
        weights = weights[..., tf.newaxis]
    return tf.broadcast_to(weights, tf.shape(like))
