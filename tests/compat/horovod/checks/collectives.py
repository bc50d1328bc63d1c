"""What the collectives return, against what the ranks gave."""

from __future__ import annotations

import pytest
import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (1,), (5,), (0,), (3, 4), (2, 0, 3), (2, 3, 2))


def mine(hvd, shape, dtype, rank=None):
    """A tensor that differs between ranks and elements, of small whole numbers."""
    rank = hvd.rank() if rank is None else rank
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count) % 5 + rank + 1).reshape(shape).to(dtype)


def everyone(hvd, shape, dtype):
    return [mine(hvd, shape, dtype, rank) for rank in range(hvd.size())]


def check_allreduce_sums_all_ranks_in_every_dtype_and_shape(hvd):
    for dtype in FLOATS + INTS:
        for shape in SHAPES:
            given = mine(hvd, shape, dtype)
            result = hvd.allreduce(given, op=hvd.Sum, name=f"sum.{dtype}.{shape}")
            assert result.dtype == dtype
            assert torch.equal(result, sum(t.double() for t in everyone(hvd, shape, dtype)).to(dtype)), (dtype, shape)
            assert torch.equal(given, mine(hvd, shape, dtype)), "the given tensor was changed"


def check_allreduce_computes_min_max_and_product(hvd):
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        stacked = torch.stack(everyone(hvd, (4,), dtype))
        given = mine(hvd, (4,), dtype)
        assert torch.equal(hvd.allreduce(given, op=hvd.Min), stacked.amin(0))
        assert torch.equal(hvd.allreduce(given, op=hvd.Max), stacked.amax(0))
        assert torch.equal(hvd.allreduce(given, op=hvd.Product), stacked.double().prod(0).to(dtype))


def check_in_place_allreduce_returns_the_given_tensor(hvd):
    for given in (mine(hvd, (3, 4), torch.float32), mine(hvd, (4, 3), torch.float32).t()):
        expected = hvd.allreduce(given, op=hvd.Sum)
        assert hvd.allreduce_(given, op=hvd.Sum) is given
        assert torch.equal(given, expected)
        assert hvd.synchronize(hvd.broadcast_async_(given, 0)) is given


def check_collectives_accept_noncontiguous_tensors(hvd):
    wide = mine(hvd, (4, 6), torch.float32)
    for view in (wide[:, ::2], wide.t(), wide[1]):
        assert torch.equal(hvd.allreduce(view, op=hvd.Average), hvd.allreduce(view.clone(), op=hvd.Average))
        assert torch.equal(hvd.broadcast(view, hvd.size() - 1), hvd.broadcast(view.contiguous(), hvd.size() - 1))
        assert torch.equal(hvd.allgather(view), hvd.allgather(view.contiguous()))


def check_named_operations_may_be_submitted_in_any_order(hvd):
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(5):
        order = torch.randperm(40, generator=generator).tolist()
        handles = {i: hvd.allreduce_async(torch.full((i + 1,), float(i)), name=f"any.{i}", op=hvd.Sum) for i in order}
        for i, handle in handles.items():
            assert torch.equal(hvd.synchronize(handle), torch.full((i + 1,), float(i * hvd.size())))


def check_grouped_allreduce_accepts_mixed_dtypes(hvd):
    given = [mine(hvd, (3,), torch.float32), mine(hvd, (2, 2), torch.int64), mine(hvd, (4,), torch.bfloat16)]
    kept = [tensor.clone() for tensor in given]
    results = hvd.grouped_allreduce(given, op=hvd.Sum, name="mixed")
    for tensor, before, result in zip(given, kept, results, strict=True):
        assert torch.equal(tensor, before)
        assert torch.equal(result, hvd.allreduce(before, op=hvd.Sum))
    assert all(a is b for a, b in zip(hvd.grouped_allreduce_(given, op=hvd.Sum), given, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given, results, strict=True))
    handle = hvd.grouped_allreduce_async(kept, op=hvd.Sum)
    assert all(torch.equal(a, b) for a, b in zip(hvd.synchronize(handle), results, strict=True))
    assert all(a is b for a, b in zip(hvd.synchronize(hvd.grouped_allreduce_async_(kept)), kept, strict=True))


def check_allgather_joins_different_numbers_of_rows(hvd):
    for dtype in (*FLOATS, *INTS, torch.bool):
        parts = [mine(hvd, (rank, 2), dtype, rank) for rank in range(hvd.size())]
        assert torch.equal(hvd.allgather(parts[hvd.rank()], name=f"rows.{dtype}"), torch.cat(parts))
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
    first, second = hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.full((hvd.rank(), 1), 7.0)])
    assert first.tolist() == list(range(hvd.size()))
    assert second.shape == (sum(range(hvd.size())), 1)
    assert hvd.synchronize(hvd.grouped_allgather_async([torch.tensor([3])]))[0].tolist() == [3] * hvd.size()


def check_broadcast_copies_the_tensor_of_the_root_to_all_ranks(hvd):
    for root in range(hvd.size()):
        for dtype in (*FLOATS, *INTS, torch.bool):
            for shape in SHAPES:
                given = mine(hvd, shape, dtype)
                assert torch.equal(hvd.broadcast(given, root), mine(hvd, shape, dtype, root))
                assert torch.equal(given, mine(hvd, shape, dtype))
        assert hvd.broadcast_(torch.tensor(hvd.rank()), root).item() == root


def check_alltoall_sends_each_row_to_its_rank(hvd):
    size, rank = hvd.size(), hvd.rank()
    equal = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert equal.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    # Rank r sends i rows to rank i. It does not send its own last row.
    splits = list(range(size))
    rows = torch.full((sum(splits) + 1, 2), float(rank))
    received, counts = hvd.alltoall(rows, splits=splits)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [rank] * size
    assert received[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rank)]
    other, _ = hvd.alltoall(rows.bfloat16(), splits=torch.tensor(splits, dtype=torch.int32))
    assert torch.equal(other.float(), received)
    assert isinstance(hvd.synchronize(hvd.alltoall_async(rows[:0])), torch.Tensor)
    assert len(hvd.synchronize(hvd.alltoall_async(rows, splits))) == 2


def check_reducescatter_gives_remaining_rows_to_the_first_ranks(hvd):
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        rows = torch.arange(2 * size + 1).reshape(-1, 1).to(dtype)
        share = [3] + [2] * (size - 1)
        start = sum(share[:rank])
        result = hvd.reducescatter(rows, op=hvd.Sum)
        assert torch.equal(result, rows[start : start + share[rank]] * size)
        assert torch.equal(hvd.reducescatter(rows), rows[start : start + share[rank]])
    one, two = hvd.grouped_reducescatter([torch.ones(size), torch.ones(size, 2)], op=hvd.Sum)
    assert one.tolist() == [float(size)]
    assert two.shape == (1, 2)
    assert hvd.synchronize(hvd.reducescatter_async(torch.ones(size), op=hvd.Sum)).tolist() == [size]
    assert len(hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(size)]))) == 1


def check_fp16_compression_returns_the_original_dtype(hvd):
    result = hvd.allreduce(torch.full((3,), 0.1), compression=hvd.Compression.fp16)
    assert result.dtype == torch.float32
    assert torch.allclose(result, torch.full((3,), 0.1), atol=1e-4)
    assert hvd.allreduce(torch.tensor([2**20]), op=hvd.Max, compression=hvd.Compression.fp16).item() == 2**20
    assert hvd.grouped_allreduce([torch.ones(2)], compression=hvd.Compression.fp16)[0].dtype == torch.float32
    assert hvd.reducescatter(torch.ones(hvd.size()), compression=hvd.Compression.fp16).dtype == torch.float32


def check_sparse_allreduce_averages_values_at_equal_indices(hvd):
    for op in (hvd.Average, hvd.Sum):
        given = torch.sparse_coo_tensor([[0, hvd.rank() + 1]], torch.ones(2, 3), (6, 3), check_invariants=True)
        finish = hvd.sparse_allreduce_async(given, "sparse", op)
        assert callable(finish)
        expected = torch.zeros(6, 3)
        expected[0] = hvd.size()
        expected[1 : hvd.size() + 1] = 1
        assert torch.allclose(finish().to_dense(), expected / (hvd.size() if op == hvd.Average else 1))
    for op in (hvd.Max, hvd.Min, hvd.Product, hvd.Adasum):
        with pytest.raises(NotImplementedError, match="op=hvd"):
            hvd.sparse_allreduce_async(given, "sparse", op)


def check_adasum_adds_orthogonal_tensors_and_averages_parallel_ones(hvd):
    if hvd.size() == 3:
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return
    own = torch.zeros(4)
    own[hvd.rank()] = hvd.rank() + 1.0
    expected = torch.tensor([float(i + 1) if i < hvd.size() else 0.0 for i in range(4)])
    assert torch.allclose(hvd.allreduce(own, op=hvd.Adasum), expected)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.allclose(
            hvd.allreduce(torch.full((3,), 2.0, dtype=dtype), op=hvd.Adasum).double(), torch.full((3,), 2.0).double()
        )


def check_objects_of_any_type_are_broadcast_and_gathered(hvd):
    for root in range(hvd.size()):
        assert hvd.broadcast_object({"lr": 0.1, "näme\n": [1]} if hvd.rank() == root else None, root) == {
            "lr": 0.1,
            "näme\n": [1],
        }
        assert hvd.broadcast_object(hvd.rank() if hvd.rank() == root else "other", root, name="obj") == root
    assert hvd.allgather_object([None, "x" * 1000, 3, {}][hvd.rank()]) == [None, "x" * 1000, 3, {}][: hvd.size()]
    assert hvd.allgather_object(b"", name="b") == [b""] * hvd.size()
