"""Adasum: a sum that takes gradients which agree once, and gradients that don't both.

For two gradients a and b it is a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2): their sum where they are orthogonal, their
mean where they are parallel (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.collectives.transport import Transport


def adasum(transport: Transport, array: Any) -> None:
    """Replace the flat float32 or float64 array by the Adasum over the transport's ranks, a power of two of them.

    By recursive doubling: each rank exchanges the whole vector log2(size) times.

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
        # In the same order on both sides, so that both get the same bits.
        first, second = (array, other) if transport.rank < partner else (other, array)
        one, two = _weights(first, second)
        first *= first.dtype.type(one)
        second *= second.dtype.type(two)
        array += other
        distance *= 2


def _weights(first: Any, second: Any) -> tuple[float, float]:
    import numpy

    a, b = first.astype(numpy.float64, copy=False), second.astype(numpy.float64, copy=False)
    dot, one, two = float(a @ b), float(a @ a), float(b @ b)
    return (1.0 - dot / (2.0 * one) if one else 1.0), (1.0 - dot / (2.0 * two) if two else 1.0)
