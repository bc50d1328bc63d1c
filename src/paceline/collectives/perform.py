"""Performs what the ranks have agreed upon, in the same order on each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.collectives import move, numbers
from paceline.collectives.adasum import adasum
from paceline.collectives.fusion import Part, is_multiplied
from paceline.collectives.reduce import Reducer, scatter_rows
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

if TYPE_CHECKING:
    from paceline.collectives.transport import Transport

Ready = tuple[CollectiveTask, Agreement]


class Performer:
    """Does agreed operations over one transport; None: a set of one rank."""

    def __init__(self, transport: Transport | None, fusion_bytes: int) -> None:
        self._transport = transport
        self._size = 1 if transport is None else transport.size
        self._rank = 0 if transport is None else transport.rank
        self._reducer = Reducer(transport, fusion_bytes)

    def close(self) -> None:
        """Give back what is shared with others: nothing more will be done."""
        self._reducer.close()

    def blocks(self, ready: Sequence[Ready]) -> bool:
        """True if doing this may wait for another rank where nobody hears that it has died."""
        if self._transport is None:
            return False
        limits = (self._reducer.polled_bytes(multiplied=False), self._reducer.polled_bytes(multiplied=True))
        for task, agreement in ready:
            request = agreement.request
            if request.kind == ALLREDUCE and request.op != "adasum":
                for array, dtype in zip(task.arrays, request.dtypes, strict=True):
                    divisor = numbers.divisor(request.op, dtype, self._size)
                    # False and True are the places in `limits`.
                    polled_bytes = limits[is_multiplied(request.prescale, request.postscale, divisor)]
                    if array.nbytes >= polled_bytes and not (polled_bytes and numbers.is_half(dtype)):
                        return True
            elif request.kind not in (BARRIER, JOIN):  # those are done once they are agreed upon
                return True
        return False

    def perform(self, ready: Sequence[Ready], complete: Callable[[CollectiveTask, Any], None]) -> None:
        """Do all of them; `complete(task, result)` follows each one, or each bunch that was fused."""
        # op and type -> all that can be reduced together, in the order in which the coordinator named them.
        fused: dict[tuple[str, str], list[Ready]] = {}
        for task, agreement in ready:
            request = agreement.request
            dtypes = request.dtypes
            # A group of several types is done alone, for a fused buffer has one type.
            if request.kind == ALLREDUCE and request.op != "adasum" and dtypes.count(dtypes[0]) == len(dtypes):
                fused.setdefault((numbers.operation(request.op, dtypes[0]), dtypes[0]), []).append((task, agreement))
            else:
                complete(task, self._one(task, agreement))
        for (op, dtype), members in fused.items():
            parts: list[Part] = []
            results = []
            for task, agreement in members:
                outs = self._fill_parts(parts, task, agreement.request)
                results.append(_shaped(agreement.request, outs))
            self._reducer.allreduce(parts, op, dtype)
            for (task, _), result in zip(members, results, strict=True):
                complete(task, result)

    def _fill_parts(self, parts: list[Part], task: CollectiveTask, request: Request) -> list[Any]:
        """The outputs; what is to be reduced into them is added to `parts`."""
        import numpy

        op, prescale, postscale = request.op, request.prescale, request.postscale
        outs = []
        for array, given, dtype in zip(task.arrays, task.outs, request.dtypes, strict=True):
            out = numpy.empty_like(array) if given is None else given
            outs.append(out)
            source = array.reshape(-1)
            target = source if out is array else out.reshape(-1)
            parts.append(Part(source, target, prescale, postscale, numbers.divisor(op, dtype, self._size)))
        return outs

    def _one(self, task: CollectiveTask, agreement: Agreement) -> Any:
        request = agreement.request
        kind = request.kind
        if kind == ALLREDUCE:
            return self._allreduce(task, request)
        if kind == ALLGATHER:
            pairs = zip(task.arrays, agreement.rows, strict=True)
            return _shaped(request, [move.allgather(self._transport, array, rows) for array, rows in pairs])
        if kind == BROADCAST:
            import numpy

            out = numpy.empty_like(task.arrays[0]) if task.outs[0] is None else task.outs[0]
            return move.broadcast(self._transport, task.arrays[0], out, request.root)
        if kind == ALLTOALL:
            return move.alltoall(self._transport, task.arrays[0], agreement.rows)
        if kind == REDUCESCATTER:
            arrays = zip(task.arrays, request.dtypes, strict=True)
            return _shaped(request, [self._reducescatter(array, dtype, request) for array, dtype in arrays])
        return agreement.joined if kind == JOIN else agreement

    def _allreduce(self, task: CollectiveTask, request: Request) -> Any:
        """Adasum, or a group of different types."""
        parts: list[Part] = []
        outs = self._fill_parts(parts, task, request)
        for part, dtype in zip(parts, request.dtypes, strict=True):
            if request.op == "adasum":
                self._adasum(part, dtype)
            else:
                self._reducer.allreduce([part], numbers.operation(request.op, dtype), dtype)
        return _shaped(request, outs)

    def _adasum(self, part: Part, dtype: str) -> None:
        # A copy: Adasum computes in place, and the source is the script's.
        array = numbers.summand(part.source, dtype, part.prescale)
        if self._transport is not None:
            adasum(self._transport, array)
        numbers.scale(array, part.postscale)
        numbers.from_float32(array, part.target, dtype)

    def _reducescatter(self, array: Any, dtype: str, request: Request) -> Any:
        import numpy

        rows = scatter_rows(array.shape[0], self._size)
        width = array[:1].size if array.shape[0] else 0
        result = numpy.empty((rows[self._rank], *array.shape[1:]), array.dtype)
        if array.size:
            divisor = numbers.divisor(request.op, dtype, self._size)
            part = Part(array.reshape(-1), result.reshape(-1), request.prescale, request.postscale, divisor)
            counts = [count * width for count in rows]
            self._reducer.reducescatter(part, counts, numbers.operation(request.op, dtype), dtype)
        return result


def _shaped(request: Request, results: list[Any]) -> Any:
    return results if request.grouped else results[0]
