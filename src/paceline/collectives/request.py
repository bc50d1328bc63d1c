"""Requests of the ranks, their agreement, and the messages that carry both.

A request is a plain tuple, so that it is fast to compare and send: a step makes hundreds of requests. Messages are
pickles: JSON cannot hold bytes, and is several times slower for usual messages (tuples of numbers). Pickles can call
any function (https://docs.python.org/3/library/pickle.html#restricting-globals), so the receiver accepts only numbers,
strings, bytes, tuples and the classes of this module. A forged message can have wrong values, but it runs no code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.collectives.errors import CollectivesError
from paceline.collectives.handle import Handle
from paceline.collectives.numbers import Array

ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER = "alltoall", "reducescatter"
BARRIER, JOIN, CHANGE_SETS = "barrier", "join", "process_set"

#: (kind, name): identifies an operation in flight.
Key = tuple[str, str]
#: For each request, the rank that sent it, and the time when it arrived.
Arrivals = Sequence[tuple[int, float]]
#: The types of the fields of `Request`, in their order.
Fields = tuple[str, str, tuple[str, ...], tuple[tuple[int, ...], ...], str, float, float, int, tuple[int, ...], bool]


class Request(NamedTuple):
    """One operation that a rank requests.

    `shapes` and `dtypes` have one entry per array. Only a `grouped` request has several arrays. `root` is the rank of a
    broadcast's root in the process set. For an alltoall, `splits` has the number of rows for each rank. In a request to
    add a process set (see `op`), `splits` has the set's ranks. To remove a set, `splits` has the set's number.
    """

    kind: str
    name: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    grouped: bool = False

    @property
    def key(self) -> Key:
        # Give all-reduces of GPU and CPU tensors one key, so that ranks that differ get an error and do not wait forever.
        return (self.kind.removeprefix("device_"), self.name)


@dataclass(slots=True)
class CollectiveTask:
    """An operation that this rank has submitted, with its arrays.

    The arrays are contiguous. For each output of None, the engine creates an array when it performs the operation.
    """

    request: Request
    arrays: Sequence[Array]
    outs: Sequence[Array | None]
    handle: Handle
    finish: Callable[[Any], object] | None = None
    submitted_s: float = 0.0
    arrivals: Arrivals = ()


class Agreement(NamedTuple):
    """An operation that all ranks perform, or the error if they disagree.

    Attributes:
        request: The first rank's request.
        slot: The number that ranks send to repeat this request, or -1 if there is no such number.
        rows: For allgather, each array's row count on each rank. For alltoall, the row count for each pair of ranks.
        joined: For a join, the rank that called `join` last.
    """

    request: Request
    slot: int = -1
    rows: tuple[tuple[int, ...], ...] = ()
    error: str | None = None
    joined: int = -1


def agree(requests: Mapping[int, Request], joined: bool = False) -> Agreement:
    """Return the operation on which the ranks agree, or an error. joined: some rank has called `join`."""
    # Compare every request with that of the lowest rank, so that the message is the same for any order of arrival.
    first_rank = min(requests)
    first = requests[first_rank]
    if joined and first.kind not in (ALLREDUCE, BARRIER):
        hint = " For the sparse gradients of a DistributedOptimizer say sparse_as_dense=True."
        return Agreement(
            first,
            error=f"{first.kind.capitalize()} is not supported with Join at this time: {first.name!r} was asked for while "
            f"another rank had joined, which can take part in allreduce alone.{hint if first.kind == ALLGATHER else ''}",
        )
    for rank, request in requests.items():
        difference = _difference(first, request)
        if difference is not None:
            what, own, others = difference
            return Agreement(
                first,
                error=f"Mismatched {first.kind.upper()} {what} for {first.name!r}: rank {first_rank} sent {own}, "
                f"rank {rank} sent {others}.",
            )
    rows: tuple[tuple[int, ...], ...] = ()
    if first.kind == ALLGATHER:
        rows = tuple(
            tuple(requests[rank].shapes[index][0] for rank in sorted(requests)) for index in range(len(first.shapes))
        )
    elif first.kind == ALLTOALL:
        rows = tuple(requests[rank].splits for rank in sorted(requests))
    return Agreement(first, rows=rows)


_COMPARED = {
    "kind": "devices",
    "op": "operations",
    "prescale": "prescale factors",
    "postscale": "postscale factors",
    "root": "root ranks",
    "grouped": "groupings",
}


def _difference(first: Request, other: Request) -> tuple[str, object, object] | None:
    if first == other:
        return None
    values: list[tuple[str, object, object]] = [
        ("numbers of tensors", len(first.shapes), len(other.shapes)),
        ("data types", ", ".join(first.dtypes), ", ".join(other.dtypes)),
    ]
    shapes = "tensor shapes"
    differ = first.shapes != other.shapes
    if first.kind in (ALLGATHER, ALLTOALL):
        # The first dimension may differ between ranks, but the number of dimensions may not.
        shapes += " (beyond the first dimension)"
        differ = [(len(s), s[1:]) for s in first.shapes] != [(len(s), s[1:]) for s in other.shapes]
    if differ:
        values.append((shapes, _shown(first.shapes), _shown(other.shapes)))
    values += [(name, getattr(first, field), getattr(other, field)) for field, name in _COMPARED.items()]
    if first.kind == CHANGE_SETS:
        values.append(("ranks", list(first.splits), list(other.splits)))
    return next((value for value in values if value[1] != value[2]), None)


def _shown(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


_KNOWN: dict[tuple[str, str], type] = {(kind.__module__, kind.__qualname__): kind for kind in (Request, Agreement)}


def pack_message(value: object) -> bytes:
    """Serialize a message."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack_message(data: bytes | bytearray) -> Any:
    """Deserialize a message."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except CollectivesError:
        raise
    except Exception as error:
        raise CollectivesError(
            f"what came is not a message of a rank ({type(error).__name__}: {error}). Does something else use the ranks' ports?"
        ) from None


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        kind = _KNOWN.get((module, name))
        if kind is None:
            raise CollectivesError(
                f"what came names {module}.{name}, which no message of a rank does: it is not from one, and was not taken."
            )
        return kind
