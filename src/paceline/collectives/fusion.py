"""Fusion of many small arrays into one reduction, with half precision reduced as float32.

The arrays are copied into one buffer, one after the other. If all ranks can read each other's buffers
(`transport.SharedSegments`), each rank sums all buffers directly into its result arrays. Otherwise the transport
reduces the buffer, and each result is copied out of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.collectives import numbers
from paceline.collectives.numbers import Array, DType
from paceline.collectives.transport import SharedSegments, Transport

#: Size of a shared-memory segment. 1 MiB fits into the processor's cache, so the sum reads each rank's data from the cache.
SEGMENT_BYTES = 1 << 20


class Part(NamedTuple):
    """One array to reduce, `source`, with its output array, `target`.

    Both are flat and contiguous, and may be the same array or share memory.
    """

    source: Array
    target: Array
    prescale: float
    postscale: float
    divisor: int


def is_multiplied(prescale: float, postscale: float, divisor: int) -> bool:
    """Return whether a scale factor or a divisor changes the array."""
    return prescale != 1.0 or postscale != 1.0 or divisor != 1


class _Piece(NamedTuple):
    """The range of an array that is in the buffer for a joint reduction.

    `is_scaled`: the values were scaled before the reduction, so the result is not scaled. `is_there`: the output array
    is the input array and needs no scaling, so the output array already has this rank's values.
    """

    part: Part
    start: int
    offset: int
    length: int
    is_scaled: bool
    is_there: bool


class Fusion:
    """Joint reductions of several arrays, in buffers of `limit_bytes`."""

    def __init__(self, transport: Transport, limit_bytes: int) -> None:
        self._transport = transport
        self._limit_bytes = limit_bytes
        self._buffers: dict[DType, Array] = {}
        self._shared: SharedSegments | None = None
        self._is_open = False

    def open(self) -> None:
        """Open the memory through which ranks on one machine reduce arrays, if possible."""
        # Call `open` only at the first reduction, because shared memory takes space. All ranks begin this reduction together, so
        # either all of them open the shared memory, or no rank does.
        if not self._is_open:
            self._shared = self._transport.share_segments(SEGMENT_BYTES)
        self._is_open = True

    @property
    def has_shared_memory(self) -> bool:
        return self._shared is not None

    def close(self) -> None:
        """Release the memory shared with other ranks."""
        if self._shared is not None:
            self._shared.close()

    def allreduce(self, parts: Sequence[Part], op: str, dtype: str) -> None:
        """All-reduce several arrays, all of one `dtype`, in joint buffers."""
        import numpy

        # Don't warn of overflows and NaNs, which come from the script's data. NumPy would print each warning on every rank.
        with numpy.errstate(all="ignore"):
            self._allreduce(parts, op, dtype)

    def _allreduce(self, parts: Sequence[Part], op: str, dtype: str) -> None:
        import numpy

        half = numbers.is_half(dtype)
        kind = numpy.dtype(numbers.sum_type(dtype))
        buffer = self._next(kind)
        pieces: list[_Piece] = []
        filled, scales = 0, None
        for part in parts:
            # Most arrays of a step have equal scale factors, so compute `factor` and `times` only when these change.
            if part[2:] != scales:
                scales = part[2:]
                factor, is_scaled = self._factor(part, op, kind)
                # Multiply by an array with one element: for small arrays NumPy is twice as fast with an array as with a number.
                times = numpy.array(factor, kind) if factor != 1.0 and kind.kind in "fc" else None
            is_there = factor == 1.0 and not half and part.source is part.target
            start, size = 0, part.source.size
            while start < size:
                length = min(size - start, buffer.size - filled)
                into, source = buffer[filled : filled + length], _stretch(part.source, start, length)
                if half:
                    numbers.to_float32(source, into, dtype)
                    numbers.scale(into, factor)
                elif times is not None:
                    numpy.multiply(source, times, out=into)
                else:
                    into[...] = source
                    numbers.scale(into, factor)
                pieces.append(_Piece(part, start, filled, length, is_scaled, is_there))
                filled += length
                start += length
                if filled == buffer.size:
                    self._flush(buffer, pieces, op, dtype)
                    pieces, filled = [], 0
                    buffer = self._next(kind)
        if filled:
            self._flush(buffer[:filled], pieces, op, dtype)

    def _factor(self, part: Part, op: str, kind: DType) -> tuple[float, bool]:
        """Return the factor by which to scale inputs, and whether outputs then need no scaling."""
        after = part.postscale / part.divisor
        # Scale the inputs if the outputs' factor is a power of two: this avoids a pass over the memory, and (except for denormal
        # numbers) gives the same result. frexp returns the fraction 0.5 only for powers of two.
        if self._shared is not None and op == "sum" and kind.kind in "fc" and math.frexp(after)[0] == 0.5:
            return part.prescale * after, True
        return part.prescale, False

    def _next(self, kind: DType) -> Array:
        size = max(1, self._limit_bytes // kind.itemsize)
        return self._shared.fill(kind)[:size] if self._shared is not None else self._own(kind, size)

    def _own(self, kind: DType, size: int) -> Array:
        import numpy

        if kind not in self._buffers:
            self._buffers[kind] = numpy.empty(size, kind)
        return self._buffers[kind]

    def _flush(self, buffer: Array, pieces: Sequence[_Piece], op: str, dtype: str) -> None:
        import numpy

        kind = buffer.dtype
        if self._shared is not None:
            arrays = self._shared.meet(kind)
        else:
            arrays = [buffer]
            self._transport.allreduce(buffer, buffer, op)
        half, is_float = numbers.is_half(dtype), kind.kind in "fc"
        join = numbers.ufunc(op, kind)
        # Half-precision arrays need a float32 buffer for the sum, because the target can't hold float32 numbers.
        whole = self._own(kind, SEGMENT_BYTES // kind.itemsize) if half and len(arrays) > 1 else None
        for part, start, offset, length, is_scaled, is_there in pieces:
            target = _stretch(part.target, start, length)
            stretches = [array[offset : offset + length] for array in arrays]
            post, divisor = (1.0, 1) if is_scaled else (part.postscale, part.divisor)
            if half:
                reduced = stretches[0]
                if whole is not None:
                    reduced = numbers.joined(join, stretches, whole[:length])
                numbers.scale(reduced, post, divisor)
                numbers.from_float32(reduced, target, dtype)
            elif self._shared is not None and len(arrays) > 1:
                if is_there and self._shared.rank < 2:
                    # Read `target` in place of this rank's segment: it has the same values, and is in the processor's cache. Only
                    # ranks 0 and 1 can do this, because the sum of the first two segments overwrites `target`.
                    stretches[self._shared.rank] = target
                numbers.joined(join, stretches, target)
                numbers.scale(target, post, divisor)
            elif is_float and post / divisor != 1.0:
                # This copies and scales the array in one pass.
                numpy.multiply(stretches[0], kind.type(post / divisor), out=target)
            else:
                target[...] = stretches[0]
                numbers.scale(target, post, divisor)


def _stretch(array: Array, start: int, length: int) -> Array:
    return array if length == array.size else array[start : start + length]
