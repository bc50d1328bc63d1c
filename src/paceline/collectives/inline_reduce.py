"""Small reductions, which travel with the negotiation: one message to the set's first rank, and one back.

    rank 1   "the same as number 7 again, and here is mine"  ->  rank 0 adds it to its own
    rank 0   "number 7, and this came out"                   ->  everyone

Half the time of agreeing first and reducing then. It is done where a rank asks for one thing alone, as a call that
waits does; many small arrays are faster in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.collectives import numbers
from paceline.collectives.request import ALLREDUCE, CollectiveTask, Request

#: The first rank takes so much from each of the others. A guess; from 16 KiB on two ranks are faster without.
LIMIT_BYTES = 8 << 10


def payload(task: CollectiveTask) -> bytes | None:
    """The bytes that this rank adds to the sum, scaled; None for an operation that doesn't travel with the negotiation."""
    request = task.request
    if request.kind != ALLREDUCE or request.grouped or request.op == "adasum" or task.arrays[0].nbytes > LIMIT_BYTES:
        return None
    array = task.arrays[0].reshape(-1)
    dtype = request.dtypes[0]
    if not numbers.is_half(dtype) and request.prescale == 1.0:
        return bytes(array)
    return bytes(numbers.summand(array, dtype, request.prescale))


def fold(request: Request, payloads: Sequence[bytes]) -> bytes:
    """The ranks' payloads, reduced in the order of the ranks."""
    import numpy

    dtype = request.dtypes[0]
    kind, op = numpy.dtype(numbers.sum_type(dtype)), numbers.operation(request.op, dtype)
    arrays = [numpy.frombuffer(data, kind) for data in payloads]
    with numpy.errstate(all="ignore"):
        whole = arrays[0]
        if len(arrays) > 1:
            whole = numbers.joined(numbers.ufunc(op, kind), arrays, numpy.empty_like(whole))
    return bytes(whole)


def unpack(task: CollectiveTask, data: bytes, size: int) -> Any:
    """The task's result, made of what came out of `size` ranks' payloads."""
    import numpy

    request = task.request
    dtype = request.dtypes[0]
    out = numpy.empty_like(task.arrays[0]) if task.outs[0] is None else task.outs[0]
    divisor = numbers.divisor(request.op, dtype, size)
    target = out.reshape(-1)
    if numbers.is_half(dtype):
        reduced = numpy.frombuffer(bytearray(data), numpy.float32)
        numbers.scale(reduced, request.postscale, divisor)
        numbers.from_float32(reduced, target, dtype)
    else:
        target[...] = numpy.frombuffer(data, target.dtype)
        numbers.scale(target, request.postscale, divisor)
    return out
