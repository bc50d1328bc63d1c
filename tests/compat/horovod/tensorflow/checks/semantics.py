"""The semantics that are easy to get wrong, as far as they apply to TensorFlow."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf


def check_average_is_the_default_operation_and_op_excludes_average(hvd):
    assert hvd.allreduce(tf.constant([float(hvd.rank())])).numpy().tolist() == [(hvd.size() - 1) / 2]
    for call in (hvd.allreduce, lambda t, **how: hvd.grouped_allreduce([t], **how)):
        with pytest.raises(ValueError, match="The op parameter supersedes average"):
            call(tf.ones(1), average=True, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(tf.ones(1), average=False).numpy().tolist() == [hvd.size()]
    with pytest.raises(ValueError, match=r"op=7 is not an operation.*hvd\.Sum"):
        hvd.allreduce(tf.ones(1), op=7)
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


def check_positional_arguments_of_allreduce_are_those_of_horovod(hvd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        given = tf.ones(1), False, "", "", hvd.Compression.none
        assert hvd.allreduce(*given).numpy() == hvd.size()
    given = tf.ones(1), None, "", "", hvd.Compression.none, hvd.Sum, 1.0, 0.5, "place"
    assert hvd.allreduce(*given).numpy() == hvd.size() / 2


def check_averaged_integers_are_truncated_towards_zero(hvd):
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) // 2
    for dtype in (tf.int32, tf.int64):
        given = tf.constant([rank + 1, -rank - 1], dtype)
        assert hvd.allreduce(given).numpy().tolist() == [int(total / size), -int(total / size)]
        scaled = hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.6).numpy().tolist()
        each = sum(int((r + 1) * 0.6) for r in range(size))
        assert scaled == [each, -each]
    assert hvd.allreduce(tf.fill([2], tf.constant(60000.0, tf.float16))).numpy().tolist() == [60000.0, 60000.0]


def check_mismatched_tensors_raise_on_every_rank_and_later_operations_work(hvd):
    if hvd.size() == 1:
        return
    rank = hvd.rank()
    wrong = [
        lambda: hvd.allreduce(tf.ones(2 + (rank > 0)), name="shape"),
        lambda: hvd.allreduce(tf.ones(2, tf.float32 if rank else tf.float64), name="dtype"),
        lambda: hvd.allreduce(tf.ones(2, tf.bfloat16 if rank else tf.uint16), name="bits"),
        lambda: hvd.allreduce(tf.ones(2), name="op", op=hvd.Sum if rank else hvd.Max),
        lambda: hvd.allreduce(tf.ones(2), name="pre", prescale_factor=1.0 + rank),
        lambda: hvd.broadcast(tf.ones(2), min(rank, 1), name="root"),
        lambda: hvd.allgather(tf.ones([2, 2 + (rank > 0)]), name="columns"),
        lambda: hvd.grouped_allreduce([tf.ones(2)] * (1 + (rank > 0)), name="number"),
    ]
    for call in wrong:
        # Scripts may catch either of these two exceptions.
        for caught in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
            with pytest.raises(caught, match=r"(?i)mismatch"):
                call()
        assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [hvd.size()] * 2


def check_invalid_arguments_on_one_rank_raise_value_error(hvd):
    size = hvd.size()
    rows = tf.ones(2 * size)
    for splits in (
        tf.ones(size, tf.int64),
        [2 * size + 1] + [0] * (size - 1),
        [1] * (size + 1),
        [-1] * size,
    ):
        for caught in (ValueError, tf.errors.InvalidArgumentError):
            with pytest.raises(caught, match="splits"):
                hvd.alltoall(rows, splits=splits)
    if size > 1:
        with pytest.raises(ValueError, match="share equally"):
            hvd.alltoall(tf.ones(2 * size + 1))
    with pytest.raises(ValueError, match="strings can't be sent"):
        hvd.allreduce(tf.constant(["a"]))
    with pytest.raises(ValueError, match="is not among"):
        hvd.broadcast(rows, size)


def check_scalar_tensors_are_reduced_but_not_gathered(hvd):
    assert hvd.allreduce(tf.constant(2.0), op=hvd.Sum).numpy() == 2 * hvd.size()
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.allgather(tf.constant(1.0))
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.alltoall(tf.constant(1.0))
    for caught in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
        with pytest.raises(caught, match="rank-zero tensor"):
            hvd.reducescatter(tf.constant(1.0))


def check_reducescatter_refuses_operations_other_than_average_and_sum(hvd):
    with pytest.raises(hvd.HorovodInternalError, match="currently only supports AVERAGE and SUM"):
        hvd.reducescatter(tf.ones(4), op=hvd.Max)


def check_process_sets_are_created_used_and_removed(hvd):
    size, rank = hvd.size(), hvd.rank()
    assert hvd.size_op().numpy() == size
    with pytest.raises(ValueError, match="no process set 77"):
        hvd.size_op(77)
    if size == 1:
        return
    ranks = [size - 1, 0] if size > 2 else [1]
    made = hvd.add_process_set(hvd.ProcessSet(ranks))
    number = made.process_set_id
    assert hvd.size_op(number).numpy() == len(ranks)
    assert hvd.process_set_included_op(number).numpy() == (rank in ranks)

    @tf.function
    def averaged(t):
        return hvd.allreduce(t, process_set=made), hvd.broadcast(t, size - 1, process_set=made), hvd.size_op(number)

    given = tf.constant([float(rank)])
    if rank in ranks:
        for mean, sent, count in (averaged(given), averaged(given)):
            assert mean.numpy() == sum(ranks) / len(ranks)
            # `root_rank` is a rank of the world, not a rank within the process set.
            assert sent.numpy() == size - 1
            assert count.numpy() == len(ranks)
        assert hvd.allgather(given, process_set=made).numpy().tolist() == [float(r) for r in sorted(ranks)]
        assert hvd.broadcast_object(rank if rank == size - 1 else None, size - 1, process_set=made) == size - 1
        assert hvd.allgather_object(rank, process_set=made) == sorted(ranks)
        variable = tf.Variable(float(rank))
        hvd.broadcast_variables([variable], size - 1, process_set=made)
        assert variable.numpy() == size - 1
    else:
        for call in (
            lambda: hvd.allreduce(given, process_set=made),
            lambda: hvd.broadcast(given, size - 1, process_set=made),
            lambda: hvd.broadcast_object(1, size - 1, process_set=made),
        ):
            with pytest.raises(ValueError, match="is not a member of the provided process set"):
                call()
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = variable * float(rank)
    tape = hvd.DistributedGradientTape(tape, process_set=made)
    # A rank outside the process set keeps its own gradients.
    assert tape.gradient(loss, variable).numpy() == (sum(ranks) / len(ranks) if rank in ranks else rank)
    assert hvd.remove_process_set(made) is True
    assert made.process_set_id is None


def check_joined_ranks_contribute_zeros(hvd):
    size, rank = hvd.size(), hvd.rank()
    reduced = tf.function(lambda t: hvd.allreduce(t, name="joined"))
    for step in range(rank + 1):
        # In step s, all ranks below s have joined. Averages are still divided by the number of all ranks.
        left = range(step, size)
        call = reduced if step % 2 else (lambda t: hvd.allreduce(t, name="joined"))
        np.testing.assert_allclose(call(tf.fill([2], rank + 1.0)), [sum(r + 1 for r in left) / size] * 2)
    last = (hvd.join if rank % 2 else tf.function(hvd.join))().numpy()
    assert last == size - 1
    if size > 1:
        if rank > 0:
            unnamed, graph = (lambda: hvd.allgather(tf.ones(2))), tf.function(lambda: hvd.broadcast(tf.ones(2), 0))
            for call in (lambda: hvd.allgather(tf.ones(2), name="while joined"), unnamed, graph):
                for caught in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
                    with pytest.raises(caught, match="not supported with Join"):
                        call()
        assert hvd.join().numpy() in range(size)
        # Operations that only some ranks called must not disturb the numbering of unnamed operations.
        assert hvd.allgather(tf.constant([rank])).numpy().tolist() == list(range(size))


def check_unnamed_operations_are_matched_by_their_order(hvd):
    for i in range(5):
        assert hvd.allreduce(tf.constant(float(i)), op=hvd.Sum).numpy() == i * hvd.size()


def check_grouped_operation_without_tensors_returns_an_empty_list(hvd):
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_allgather([]) == []
    assert hvd.grouped_reducescatter([]) == []
    assert hvd.broadcast_([], 0) == []


def check_adasum_adds_orthogonal_tensors_and_averages_parallel_ones(hvd):
    if hvd.size() == 3:
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(tf.ones(2), op=hvd.Adasum)
        return
    own = np.zeros(4, np.float32)
    own[hvd.rank()] = hvd.rank() + 1.0
    expected = [float(i + 1) if i < hvd.size() else 0.0 for i in range(4)]
    np.testing.assert_allclose(hvd.allreduce(tf.constant(own), op=hvd.Adasum), expected)
    graph = tf.function(lambda t: hvd.allreduce(t, op=hvd.Adasum))
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        parallel = tf.cast(tf.fill([3], 2.0), dtype)
        np.testing.assert_allclose(tf.cast(graph(parallel), tf.float32), [2.0] * 3)
    with pytest.raises(NotImplementedError, match="process set"):
        hvd.allreduce(tf.ones(2), op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
    with pytest.raises(NotImplementedError, match=r"tf\.IndexedSlices"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])), op=hvd.Adasum)
    assert hvd.check_num_rank_power_of_2(4)
    assert not hvd.check_num_rank_power_of_2(3)


def check_sparse_allreduce_averages_values_at_equal_indices(hvd):
    size, rank = hvd.size(), hvd.rank()

    def reduced(values, indices, op=hvd.Average, **how):
        result = hvd.allreduce(tf.IndexedSlices(values, indices, tf.constant([9, 2])), op=op, **how)
        assert isinstance(result, tf.IndexedSlices)
        return tf.convert_to_tensor(result)

    # Rank r has r + 1 rows, and all ranks have row 0.
    values, indices = tf.fill([rank + 1, 2], 2.0), tf.range(rank + 1)
    expected = np.zeros((9, 2))
    for r in range(size):
        expected[: r + 1] += 2.0
    for call in (reduced, tf.function(reduced)):
        np.testing.assert_allclose(call(values, indices), expected / size, rtol=1e-6)
        np.testing.assert_allclose(call(values, indices, op=hvd.Sum), expected)
        # Compression applies to the values of a sparse tensor.
        np.testing.assert_allclose(call(values, indices, compression=hvd.Compression.fp16), expected / size, rtol=1e-6)
        for op in (hvd.Max, hvd.Min, hvd.Product):
            with pytest.raises(NotImplementedError, match=r"Average or op=hvd\.Sum only"):
                call(values, indices, op=op)
            for others in ([], [tf.ones(2)]):

                def grouped(values, indices, op=op, others=others):
                    return hvd.grouped_allreduce([tf.IndexedSlices(values, indices), *others], op=op)

                for group in (grouped, tf.function(grouped)):
                    with pytest.raises(NotImplementedError, match=r"Average or op=hvd\.Sum only"):
                        group(values, indices)
        with pytest.raises(NotImplementedError, match="prescale_factor"):
            call(values, indices, prescale_factor=2.0)
    # Dense integers are rounded towards 0. The values of sparse tensors become floats, as in a TensorFlow division of integers.
    whole = hvd.allreduce(tf.IndexedSlices(tf.constant([[1, -3]]), tf.constant([rank]), tf.constant([size, 2])))
    assert whole.values.dtype == tf.float64
    np.testing.assert_allclose(whole.values.numpy(), [[1 / size, -3 / size]] * size)
    dense, sparse = hvd.grouped_allreduce([tf.ones(2), tf.IndexedSlices(values, indices)], op=hvd.Sum)
    assert dense.numpy().tolist() == [size] * 2
    assert sparse.values.shape[0] == size * (size + 1) // 2


def check_objects_of_any_type_are_broadcast_and_gathered(hvd):
    for root in range(hvd.size()):
        given = {"lr": 0.1, "näme\n": [1]} if hvd.rank() == root else None
        assert hvd.broadcast_object(given, root) == {"lr": 0.1, "näme\n": [1]}
        assert hvd.broadcast_object_fn(root)(given) == {"lr": 0.1, "näme\n": [1]}
    gathered = hvd.allgather_object("x" * 1000 * hvd.rank(), name="text")
    assert [len(text) for text in gathered] == [1000 * r for r in range(hvd.size())]
    assert hvd.broadcast_object(lambda: 3)() == 3
    with pytest.raises(ValueError, match="is not among"):
        hvd.broadcast_object(1, hvd.size())


def check_distributed_gradient_tape_has_the_class_of_the_given_tape(hvd):
    class Own(tf.GradientTape):
        pass

    tape = hvd.DistributedGradientTape(Own())
    assert isinstance(tape, Own)
    assert type(tape).__name__ == "Own"
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(ValueError, match=r"not a tf\.GradientTape"):
        hvd.DistributedGradientTape(3)


def check_broadcast_global_variables_is_refused_in_eager_execution(hvd):
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)


def check_rank_and_size_operations_return_those_of_the_world(hvd):
    asked = tf.function(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()))
    expected = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    assert [int(found) for found in asked()] == expected
    assert hvd.is_homogeneous()
