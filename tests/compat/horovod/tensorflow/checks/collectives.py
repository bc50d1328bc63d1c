"""What the collectives return, against NumPy, eagerly and within a tf.function."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import tensorflow as tf

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
INTS = (np.uint8, np.int8, np.int16, np.int32, np.int64)
SHAPES = ((), (1,), (5,), (0,), (3, 4), (2, 0, 3), (2, 3, 2), (70000,))


def kinds(*dtypes):
    """Each shape in float32, and each type in what differs in how it is passed on: alone, small, and large. One knows nothing of
    the other, and each pair is an operation of TensorFlow's that is made once for this rank and once in a graph."""
    return [(np.float32, shape) for shape in SHAPES] + [
        (dtype, shape) for dtype in dtypes if dtype != np.float32 for shape in ((), (3, 4), (70000,))
    ]


def mine(hvd, shape, dtype, rank=None):
    """An array that differs between ranks and elements, of small whole numbers."""
    rank = hvd.rank() if rank is None else rank
    return (np.arange(int(np.prod(shape))) % 5 + rank + 1).reshape(shape).astype(dtype)


def everyone(hvd, shape, dtype):
    return [mine(hvd, shape, dtype, rank) for rank in range(hvd.size())]


def same(result, expected, exact=True):
    result = result.numpy() if tf.is_tensor(result) else np.asarray(result)
    expected = np.asarray(expected)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    if exact:
        np.testing.assert_array_equal(result, expected)
    else:
        np.testing.assert_allclose(result.astype(float), expected.astype(float), rtol=1e-2)


def both_ways(call, *given):
    """Return the result of the call, eagerly and in a graph."""
    tensors = [tf.constant(array) for array in given]
    yield call(*tensors)
    yield tf.function(call)(*tensors)


def check_allreduce_sums_all_ranks_in_every_dtype_and_shape(hvd):
    pairs = kinds(*FLOATS, *INTS)

    def call(*tensors):
        return [hvd.allreduce(t, op=hvd.Sum, name=f"sum.{i}") for i, t in enumerate(tensors)]

    for results in both_ways(call, *[mine(hvd, shape, dtype) for dtype, shape in pairs]):
        for (dtype, shape), result in zip(pairs, results, strict=True):
            same(result, sum(a.astype(np.float64) for a in everyone(hvd, shape, dtype)).astype(dtype))


def check_allreduce_computes_average_min_max_and_product(hvd):
    for dtype in (np.float32, np.int64, ml_dtypes.bfloat16):
        stacked = np.stack([a.astype(np.float64) for a in everyone(hvd, (4,), dtype)])
        expected = {
            hvd.Average: stacked.mean(0),
            hvd.Min: stacked.min(0),
            hvd.Max: stacked.max(0),
            hvd.Product: stacked.prod(0),
        }
        for op, value in expected.items():
            for result in both_ways(lambda t, op=op: hvd.allreduce(t, op=op), mine(hvd, (4,), dtype)):
                same(result, value.astype(dtype))


def check_allreduce_accepts_bool_and_complex_tensors(hvd):
    flags = np.array([hvd.rank() == 0, True, False])
    for result in both_ways(lambda t: hvd.allreduce(t, op=hvd.Max), flags):
        same(result, np.array([True, True, False]))
    numbers = np.array([1 + 2j * hvd.rank()], np.complex64)
    for result in both_ways(lambda t: hvd.allreduce(t, op=hvd.Sum), numbers):
        same(result, np.array([hvd.size() + 1j * hvd.size() * (hvd.size() - 1)], np.complex64))


def check_grouped_allreduce_accepts_mixed_dtypes(hvd):
    given = [mine(hvd, (3,), np.float32), mine(hvd, (2, 2), np.int64), mine(hvd, (4,), ml_dtypes.bfloat16)]
    for results in both_ways(lambda *tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum, name="mixed"), *given):
        for array, result in zip(given, results, strict=True):
            total = sum(a.astype(np.float64) for a in everyone(hvd, array.shape, array.dtype))
            same(result, total.astype(array.dtype))


def check_allgather_joins_different_numbers_of_rows(hvd):
    kinds = (*FLOATS, *INTS, np.bool_, np.uint16, np.complex64)
    parts = [[mine(hvd, (rank, 2), dtype, rank) for rank in range(hvd.size())] for dtype in kinds]
    own = [of_kind[hvd.rank()] for of_kind in parts]
    for results in both_ways(lambda *tensors: [hvd.allgather(t) for t in tensors], *own):
        for of_kind, result in zip(parts, results, strict=True):
            same(result, np.concatenate(of_kind))
    for result in both_ways(hvd.allgather, np.empty((0, 3), np.float32)):
        assert result.shape == (0, 3)
    given = [np.array([hvd.rank()]), np.full((hvd.rank(), 1), 7.0)]
    for first, second in both_ways(lambda *tensors: hvd.grouped_allgather(tensors), *given):
        same(first, np.arange(hvd.size()))
        same(second, np.full((sum(range(hvd.size())), 1), 7.0))


def check_broadcast_copies_the_tensor_of_the_root_to_all_ranks(hvd):
    root = hvd.size() - 1
    pairs = kinds(*FLOATS, *INTS, np.bool_)
    given = [mine(hvd, shape, dtype) for dtype, shape in pairs]
    for results in both_ways(lambda *tensors: [hvd.broadcast(t, root) for t in tensors], *given):
        for (dtype, shape), result in zip(pairs, results, strict=True):
            same(result, mine(hvd, shape, dtype, root))


def check_alltoall_sends_each_row_to_its_rank(hvd):
    size, rank = hvd.size(), hvd.rank()
    for result in both_ways(hvd.alltoall, np.arange(2 * size) + 100 * rank):
        same(result, np.array([100 * r + 2 * rank + i for r in range(size) for i in range(2)]))
    # Rank r sends i rows to rank i. It does not send its own last row.
    splits = list(range(size))
    for dtype in (np.float32, ml_dtypes.bfloat16):
        rows = np.full((sum(splits) + 1, 2), rank, dtype)
        for given in (splits, tf.constant(splits, tf.int32)):
            for received, counts in both_ways(lambda t, given=given: hvd.alltoall(t, splits=given), rows):
                same(counts, np.full(size, rank, np.int32))
                same(received, np.repeat(np.arange(size), rank)[:, None].repeat(2, 1).astype(dtype))


def check_reducescatter_gives_remaining_rows_to_the_first_ranks(hvd):
    size, rank = hvd.size(), hvd.rank()
    share = [3] + [2] * (size - 1)
    own = slice(sum(share[:rank]), sum(share[: rank + 1]))
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int32):
        rows = np.arange(2 * size + 1).reshape(-1, 1).astype(dtype)
        for summed, averaged in both_ways(lambda t: [hvd.reducescatter(t, op=hvd.Sum), hvd.reducescatter(t)], rows):
            same(summed, (rows[own] * size).astype(dtype))
            same(averaged, rows[own])
    given = [np.ones(size, np.float32), np.ones((size, 2), np.float32)]
    for one, two in both_ways(lambda *tensors: hvd.grouped_reducescatter(tensors, op=hvd.Sum), *given):
        same(one, np.full(1, size, np.float32))
        same(two, np.full((1, 2), size, np.float32))


def check_fp16_compression_returns_the_original_dtype(hvd):
    given = [np.full(3, 0.1, np.float32), np.array([2**20]), np.ones(hvd.size(), np.float32)]

    def call(small, whole, rows):
        fp16 = hvd.Compression.fp16
        return (
            hvd.allreduce(small, compression=fp16),
            hvd.allreduce(whole, op=hvd.Max, compression=fp16),
            hvd.grouped_allreduce([small], compression=fp16)[0],
            hvd.reducescatter(rows, compression=fp16),
        )

    for small, whole, grouped, rows in both_ways(call, *given):
        same(small, given[0], exact=False)
        assert small.numpy()[0] != given[0][0], "it was not sent as float16"
        same(whole, given[1])
        same(grouped, given[0], exact=False)
        same(rows, np.ones(1, np.float32))


def check_collectives_do_not_change_their_inputs(hvd):
    for shape in ((3,), (70000,)):
        kept = mine(hvd, shape, np.float32)
        tensor, variable = tf.constant(kept), tf.Variable(kept)
        hvd.allreduce(tensor, op=hvd.Sum)
        hvd.allreduce(variable, op=hvd.Sum)
        hvd.broadcast(variable, 0)
        tf.function(lambda t=tensor, v=variable: [hvd.allreduce(t), hvd.allreduce(v), hvd.broadcast(v, 0)])()
        same(tensor, kept)
        same(variable.read_value(), kept)


def check_result_is_not_overwritten_by_later_operations(hvd):
    # Large results share memory with the engine's arrays, so each result needs an array of its own.
    results = [hvd.allreduce(tf.fill([100_000], float(i)), op=hvd.Sum) for i in range(5)]
    for i, result in enumerate(results):
        assert (result.numpy() == i * hvd.size()).all()
    gathered = hvd.allgather(tf.fill([100_000], float(hvd.rank())))
    hvd.allgather(tf.zeros([100_000]))
    assert (gathered.numpy().reshape(hvd.size(), -1) == np.arange(hvd.size())[:, None]).all()


def check_collectives_accept_lists_arrays_and_keras_variables(hvd):
    import keras

    assert hvd.allreduce([1.0, 2.0], op=hvd.Sum).numpy().tolist() == [hvd.size(), 2.0 * hvd.size()]
    assert hvd.allreduce(np.float32(2.0), op=hvd.Sum).numpy() == 2 * hvd.size()
    variable = keras.Variable([float(hvd.rank())])
    assert hvd.allgather(variable).numpy().tolist() == list(range(hvd.size()))
    # A transposed array is not contiguous.
    wide = np.arange(6.0).reshape(2, 3) + hvd.rank()
    same(hvd.broadcast(wide.T, 0), (wide - hvd.rank()).T)
