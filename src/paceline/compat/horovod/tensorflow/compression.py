"""Compression of TensorFlow's tensors while they are sent."""

from __future__ import annotations

import tensorflow as tf

from paceline.compat.horovod.common.reduction import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Compression of floating-point tensors to float16. Other tensors stay unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        return tf.cast(tensor, ctx) if ctx is not None and ctx.is_floating else tensor


class Compression:
    """The choices for the argument `compression=`: none, or float16."""

    none = NoneCompressor
    fp16 = FP16Compressor
