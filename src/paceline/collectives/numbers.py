"""Arithmetic for which MPI has no type: half precision, scale factors, averages of integers.

Half-precision arrays are summed in float32. NumPy lacks bfloat16, so arrays of uint16 hold the bits of such values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy

# These type aliases are strings, because importing NumPy here would take time.
Array: TypeAlias = "numpy.ndarray[Any, Any]"
DType: TypeAlias = "numpy.dtype[Any]"

BFLOAT16 = "bfloat16"
_HALVES = ("float16", BFLOAT16)
_UFUNCS = {"sum": "add", "min": "minimum", "max": "maximum", "product": "multiply"}


def is_half(dtype: str) -> bool:
    """Return whether arrays of this type are summed in float32."""
    return dtype in _HALVES


def sum_type(dtype: str) -> str:
    """Return the dtype in which to sum arrays of this dtype."""
    return "float32" if is_half(dtype) else dtype


def operation(op: str, dtype: str) -> str:
    """Return the operation that combines the ranks' arrays, such as "sum" for "average"."""
    # The average of bools is truncated to an integer, so it is true only if all bools are true.
    if op == "average":
        return "min" if dtype == "bool" else "sum"
    return op


def divisor(op: str, dtype: str, size: int) -> int:
    """Return the number by which to divide the sum of `size` ranks' arrays."""
    return size if op == "average" and dtype != "bool" else 1


def summand(array: Array, dtype: str, factor: float) -> Array:
    """Return a flat copy of the array times `factor`, in the dtype for sums."""
    import numpy

    made: Array = numpy.empty(array.size, sum_type(dtype))
    to_float32(array, made, dtype)
    scale(made, factor)
    return made


def to_float32(source: Array, target: Array, dtype: str) -> None:
    """Copy an array into a float32 array."""
    import numpy

    if dtype == BFLOAT16:
        # A bfloat16 number consists of the upper 16 bits of the equal float32 number.
        bits = target.view(numpy.uint32)
        bits[...] = source
        bits <<= 16
    else:
        target[...] = source


def from_float32(source: Array, target: Array, dtype: str) -> None:
    """Copy a float32 array into a half-precision array."""
    import numpy

    # Round to the nearest number, and in a tie to an even last bit. This function may overwrite `source`.
    if dtype == BFLOAT16:
        nan = numpy.isnan(source)
        bits = source.view(numpy.uint32)
        # To round to the nearest number (ties to even), add 0x7FFF, or 0x8000 if the lowest remaining bit is 1.
        odd = bits >> 16
        odd &= 1
        odd += 0x7FFF
        bits += odd
        bits >>= 16
        target[...] = bits
        # Rounding may have turned a NaN into an infinity or a zero, so restore each NaN.
        if nan.any():
            target[nan] = 0x7FC0
    else:
        with numpy.errstate(over="ignore"):
            target[...] = source


def ufunc(op: str, dtype: DType) -> numpy.ufunc:
    """Return the NumPy function that computes `op` on two arrays of this type."""
    import numpy

    if dtype.kind == "b":
        # The sum of bools is true if any of them is true, and the product if all are true.
        return numpy.logical_or if op in ("sum", "max") else numpy.logical_and
    function: numpy.ufunc = getattr(numpy, _UFUNCS[op])
    return function


def joined(join: numpy.ufunc, arrays: Sequence[Array], out: Array) -> Array:
    """Combine two or more arrays into `out` by a NumPy function."""
    # All arrays have equal dtypes and sizes. `out` may be one of the first two arrays, which are read before the write.
    join(arrays[0], arrays[1], out=out)
    for array in arrays[2:]:
        join(out, array, out=out)
    return out


def scale(array: Array, factor: float, divisor: int = 1) -> None:
    """Multiply an array in place by factor / divisor."""
    if factor == 1.0 and divisor == 1:
        return
    import numpy

    if array.dtype.kind in "fc":
        with numpy.errstate(all="ignore"):
            numpy.multiply(array, array.dtype.type(factor / divisor), out=array)
    elif factor == 1.0 and array.dtype.kind in "iu":
        # Compute this without floats, which makes it exact for every integer. // alone would round towards minus infinity.
        whole = array.dtype.type(divisor)
        array[...] = (array - numpy.fmod(array, whole)) // whole
    else:
        array[...] = numpy.trunc(array.astype(numpy.float64) * factor / divisor).astype(array.dtype)
