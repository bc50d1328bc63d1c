"""Conversions between TensorFlow's tensors and the engine's arrays, without a copy where possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from paceline.collectives.numbers import Array, DType
from paceline.compat.horovod.common.handles import plain

#: A variable's gradient, or None if there is no gradient.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"

#: TensorFlow can use memory without a copy only if its address is a multiple of this number of bytes.
_ALIGNMENT_BYTES = 64
#: Copy an array of fewer bytes, because sharing its memory with TensorFlow would take longer.
_SHARED_BYTES = 1 << 15


def host(tensor: tf.Tensor) -> Array:
    """Return an eager tensor as a NumPy array, sharing memory if possible."""
    view = getattr(tensor, "_numpy_internal", tensor.numpy)
    return checked(np.asarray(view()))


def checked(array: Array) -> Array:
    """Return the array. Raise ValueError for strings and objects, which can't be sent."""
    if array.dtype.kind in "OSU":
        raise ValueError("tensors of strings can't be sent; use hvd.broadcast_object or hvd.allgather_object.")
    return array


def told_dtype(array: Array) -> str | None:
    """Return "bfloat16" for a bfloat16 array, None for NumPy's types; refuse other types."""
    if array.dtype.isbuiltin == 1:
        return None
    if array.dtype.name != "bfloat16":
        raise ValueError(f"tensors of type {array.dtype.name} can't be reduced; cast them to bfloat16 or float32.")
    return "bfloat16"


def empty(shape: Sequence[int], dtype: DType) -> Array:
    """Return a new array, aligned so that tensors can share its memory."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    # NumPy does not guarantee this alignment, so allocate more bytes, and choose an aligned part.
    raw = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    # -address % 64 is the number of bytes up to the next multiple of 64.
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    made: Array = raw[start : start + size].view(kind).reshape(shape)
    return made


def tensor_of(array: Array) -> tf.Tensor:
    """Return a tensor, in the array's memory if aligned. Don't change the array afterwards."""
    bits = plain(array)
    if bits.nbytes < _SHARED_BYTES or bits.__array_interface__["data"][0] % _ALIGNMENT_BYTES or bits.dtype.kind == "b":
        return tf.convert_to_tensor(array)
    shared = tf.experimental.dlpack.from_dlpack(bits.__dlpack__())
    return shared if bits is array else tf.bitcast(shared, tf.as_dtype(array.dtype))
