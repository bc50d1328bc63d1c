"""All-reduce and reduce-scatter of arrays whose ranks have agreed.

Small arrays are reduced together (`fusion.py`), large ones where they lie, in pieces: a piece that stays in the
processor's cache is reduced two to three times as fast as an array that doesn't (64 MiB, 2 ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.collectives import numbers
from paceline.collectives.fusion import Fusion, Part, is_multiplied

if TYPE_CHECKING:
    from paceline.collectives.transport import Transport

#: Of one reduction. With 2 ranks on one machine 1 MiB was the fastest, 2 MiB as good, 0.25 and 4 MiB 10 to 30 % slower.
PIECE_BYTES = 1 << 20
#: From here on copying in costs more than a call of its own: where it has to be copied out as well; where more than two ranks
#: add up, each of which reads all of the copies; and where the array is multiplied on that way, which with MPI's call takes a
#: pass of its own. Two ranks never come there: in memory that both see, arrays of 8 to 64 MiB took 0.6 of the time of MPI's
#: call in turn with it, and as long where their cores have no cache in common.
DIRECT_BYTES = 1 << 20
SHARED_DIRECT_BYTES = 8 << 20
SHARED_DIRECT_MULTIPLIED_BYTES = 32 << 20


class Reducer:
    """Reduces over one transport, None for a set of one rank.

    fusion_bytes: smaller arrays are reduced together; 0: each on its own.
    """

    def __init__(self, transport: Transport | None, fusion_bytes: int) -> None:
        self._transport = transport
        self._fusion_bytes = fusion_bytes
        self._fusion = Fusion(transport, min(fusion_bytes, PIECE_BYTES) or PIECE_BYTES)

    def allreduce(self, parts: Sequence[Part], op: str, dtype: str) -> None:
        """Fill the targets. dtype: of all of the parts."""
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
        """Reducing a smaller array never blocks, but looks after the other ranks; nor, unless this is 0, one of halves."""
        return self._small_bytes(multiplied) if self._fusion.has_shared_memory else 0

    def _small_bytes(self, multiplied: bool) -> int:
        """The limit in bytes below which arrays go through a buffer; half precision always does, for MPI does not know it."""
        if not self._fusion.has_shared_memory:
            return min(DIRECT_BYTES, self._fusion_bytes)
        if self._transport is not None and self._transport.size == 2:
            return self._fusion_bytes
        return min(SHARED_DIRECT_MULTIPLIED_BYTES if multiplied else SHARED_DIRECT_BYTES, self._fusion_bytes)

    def close(self) -> None:
        """Give back what is shared with others."""
        self._fusion.close()

    def reducescatter(self, part: Part, counts: Sequence[int], op: str, dtype: str) -> None:
        """Fill the target with this rank's `counts[rank]` elements of the reduced source."""
        import numpy

        half = numbers.is_half(dtype)
        source = part.source
        if half or part.prescale != 1.0:
            source = numbers.summand(source, dtype, part.prescale)
        target = numpy.empty(part.target.size, numpy.float32) if half else part.target
        if self._transport is not None:
            self._transport.reducescatter(source, target, counts, op)
        else:
            numpy.copyto(target, source)
        numbers.scale(target, part.postscale, part.divisor)
        if half:
            numbers.from_float32(target, part.target, dtype)

    def _direct(self, part: Part, op: str) -> None:
        import numpy

        source, target = part.source, part.target
        in_place = source.__array_interface__["data"] == target.__array_interface__["data"]
        step = max(1, PIECE_BYTES // source.itemsize)
        transport = self._transport
        for start in range(0, source.size, step):
            into = target[start : start + step]
            if not in_place and (part.prescale != 1.0 or transport is None):
                numpy.copyto(into, source[start : start + step])
            numbers.scale(into, part.prescale)
            if transport is not None:
                copied = in_place or part.prescale != 1.0
                transport.allreduce(into if copied else source[start : start + step], into, op)
            numbers.scale(into, part.postscale, part.divisor)


def scatter_rows(rows: int, size: int) -> list[int]:
    """The numbers of rows that each of `size` ranks gets of `rows`: the first ones get one more where they don't divide."""
    return [rows // size + (rank < rows % size) for rank in range(size)]
