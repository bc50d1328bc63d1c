"""Reducing many small arrays as if they were one; half-precision ones as float32.

They are copied side by side into a buffer. Where all ranks see each other's (`board.py`), each adds them up straight into
where the results belong; elsewhere the buffer is reduced by the transport, and copied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.collectives import numbers

if TYPE_CHECKING:
    from paceline.collectives.board import Board
    from paceline.collectives.transport import Transport

#: Of a rank's part of the board: what it has filled stays in its cache until it is added up.
BOARD_BYTES = 1 << 20


class Part(NamedTuple):
    """One array to reduce: flat, contiguous input and output, which may be the same memory."""

    source: Any
    target: Any
    prescale: float
    postscale: float
    divisor: int


class _Piece(NamedTuple):
    """A stretch of a part that is in the buffer."""

    part: Part
    start: int
    offset: int
    length: int


class Fusion:
    """Reduces over one transport, None for a set of one rank; keeps its buffers from one call to the next.

    limit_bytes: of a buffer.
    """

    def __init__(self, transport: Transport | None, limit_bytes: int) -> None:
        self._transport = transport
        self._limit_bytes = limit_bytes
        self._buffers: dict[Any, Any] = {}
        self._board: Board | None = None
        self._is_open = False

    @property
    def has_board(self) -> bool:
        """Whether the ranks have one. Then no reduction blocks: a rank that waits for others hears when one is lost."""
        return self._board is not None

    def retune(self, limit_bytes: int) -> None:
        """Fill buffers of so many bytes from now on."""
        self._limit_bytes = limit_bytes
        # They have the size of the old setting.
        self._buffers.clear()

    def close(self) -> None:
        """Give back what is shared with others."""
        if self._board is not None:
            self._board.close()

    def allreduce(self, parts: Sequence[Part], op: str, dtype: str) -> None:
        """Fill the targets. dtype: of all of the parts. Every rank calls it with as much."""
        import numpy

        if not self._is_open:
            self._is_open = True
            # Not before it is needed: it takes memory, and all ranks to open it.
            self._board = None if self._transport is None else self._transport.open_board(BOARD_BYTES)
        half = numbers.is_half(dtype)
        kind = numpy.dtype("float32" if half else dtype)
        buffer = self._next(kind)
        pieces: list[_Piece] = []
        filled = 0
        for part in parts:
            start, size = 0, part.source.size
            while start < size:
                length = min(size - start, buffer.size - filled)
                into = buffer[filled : filled + length]
                if half:
                    numbers.to_float32(part.source[start : start + length], into, dtype)
                else:
                    into[...] = part.source[start : start + length]
                if part.prescale != 1.0:
                    numbers.scale(into, part.prescale)
                pieces.append(_Piece(part, start, filled, length))
                filled += length
                start += length
                if filled == buffer.size:
                    self._flush(buffer, pieces, op, dtype)
                    pieces, filled = [], 0
                    buffer = self._next(kind)
        if filled:
            self._flush(buffer[:filled], pieces, op, dtype)

    def _next(self, kind: Any) -> Any:
        """An array to be filled."""
        size = max(1, self._limit_bytes // kind.itemsize)
        return self._board.fill(kind)[:size] if self._board is not None else self._own(kind, size)

    def _own(self, kind: Any, size: int) -> Any:
        import numpy

        if kind not in self._buffers:
            self._buffers[kind] = numpy.empty(size, kind)
        return self._buffers[kind]

    def _flush(self, buffer: Any, pieces: Sequence[_Piece], op: str, dtype: str) -> None:
        import numpy

        kind = buffer.dtype
        if self._board is not None:
            arrays = self._board.meet(kind)
        else:
            arrays = [buffer]
            if self._transport is not None:
                self._transport.allreduce(buffer, buffer, op)
        half, is_float = numbers.is_half(dtype), kind.kind in "fc"
        whole = self._own(kind, BOARD_BYTES // kind.itemsize) if half and len(arrays) > 1 else None
        with numpy.errstate(all="ignore"):
            for part, start, offset, length in pieces:
                target = part.target[start : start + length]
                ranks = [array[offset : offset + length] for array in arrays]
                factor = part.postscale / part.divisor
                if half:
                    reduced = ranks[0] if whole is None else numbers.joined(op, ranks, whole[:length])
                    numbers.scale(reduced, part.postscale, part.divisor)
                    numbers.from_float32(reduced, target, dtype)
                elif len(ranks) > 1:
                    numbers.joined(op, ranks, target)
                    numbers.scale(target, part.postscale, part.divisor)
                elif is_float and factor != 1.0:
                    # Copied and scaled in one pass.
                    numpy.multiply(ranks[0], kind.type(factor), out=target)
                else:
                    target[...] = ranks[0]
                    numbers.scale(target, part.postscale, part.divisor)
