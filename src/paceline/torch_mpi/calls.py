"""torch's collectives as MPI calls. Each function checks tensors and returns a `Call`.

Contiguous tensors of MPI's types are read and written in place. Other tensors are copied. Importing this module loads
torch and mpi4py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from mpi4py import MPI

from paceline.collectives.errors import CollectivesError
from paceline.torch_mpi import buffers
from paceline.torch_mpi.buffers import Operation
from paceline.torch_mpi.comm_thread import Call

if TYPE_CHECKING:
    from mpi4py.MPI import InPlaceType
    from torch.distributed import ReduceOp

Tensor = torch.Tensor
T = TypeVar("T")

#: Bytes of one piece of a long reduction. A piece fits into the CPU's cache, and needs no memory from Open MPI. Measured with
#: 2 processes on 2 cores: 64 MiB take 5.9 ms instead of 26 ms. Pieces from 256 KiB to 4 MiB are equally fast.
PIECE_BYTES = 1 << 20


def only(items: Sequence[T], what: str) -> T:
    """Return the only tensor of a list, or raise CollectivesError."""
    if len(items) != 1:
        raise CollectivesError(f"{what} takes one tensor on each rank, not {len(items)}.")
    return items[0]


def all_reduce(tensors: Sequence[Tensor], op: Operation, size: int) -> Call:
    """Return a call that replaces each tensor by its reduction over all ranks."""
    if any(tensor.layout == torch.sparse_coo for tensor in tensors):
        return _all_reduce_sparse(only(tensors, "all_reduce"), op, size)
    _check(tensors)
    # Check here: an unsupported reduction then raises an error before the other ranks wait for this rank in `run`.
    kinds = [buffers.reduction(op, tensor.dtype) for tensor in tensors]

    def run(comm: MPI.Comm) -> None:
        for tensor, kind in zip(tensors, kinds, strict=True):
            memory = buffers.wide(tensor, kind)
            _reduce_in_place(comm, memory, kind)
            buffers.average(memory, op, size)
            buffers.put(memory, tensor)

    return Call(text=_text("all_reduce", tensors, op), run=run, outputs=list(tensors))


def reduce(tensors: Sequence[Tensor], op: Operation, root: int, size: int) -> Call:
    """Return a call that replaces the tensor on rank `root` by all ranks' reduction."""
    tensor = only(tensors, "reduce")
    _check(tensors)
    kind = buffers.reduction(op, tensor.dtype)

    def run(comm: MPI.Comm) -> None:
        memory = buffers.wide(tensor, kind)
        if comm.rank != root:
            comm.Reduce(buffers.numbers(memory), None, op=kind, root=root)
            return
        # Only the root may pass IN_PLACE to MPI.
        comm.Reduce(MPI.IN_PLACE, buffers.numbers(memory), op=kind, root=root)
        buffers.average(memory, op, size)
        buffers.put(memory, tensor)

    return Call(text=_text(f"reduce to rank {root}", tensors, op), run=run, outputs=list(tensors))


def broadcast(tensors: Sequence[Tensor], root: int) -> Call:
    """Return a call that copies rank `root`'s tensors to all ranks."""
    tensor = only(tensors, "broadcast")
    _check(tensors)

    def run(comm: MPI.Comm) -> None:
        memory = buffers.plain(tensor)
        comm.Bcast(buffers.elements(memory), root=root)
        if comm.rank != root:
            buffers.put(memory, tensor)

    return Call(text=_text(f"broadcast from rank {root}", tensors), run=run, outputs=list(tensors))


def all_gather(outputs: Sequence[Tensor], tensor: Tensor, size: int) -> Call:
    """Return a call that fills `outputs[r]` with rank r's tensor."""
    _check_alike([tensor, *outputs], "all_gather")
    _expect(len(outputs) == size, f"all_gather got {len(outputs)} output tensors in a group of {size} ranks")
    sizes = [output.numel() for output in outputs]

    def run(comm: MPI.Comm) -> None:
        mine = sizes[comm.rank]
        _expect(tensor.numel() == mine, f"all_gather of {tensor.numel()} elements into an output of {mine}")
        flat = tensor.new_empty(sum(sizes))
        comm.Allgatherv(buffers.elements(buffers.plain(tensor)), buffers.pieces(flat, sizes))
        buffers.distribute(flat, outputs)

    # Put the sizes into the text. The ranks compare the text before any data moves, so a rank with other sizes gets an error.
    return Call(text=f"all_gather({tensor.dtype}, sizes {sizes})", run=run, outputs=[list(outputs)])


def all_gather_single(outputs: Sequence[Tensor], tensors: Sequence[Tensor], size: int) -> Call:
    """Return a call that fills `outputs[i]` with the concatenation of all ranks' `tensors[i]`."""
    for output, tensor in zip(outputs, tensors, strict=True):
        _check_alike([output, tensor], "all_gather_into_tensor")
        _expect(
            output.numel() == tensor.numel() * size,
            f"all_gather_into_tensor of {tensor.numel()} elements on {size} ranks into an output of {output.numel()}",
        )

    def run(comm: MPI.Comm) -> None:
        for output, tensor in zip(outputs, tensors, strict=True):
            memory = buffers.room(output)
            source = buffers.plain(tensor)
            comm.Allgather(_source(source, memory, comm.rank), buffers.elements(memory))
            buffers.put(memory, output)

    return Call(text=_text("all_gather_into_tensor", tensors), run=run, outputs=list(outputs))


def gather(outputs: Sequence[Tensor], tensor: Tensor, root: int, size: int) -> Call:
    """Return a call that fills `outputs[r]` on rank `root` with rank r's tensor."""
    _check_alike([tensor, *outputs], "gather")

    def run(comm: MPI.Comm) -> None:
        source = buffers.elements(buffers.plain(tensor))
        if comm.rank != root:
            comm.Gatherv(source, None, root=root)
            return
        sizes = [output.numel() for output in outputs]
        flat = tensor.new_empty(sum(sizes))
        comm.Gatherv(source, buffers.pieces(flat, sizes), root=root)
        buffers.distribute(flat, outputs)

    text = f"gather to rank {root} of {size}({tensor.dtype}, {tensor.numel()} elements)"
    return Call(text=text, run=run, outputs=list(outputs))


def scatter(output: Tensor, tensors: Sequence[Tensor], root: int, size: int) -> Call:
    """Return a call that fills `output` on rank r with `tensors[r]` of rank `root`."""
    _check_alike([output, *tensors], "scatter")

    def run(comm: MPI.Comm) -> None:
        # MPI overwrites the whole output, so don't copy the output's old values into the buffer.
        memory = buffers.room(output)
        source = None
        if comm.rank == root:
            flat = buffers.joined(tensors)
            source = buffers.pieces(flat, [tensor.numel() for tensor in tensors])
        comm.Scatterv(source, buffers.elements(memory), root=root)
        buffers.put(memory, output)

    text = f"scatter from rank {root} of {size}({output.dtype}, {output.numel()} elements)"
    return Call(text=text, run=run, outputs=[output])


def reduce_scatter(output: Tensor, tensors: Sequence[Tensor], op: Operation, size: int) -> Call:
    """Return a call that fills `output` on rank r with the reduced `tensors[r]`."""
    _check_alike([output, *tensors], "reduce_scatter")
    _expect(len(tensors) == size, f"reduce_scatter got {len(tensors)} input tensors in a group of {size} ranks")
    kind = buffers.reduction(op, output.dtype)
    sizes = [tensor.numel() for tensor in tensors]

    def run(comm: MPI.Comm) -> None:
        mine = sizes[comm.rank]
        _expect(output.numel() == mine, f"reduce_scatter of {mine} elements into an output of {output.numel()}")
        source = buffers.wide(buffers.joined(tensors), kind)
        memory = source.new_empty(mine)
        comm.Reduce_scatter(buffers.numbers(source), buffers.numbers(memory), sizes, op=kind)
        buffers.average(memory, op, size)
        buffers.put(memory, output)

    # Leave the output out of the text: the output's size differs between ranks, but all ranks must have an equal text.
    return Call(text=_text(f"reduce_scatter in sizes {sizes}", [output][:0], op), run=run, outputs=[output])


def reduce_scatter_single(outputs: Sequence[Tensor], tensors: Sequence[Tensor], op: Operation, size: int) -> Call:
    """Return a call that fills each output with this rank's part of the reduced tensor."""
    for output, tensor in zip(outputs, tensors, strict=True):
        _check_alike([output, tensor], "reduce_scatter_tensor")
        _expect(
            output.numel() * size == tensor.numel(),
            f"reduce_scatter_tensor of {tensor.numel()} elements on {size} ranks into an output of {output.numel()}",
        )
    kinds = [buffers.reduction(op, tensor.dtype) for tensor in tensors]

    def run(comm: MPI.Comm) -> None:
        for output, tensor, kind in zip(outputs, tensors, kinds, strict=True):
            source = buffers.wide(tensor, kind)
            memory = source.new_empty(output.numel())
            comm.Reduce_scatter_block(buffers.numbers(source), buffers.numbers(memory), op=kind)
            buffers.average(memory, op, size)
            buffers.put(memory, output)

    return Call(text=_text("reduce_scatter_tensor", tensors, op), run=run, outputs=list(outputs))


def all_to_all(outputs: Sequence[Tensor], tensors: Sequence[Tensor], size: int) -> Call:
    """Return a call that fills `outputs[r]` with the tensor from rank r."""
    _check_alike([*outputs, *tensors], "all_to_all")
    counts = f"all_to_all got {len(tensors)} input and {len(outputs)} output tensors in a group of {size} ranks"
    _expect(len(tensors) == len(outputs) == size, counts)

    def run(comm: MPI.Comm) -> None:
        sent, got = [tensor.numel() for tensor in tensors], [output.numel() for output in outputs]
        source, memory = buffers.joined(tensors), tensors[0].new_empty(sum(got))
        _exchange(comm, source, sent, memory, got)
        buffers.distribute(memory, outputs)

    # Leave sizes out of the text, because ranks may have different sizes. `_exchange` compares sent with expected sizes.
    return Call(text=f"all_to_all({tensors[0].dtype})", run=run, outputs=list(outputs))


def all_to_all_single(
    output: Tensor, tensor: Tensor, output_splits: Sequence[int], splits: Sequence[int], size: int
) -> Call:
    """Return a call that exchanges rows with all ranks. Splits: rows per rank, or [] if equal."""
    _check_alike([output, tensor], "all_to_all_single")
    got, sent = _elements(output, output_splits, size), _elements(tensor, splits, size)

    def run(comm: MPI.Comm) -> None:
        memory = buffers.room(output)
        _exchange(comm, buffers.plain(tensor), sent, memory, got)
        buffers.put(memory, output)

    return Call(text=f"all_to_all_single({tensor.dtype})", run=run, outputs=[output])


def barrier() -> Call:
    return Call(text="barrier", run=None, outputs=[])


def _all_reduce_sparse(tensor: Tensor, op: Operation, size: int) -> Call:
    kind = buffers.kind_of(op)
    if kind not in (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG):
        raise CollectivesError(f"ReduceOp.{kind.name} of a sparse tensor: the backend 'mpi' has SUM and AVG for them.")
    if tensor.device.type != "cpu":
        buffers.check(tensor)

    def run(comm: MPI.Comm) -> None:
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().contiguous(), mine.values().contiguous()
        counts = comm.allgather(indices.shape[1])
        # Transpose the indices from (dimension, entry) to (entry, dimension), because MPI concatenates the entries of the ranks.
        entries = indices.t().contiguous()
        # `length`: number of values in one entry. A rank without entries computes it from the tensor's shape.
        width, length = entries.shape[1], values[:1].numel() if counts[comm.rank] else math.prod(values.shape[1:])
        all_entries = entries.new_empty(sum(counts), width)
        all_values = values.new_empty(sum(counts), *values.shape[1:])
        comm.Allgatherv(buffers.elements(entries), buffers.pieces(all_entries, [n * width for n in counts]))
        comm.Allgatherv(buffers.elements(values), buffers.pieces(all_values, [n * length for n in counts]))
        total = torch.sparse_coo_tensor(all_entries.t(), all_values, tensor.shape, check_invariants=False).coalesce()
        if kind == torch.distributed.ReduceOp.AVG:
            total = total / size
        # Copy into `tensor` itself: a copy into `tensor.detach()` would not change it, because indices and values are separate.
        with torch.no_grad():
            tensor.copy_(total)

    return Call(text=f"all_reduce(sparse {tensor.dtype} {tuple(tensor.shape)}, {kind.name})", run=run, outputs=[tensor])


def _reduce_in_place(comm: MPI.Comm, memory: Tensor, kind: MPI.Op) -> None:
    flat = memory.view(-1)
    for piece in torch.split(flat, PIECE_BYTES // memory.element_size()) if memory.nbytes > PIECE_BYTES else (flat,):
        # Reduce in place, because a second buffer would need as much memory as the first.
        comm.Allreduce(MPI.IN_PLACE, buffers.numbers(piece), op=kind)


def _exchange(comm: MPI.Comm, source: Tensor, sent: list[int], memory: Tensor, got: list[int]) -> None:
    # Compare the sizes first. If a rank expects another size, MPI would overwrite memory or end the process.
    coming = comm.alltoall(sent)
    wrong = [rank for rank in range(comm.size) if coming[rank] != got[rank]]
    if any(comm.allgather(bool(wrong))):
        where = f"rank {wrong[0]} sends {coming[wrong[0]]} elements, {got[wrong[0]]} are expected" if wrong else ""
        raise CollectivesError(
            f"all_to_all: the ranks' input and output sizes don't fit together ({where or 'seen on another rank'}). "
            "What rank a sends to rank b has to be as large as what b has for a in its outputs."
        )
    comm.Alltoallv(buffers.pieces(source, sent), buffers.pieces(memory, got))


def _elements(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        _expect(rows % size == 0, f"all_to_all_single: {rows} rows can't be split equally among {size} ranks")
        return [tensor.numel() // size] * size
    _expect(
        len(splits) == size and sum(splits) == rows,
        f"all_to_all_single: the splits {list(splits)} don't divide {rows} rows among {size} ranks",
    )
    return [split * (tensor.numel() // rows if rows else 0) for split in splits]


def _source(source: Tensor, memory: Tensor, rank: int) -> buffers.MpiBuffer | InPlaceType:
    # If the buffer already contains this rank's part, as with FSDP, use IN_PLACE: MPI forbids overlapping arguments.
    if source.numel() and source.data_ptr() == memory.data_ptr() + rank * source.numel() * source.element_size():
        return MPI.IN_PLACE
    return buffers.elements(source)


def _check(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        buffers.check(tensor)


def _check_alike(tensors: Sequence[Tensor], what: str) -> None:
    """Raise CollectivesError unless all tensors are dense, in CPU memory and of one dtype."""
    _check(tensors)
    dtypes = {tensor.dtype for tensor in tensors}
    _expect(len(dtypes) == 1, f"{what} got tensors of different dtypes: {', '.join(sorted(map(str, dtypes)))}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CollectivesError(f"{otherwise}.")


def _text(what: str, tensors: Sequence[Tensor], op: Operation | None = None) -> str:
    return _sentence(
        what, tuple((tensor.numel(), tensor.dtype) for tensor in tensors), None if op is None else buffers.kind_of(op)
    )


# Cache the texts: each call needs one, and a training step repeats a few texts.
@functools.lru_cache(maxsize=1024)
def _sentence(what: str, tensors: tuple[tuple[int, torch.dtype], ...], kind: ReduceOp.RedOpType | None) -> str:
    if kind is not None:
        what += f" {kind.name}"
    listed = [f"{count} of {str(dtype).removeprefix('torch.')}" for count, dtype in tensors]
    more = f" and {len(tensors) - 4} more, {sum(count for count, _ in tensors)} in all" if len(tensors) > 4 else ""
    return f"{what}({', '.join(listed[:4])}{more})"
