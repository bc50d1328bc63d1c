"""Inputs of the operations that test_properties.py draws, and what NumPy says that they give. Plain data in, arrays out.

An operation is a dictionary, as it comes from JSON:

    kind, name, op, prescale, postscale, ranks (of its process set), root, splits (of each rank, or None)
    members     one for each array: dtype, shape, layout, values; rows: allgather's and alltoall's, of each rank
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy

Operation = dict[str, Any]
Array = Any

EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "complex64": 2.0**-22}


def source(operation: Operation, index: int, rank: int, turn: int) -> Array:
    """The array of this rank, with the memory layout that the plan asks for; bfloat16 as its bits."""
    member = operation["members"][index]
    plain = numbers(operation, index, rank, turn)
    if member["dtype"] == "bfloat16":
        plain = numpy.asarray((plain.view(numpy.uint32) >> 16).astype(numpy.uint16))
    return laid_out(plain, member["layout"])


def numbers(operation: Operation, index: int, rank: int, turn: int) -> Array:
    """The values of this rank; of bfloat16 as float32, which holds them exactly."""
    # NumPy returns scalars instead of 0-dimensional arrays, so convert them back.
    return numpy.asarray(_numbers(operation, index, rank, turn))


def _numbers(operation: Operation, index: int, rank: int, turn: int) -> Array:
    member = operation["members"][index]
    shape = tuple(member["shape"])
    if "rows" in member:
        shape = (member["rows"][operation["ranks"].index(rank)], *shape[1:])
    random = numpy.random.default_rng((zlib.crc32(operation["name"].encode()), index, rank, turn))
    dtype = numpy.dtype("float32" if member["dtype"] == "bfloat16" else member["dtype"])
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        if member["values"] == "any":
            limits = numpy.iinfo(dtype)
            return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        return random.integers(-3 if dtype.kind == "i" else 0, 4, shape).astype(dtype)
    made = random.integers(-3, 4, shape).astype(numpy.float64)
    if member["values"] == "any":
        made = random.standard_normal(shape)
    if dtype.kind == "c":
        made = made + 1j * random.integers(-2, 3, shape)
    made = made.astype(dtype)
    if member["dtype"] == "bfloat16":
        made = (made.view(numpy.uint32) & numpy.uint32(0xFFFF0000)).view(numpy.float32)
    return made


def laid_out(plain: Array, layout: str) -> Array:
    """An array of the same values: "gaps", "transposed" and "reversed" are not contiguous where that is possible."""
    if layout == "gaps" and plain.ndim:
        wide = numpy.zeros((*plain.shape[:-1], 2 * plain.shape[-1]), plain.dtype)
        view = wide[..., ::2]
    elif layout == "transposed":
        view = numpy.empty(plain.shape[::-1], plain.dtype).T
    elif layout == "reversed" and plain.ndim:
        view = numpy.empty_like(plain)[::-1]
    else:
        return plain.copy()
    view[...] = plain
    return view


def check(operation: Operation, index: int, rank: int, turn: int, got: Array) -> None:
    """Refuse what the operation gave this rank for one of its arrays if it isn't what NumPy gives."""
    member = operation["members"][index]
    wanted, slack = _wanted(operation, index, rank, turn)
    if member["dtype"] == "bfloat16":
        assert got.dtype == numpy.uint16
        got = (got.astype(numpy.uint32) << 16).view(numpy.float32)
    else:
        assert got.dtype == numpy.dtype(member["dtype"]), got.dtype
    assert got.shape == wanted.shape, f"shape {got.shape}, not {wanted.shape}"
    off = numpy.abs(got - wanted) > slack if slack is not None else got != wanted
    if off.any():
        where = tuple(int(axis[0]) for axis in numpy.nonzero(numpy.atleast_1d(off)))
        raise AssertionError(
            f"{numpy.atleast_1d(got)[where]} at {where}, not {numpy.atleast_1d(wanted)[where]}; {int(off.sum())} are wrong"
        )


def _wanted(operation: Operation, index: int, rank: int, turn: int) -> tuple[Array, Array | None]:
    """Return the expected result and the allowed difference; None: no difference."""
    ranks, kind = operation["ranks"], operation["kind"]
    member = operation["members"][index]
    given = [numbers(operation, index, other, turn) for other in ranks]
    if kind == "allgather":
        return numpy.concatenate(given), None
    if kind == "broadcast":
        return given[ranks.index(operation["root"])], None
    if kind == "alltoall":
        place = ranks.index(rank)
        parts = []
        for array, splits in zip(given, _splits(operation), strict=True):
            start = sum(splits[:place])
            parts.append(array[start : start + splits[place]])
        return numpy.concatenate(parts), None
    wanted, slack = _reduced(operation, given, member["dtype"])
    if kind == "reducescatter":
        place, rows = ranks.index(rank), wanted.shape[0]
        sizes = [rows // len(ranks) + (r < rows % len(ranks)) for r in range(len(ranks))]
        mine = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
        return wanted[mine], None if slack is None else slack[mine]
    return wanted, slack


def received(operation: Operation, rank: int) -> list[int]:
    """How many rows an alltoall brings this rank from each."""
    place = operation["ranks"].index(rank)
    return [splits[place] for splits in _splits(operation)]


def _splits(operation: Operation) -> list[list[int]]:
    if operation["splits"] is not None:
        return operation["splits"]
    size = len(operation["ranks"])
    return [[rows // size] * size for rows in operation["members"][0]["rows"]]


def _reduced(operation: Operation, given: Sequence[Array], dtype: str) -> tuple[Array, Array | None]:
    op, size = operation["op"], len(given)
    pre, post = operation["prescale"], operation["postscale"]
    divisor = size if op == "average" else 1
    if given[0].dtype.kind == "b":
        stack = numpy.stack(given)
        return (stack.any(0) if op in ("sum", "max") else stack.all(0)), None
    if given[0].dtype.kind in "iu":
        return _of_integers(given, op, pre, post, divisor), None
    wide = [array.astype(numpy.complex128 if array.dtype.kind == "c" else numpy.float64) * pre for array in given]
    whole = _adasum(wide) * post if op == "adasum" else _FOLDS[op](numpy.stack(wide)) * post / divisor
    size_of = numpy.abs(numpy.stack(wide))
    room = size_of.prod(0) if op == "product" else size_of.sum(0)
    epsilon = EPSILONS.get(dtype, 2.0**-50)
    if op == "adasum":
        # The weights of Adasum come from sums over the whole array, so the largest element affects every element's error.
        room = room + (size_of.max() if size_of.size else 0.0)
    # float16 numbers close to 0 have a fixed distance, so the relative tolerance is too small for them.
    least = 2.0**-24 if dtype == "float16" else 0.0
    return whole, (room * abs(post) / divisor + numpy.abs(whole)) * 4 * epsilon + least


def _of_integers(given: Sequence[Array], op: str, pre: float, post: float, divisor: int) -> Array:
    dtype = given[0].dtype
    if pre != 1.0:
        given = [numpy.trunc(array.astype(numpy.float64) * pre).astype(dtype) for array in given]
    with numpy.errstate(over="ignore"):
        whole = _FOLDS[op](numpy.stack(given)).astype(dtype)
    if post != 1.0:
        return numpy.trunc(whole.astype(numpy.float64) * post / divisor).astype(dtype)
    if divisor == 1:
        return whole
    # Use Python's integers, because they have no limits as NumPy's types have.
    exact = [abs(int(n)) // divisor * (1 if n >= 0 else -1) for n in whole.reshape(-1)]
    return numpy.array(exact, dtype).reshape(whole.shape)


_FOLDS = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "average": lambda stack: stack.sum(0, dtype=stack.dtype),
    "min": lambda stack: stack.min(0),
    "max": lambda stack: stack.max(0),
    "product": lambda stack: stack.prod(0, dtype=stack.dtype),
}


def _adasum(vectors: list[Array]) -> Array:
    """In pairs, then pairs of pairs (Maleki et al., 2020), in float64."""
    while len(vectors) > 1:
        vectors = [_pair(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    return vectors[0]


def _pair(a: Array, b: Array) -> Array:
    dot, one, two = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return a * (1 - dot / (2 * one) if one else 1) + b * (1 - dot / (2 * two) if two else 1)
