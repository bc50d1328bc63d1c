"""Execution of the operations on which the ranks have agreed, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.collectives import numbers
from paceline.collectives.fusion import Fusion, Part, is_multiplied
from paceline.collectives.numbers import Array
from paceline.collectives.request import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
    Agreement,
    CollectiveTask,
    Request,
)
from paceline.collectives.transport import Transport

Ready = tuple[CollectiveTask, Agreement]


#: Bytes of each piece of a reduction. With 2 ranks on one machine, 0.25 MiB and 4 MiB were 10 to 30 % slower than 1 MiB or 2 MiB.
PIECE_BYTES = 1 << 20
#: MPI reduces arrays of at least this many bytes directly (first limit: without shared memory), because a buffer would cost more
#: time: its result must be copied, or each rank reads the copies of all ranks from shared memory. Arrays with a scale factor have
#: a higher limit, because MPI needs one more pass. Two ranks with shared memory use buffers up to `fusion_bytes`: for 8 to 64 MiB
#: this took 0.6 of MPI's time, or equal time on cores without a common cache.
DIRECT_BYTES = 1 << 20
SHARED_DIRECT_BYTES = 8 << 20
SHARED_DIRECT_MULTIPLIED_BYTES = 32 << 20


class Performer:
    """An object that performs collectives over one transport, once the ranks have agreed."""

    def __init__(self, transport: Transport, fusion_bytes: int) -> None:
        self._transport = transport
        self._size, self._rank = transport.size, transport.rank
        self._reducer = Reducer(transport, fusion_bytes)
        #: Functions of the operations that move data. A barrier or a join is done as soon as the ranks have agreed on it.
        self._operations: dict[str, Callable[[CollectiveTask, Agreement], object]] = {
            ALLREDUCE: self._allreduce,
            ALLGATHER: self._allgather,
            BROADCAST: self._broadcast,
            ALLTOALL: self._alltoall,
            REDUCESCATTER: self._reducescatter,
        }

    def close(self) -> None:
        """Release the memory shared with other ranks."""
        self._reducer.close()

    def blocks(self, ready: Sequence[Ready]) -> bool:
        """Return whether any of these collectives would hang if a rank died."""
        if self._size == 1:
            return False
        limits = (self._reducer.polled_bytes(multiplied=False), self._reducer.polled_bytes(multiplied=True))
        for task, agreement in ready:
            request = agreement.request
            if request.kind == ALLREDUCE and request.op != "adasum":
                for array, dtype in zip(task.arrays, request.dtypes, strict=True):
                    divisor = numbers.divisor(request.op, dtype, self._size)
                    polled_bytes = limits[is_multiplied(request.prescale, request.postscale, divisor)]
                    if array.nbytes >= polled_bytes and not (polled_bytes and numbers.is_half(dtype)):
                        return True
            elif request.kind not in (BARRIER, JOIN):  # a barrier and a join are done when all have agreed
                return True
        return False

    def perform(self, ready: Sequence[Ready], complete: Callable[[CollectiveTask, object], None]) -> None:
        """Perform these collectives. Call `complete(task, result)` after each."""
        # (op, dtype) -> operations to reduce together, in the order of the coordinator's response.
        fused: dict[tuple[str, str], list[Ready]] = {}
        for task, agreement in ready:
            request = agreement.request
            dtypes = request.dtypes
            # A buffer has a single dtype, so reduce a group of arrays with several dtypes separately.
            if request.kind == ALLREDUCE and request.op != "adasum" and dtypes.count(dtypes[0]) == len(dtypes):
                fused.setdefault((numbers.operation(request.op, dtypes[0]), dtypes[0]), []).append((task, agreement))
            else:
                perform = self._operations.get(request.kind)
                complete(task, agreement.joined if perform is None else perform(task, agreement))
        for (op, dtype), members in fused.items():
            parts: list[Part] = []
            results = []
            for task, agreement in members:
                outs = self._fill_parts(parts, task, agreement.request)
                results.append(_shaped(agreement.request, outs))
            self._reducer.allreduce(parts, op, dtype)
            for (task, _), result in zip(members, results, strict=True):
                complete(task, result)

    def _fill_parts(self, parts: list[Part], task: CollectiveTask, request: Request) -> list[Array]:
        import numpy

        op, prescale, postscale = request.op, request.prescale, request.postscale
        outs: list[Array] = []
        for array, target, dtype in zip(task.arrays, task.outs, request.dtypes, strict=True):
            out = numpy.empty_like(array) if target is None else target
            outs.append(out)
            source = array.reshape(-1)
            flat = source if out is array else out.reshape(-1)
            parts.append(Part(source, flat, prescale, postscale, numbers.divisor(op, dtype, self._size)))
        return outs

    def _allgather(self, task: CollectiveTask, agreement: Agreement) -> object:
        pairs = zip(task.arrays, agreement.rows, strict=True)
        return _shaped(agreement.request, [allgather(self._transport, array, rows) for array, rows in pairs])

    def _broadcast(self, task: CollectiveTask, agreement: Agreement) -> object:
        import numpy

        out = numpy.empty_like(task.arrays[0]) if task.outs[0] is None else task.outs[0]
        return broadcast(self._transport, task.arrays[0], out, agreement.request.root)

    def _alltoall(self, task: CollectiveTask, agreement: Agreement) -> object:
        return alltoall(self._transport, task.arrays[0], agreement.rows)

    def _reducescatter(self, task: CollectiveTask, agreement: Agreement) -> object:
        request = agreement.request
        arrays = zip(task.arrays, request.dtypes, strict=True)
        return _shaped(request, [self._scattered(array, dtype, request) for array, dtype in arrays])

    def _allreduce(self, task: CollectiveTask, agreement: Agreement) -> object:
        """Reduce arrays that can't be reduced together: by Adasum, or of different dtypes."""
        request = agreement.request
        parts: list[Part] = []
        outs = self._fill_parts(parts, task, request)
        for part, dtype in zip(parts, request.dtypes, strict=True):
            if request.op == "adasum":
                self._adasum(part, dtype)
            else:
                self._reducer.allreduce([part], numbers.operation(request.op, dtype), dtype)
        return _shaped(request, outs)

    def _adasum(self, part: Part, dtype: str) -> None:
        # Copy the array, because Adasum overwrites it, and `source` belongs to the script.
        array = numbers.summand(part.source, dtype, part.prescale)
        adasum(self._transport, array)
        numbers.scale(array, part.postscale)
        numbers.from_float32(array, part.target, dtype)

    def _scattered(self, array: Array, dtype: str, request: Request) -> Array:
        import numpy

        rows = scatter_rows(array.shape[0], self._size)
        width = array[:1].size if array.shape[0] else 0
        result: Array = numpy.empty((rows[self._rank], *array.shape[1:]), array.dtype)
        if array.size:
            divisor = numbers.divisor(request.op, dtype, self._size)
            part = Part(array.reshape(-1), result.reshape(-1), request.prescale, request.postscale, divisor)
            counts = [count * width for count in rows]
            self._reducer.reducescatter(part, counts, numbers.operation(request.op, dtype), dtype)
        return result


def _shaped(request: Request, results: list[Array]) -> list[Array] | Array:
    return results if request.grouped else results[0]


class Reducer:
    """Reductions of arrays over one transport.

    Arrays smaller than `fusion_bytes` are reduced together. With 0 each array is reduced separately.
    """

    def __init__(self, transport: Transport, fusion_bytes: int) -> None:
        self._transport = transport
        self._fusion_bytes = fusion_bytes
        self._fusion = Fusion(transport, min(fusion_bytes, PIECE_BYTES) or PIECE_BYTES)

    def allreduce(self, parts: Sequence[Part], op: str, dtype: str) -> None:
        """All-reduce several arrays over the ranks, all of one `dtype`."""
        self._fusion.open()
        below, half = (self._small_bytes(False), self._small_bytes(True)), numbers.is_half(dtype)
        small = []
        for part in parts:
            if half or part.source.nbytes < below[is_multiplied(*part[2:])]:
                small.append(part)
            else:
                self._direct(part, op)
        if not self._fusion_bytes:
            for part in small:
                self._fusion.allreduce([part], op, dtype)
        elif len(small) == 1 and not half and not self._fusion.has_shared_memory:
            self._direct(small[0], op)
        elif small:
            self._fusion.allreduce(small, op, dtype)

    def polled_bytes(self, multiplied: bool) -> int:
        """Return the array size below which a reduction makes no blocking MPI call.

        `multiplied` says whether the reduction also scales the arrays.
        """
        return self._small_bytes(multiplied) if self._fusion.has_shared_memory else 0

    def _small_bytes(self, multiplied: bool) -> int:
        """Return the size in bytes below which arrays are reduced together."""
        # No limit concerns half-precision arrays: they always go through a buffer, because MPI does not support them.
        if not self._fusion.has_shared_memory:
            return min(DIRECT_BYTES, self._fusion_bytes)
        if self._transport.size == 2:
            return self._fusion_bytes
        return min(SHARED_DIRECT_MULTIPLIED_BYTES if multiplied else SHARED_DIRECT_BYTES, self._fusion_bytes)

    def close(self) -> None:
        self._fusion.close()

    def reducescatter(self, part: Part, counts: Sequence[int], op: str, dtype: str) -> None:
        """Fill the output with this rank's part of the reduced array.

        `counts` has the number of elements for each rank.
        """
        import numpy

        half = numbers.is_half(dtype)
        source = part.source
        if half or part.prescale != 1.0:
            source = numbers.summand(source, dtype, part.prescale)
        target = numpy.empty(part.target.size, numpy.float32) if half else part.target
        self._transport.reducescatter(source, target, counts, op)
        numbers.scale(target, part.postscale, part.divisor)
        if half:
            numbers.from_float32(target, part.target, dtype)

    def _direct(self, part: Part, op: str) -> None:
        import numpy

        source, target = part.source, part.target
        in_place = source.__array_interface__["data"] == target.__array_interface__["data"]
        step = max(1, PIECE_BYTES // source.itemsize)
        copied = in_place or part.prescale != 1.0
        for start in range(0, source.size, step):
            into = target[start : start + step]
            if copied and not in_place:
                numpy.copyto(into, source[start : start + step])
            numbers.scale(into, part.prescale)
            self._transport.allreduce(into if copied else source[start : start + step], into, op)
            numbers.scale(into, part.postscale, part.divisor)


def scatter_rows(rows: int, size: int) -> list[int]:
    """Return each rank's number of rows. The first ranks get the remainder."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def allgather(transport: Transport, array: Array, rows: Sequence[int]) -> Array:
    """Concatenate the ranks' arrays. `rows` has each rank's number of rows."""
    import numpy

    result: Array = numpy.empty((sum(rows), *array.shape[1:]), array.dtype)
    if result.nbytes:
        transport.allgather(array, result, rows)
    return result


def broadcast(transport: Transport, array: Array, out: Array, root: int) -> Array:
    """Fill `out` with the root's array, and return it."""
    import numpy

    if transport.rank == root and out.__array_interface__["data"] != array.__array_interface__["data"]:
        numpy.copyto(out, array)
    if out.nbytes:
        transport.broadcast(out.reshape(-1).view(numpy.uint8), root)
    return out


def alltoall(transport: Transport, array: Array, splits: Sequence[Sequence[int]]) -> tuple[Array, tuple[int, ...]]:
    """Exchange rows. Return the received rows, and the number from each rank."""
    import numpy

    rank = transport.rank
    received = tuple(row[rank] for row in splits)
    result: Array = numpy.empty((sum(received), *array.shape[1:]), array.dtype)
    if any(any(row) for row in splits) and 0 not in array.shape[1:]:
        transport.alltoall(array, splits[rank], result, received)
    return result, received


def adasum(transport: Transport, array: Array) -> None:
    """Replace a flat array by its Adasum over the ranks.

    The array is float32 or float64, and the number of ranks is a power of two. Adasum adds equal gradients only once,
    and orthogonal gradients in full. For gradients a and b it is a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2) (Maleki et
    al., "Scaling Distributed Training with Adaptive Summation", 2020).

    With recursive doubling, each rank exchanges the whole array log2(number of ranks) times.

        rank   0   1   2   3
               0+1 0+1 2+3 2+3       partner: rank ^ 1
               0+1+2+3 everywhere    partner: rank ^ 2
    """
    import numpy

    other = numpy.empty_like(array)
    distance = 1
    while distance < transport.size:
        partner = transport.rank ^ distance
        transport.exchange(array, other, partner)
        # Both ranks use the same order of operands, so that both compute exactly the same result.
        first, second = (array, other) if transport.rank < partner else (other, array)
        first_weight, second_weight = _weights(first, second)
        first *= first.dtype.type(first_weight)
        second *= second.dtype.type(second_weight)
        array += other
        distance *= 2


def _weights(first: Array, second: Array) -> tuple[float, float]:
    import numpy

    a, b = first.astype(numpy.float64, copy=False), second.astype(numpy.float64, copy=False)
    dot, first_square, second_square = float(a @ b), float(a @ a), float(b @ b)
    return (1.0 - dot / (2.0 * first_square) if first_square else 1.0), (
        1.0 - dot / (2.0 * second_square) if second_square else 1.0
    )
