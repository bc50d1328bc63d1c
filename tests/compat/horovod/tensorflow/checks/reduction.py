"""Gradients over the ranks: tapes, local variables, groups, sums over passes."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from paceline.compat.horovod.tensorflow.gradient_aggregation import Accumulator
from paceline.compat.horovod.tensorflow.reduction import Reduction, reduce_gradients


def both_ways(call):
    yield call
    yield tf.function(call)


def mean_of_ranks(hvd):
    """What the average of rank + 1 is."""
    return (hvd.size() + 1) / 2


def check_distributed_gradient_tape_averages_over_the_ranks(hvd):
    v, w, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(1.0)
    scale = float(hvd.rank() + 1)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v) * w * scale
        # The gradients have the same nesting as the sources. A variable without a gradient gets None.
        return hvd.DistributedGradientTape(tape).gradient(loss, {"v": v, "rest": [w, unused]})

    for call in both_ways(step):
        grads = call()
        np.testing.assert_allclose(grads["v"], np.array([6.0, 12.0]) * mean_of_ranks(hvd))
        np.testing.assert_allclose(grads["rest"][0], 5.0 * mean_of_ranks(hvd))
        assert grads["rest"][1] is None
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum) as tape:
        loss = tf.reduce_sum(v) * scale
    for _ in range(2):
        np.testing.assert_allclose(tape.gradient(loss, v), np.full(2, hvd.size() * mean_of_ranks(hvd)))
    np.testing.assert_allclose(
        tape.gradient(loss, [v], use_generic_names=True)[0], [hvd.size() * mean_of_ranks(hvd)] * 2
    )


def check_gradients_of_variables_with_duplicate_or_different_names_are_reduced(hvd):
    # All three variables have the name "Variable:0".
    same = [tf.Variable(float(i)) for i in range(3)]
    other = [tf.Variable(float(i), name=f"of_rank_{hvd.rank()}_{i}") for i in range(3)]

    def step(variables, generic):
        with tf.GradientTape() as tape:
            loss = tf.add_n([float(i) * (hvd.rank() + 1.0) * v for i, v in enumerate(variables)])
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, variables, use_generic_names=generic)

    for call in both_ways(step):
        for grads in (call(same, False), call(other, True)):
            np.testing.assert_allclose(grads, [i * mean_of_ranks(hvd) for i in range(3)])


def check_predivide_compression_and_groups_keep_the_average(hvd):
    variables = [tf.Variable(tf.ones([i + 1]), name=f"g{i}") for i in range(5)]

    def step(**how):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) * float(i + 1) * (hvd.rank() + 1.0) for i, v in enumerate(variables)])
        return hvd.DistributedGradientTape(tape, **how).gradient(loss, variables)

    for how in (
        {},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"groups": 2},
        {"groups": 9, "gradient_predivide_factor": 4.0},
        {"groups": [[variables[3], variables[0]], [variables[1]]]},
    ):
        for call in both_ways(lambda how=how: step(**how)):
            for i, grad in enumerate(call()):
                np.testing.assert_allclose(grad, np.full(i + 1, (i + 1) * mean_of_ranks(hvd)), rtol=1e-3)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        step(num_groups=2)


def check_groups_combine_only_gradients_of_the_same_variables(hvd):
    ranks = hvd.size()
    variables = {name: tf.Variable([0.0], name=name) for name in "abc"}
    # Each rank lists the variables in another order.
    own = [variables[name] for name in ("abc" if hvd.rank() % 2 == 0 else "cba")]
    grads = [tf.constant([10.0 ** "abc".index(v.name[0])]) for v in own]
    for groups in (1, 2, [own[:2] if hvd.rank() % 2 == 0 else own[1:]], [own]):
        reduced = reduce_gradients(grads, own, Reduction(prefix="p", op=hvd.Sum, groups=groups))
        assert [float(grad[0]) for grad in reduced] == [ranks * float(grad[0]) for grad in grads], groups
    if ranks == 1:
        return
    # Ranks that lack the gradients of different variables use different names, so the engine doesn't add up their groups.
    seen = []

    def reduce_all(tensors, names, how, compression, groups, sparse):
        seen.append([name for name, _ in groups])
        return tensors

    with mock.patch("paceline.compat.horovod.tensorflow.reduction.reduce_all", reduce_all):
        for groups in (1, [own]):
            for lacking in (0, 1, 1):
                given = [None if place == lacking else grad for place, grad in enumerate(grads)]
                reduce_gradients(given, own, Reduction(prefix="p", op=hvd.Sum, groups=groups))
    for first, second, third in (seen[:3], seen[3:]):
        assert first != second == third


def check_gradients_given_by_an_iterator_are_reduced(hvd):
    reduced = hvd._make_allreduce_grads_fn("own", "", "", hvd.Compression.none, False, hvd.Sum, 1.0, None)
    grads = reduced(tf.constant([factor]) for factor in (1.0, 2.0))
    assert [grad.numpy().tolist() for grad in grads] == [[hvd.size()], [2 * hvd.size()]]


def check_invalid_gradient_groups_are_refused(hvd):
    v, stranger = tf.Variable([1.0]), tf.Variable([1.0], name="stranger")
    for groups, message in (
        (-1, "non-negative integer or a list of lists"),
        ("two", "non-negative integer or a list of lists"),
        ([[v, v]], "twice"),
        ([[stranger]], "stranger.*no gradient among"),
    ):
        # Paceline compares a list of groups with the gradients only if there are several ranks.
        if hvd.size() > 1 or not isinstance(groups, list):
            with pytest.raises(ValueError, match=message):
                reduce_gradients([tf.ones(1)], [v], Reduction(prefix="p", groups=groups))
    for how in ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, {"gradient_predivide_factor": 0.0}, {"op": 9}):
        with pytest.raises(ValueError, match=r"gradient_predivide_factor|op=9"):
            Reduction(prefix="p", **how)


def check_sparse_gradients_stay_sparse_or_become_dense(hvd):
    table = tf.Variable(tf.ones([5, 2]), name="table")
    rows = tf.constant([0, hvd.rank() % 5])
    expected = np.zeros((5, 2))
    for r in range(hvd.size()):
        expected[0] += 1.0
        expected[r % 5] += 1.0

    def step(**how):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        return hvd.DistributedGradientTape(tape, **how).gradient(loss, table)

    for how in ({}, {"sparse_as_dense": True}, {"groups": 1}, {"gradient_predivide_factor": 2.0}):
        for call in both_ways(lambda how=how: step(**how)):
            grad = call()
            assert isinstance(grad, tf.IndexedSlices) == ("sparse_as_dense" not in how)
            np.testing.assert_allclose(tf.convert_to_tensor(grad), expected / hvd.size())
    if hvd.size() > 1:
        with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
            step(op=hvd.Max)


def check_gradients_of_local_variables_are_not_reduced(hvd):
    import keras

    own, shared = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    single = tf.Variable(1.0)
    x = tf.fill([1, 2], float(hvd.rank() + 1))
    own(x), shared(x)
    scale = float(hvd.rank() + 1)

    def step(scaled):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own(x) + shared(x)) + single * scale
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=own, scale_local_gradients=scaled)
        tape.register_local_source(single)
        sources = [own.kernel, shared.kernel, single]
        local, rest = tape.get_local_and_global_gradients(loss, sources)
        assert [source is wanted for (source, _), wanted in zip(local, (own.kernel, single), strict=True)] == [True] * 2
        assert [source is shared.kernel for source, _ in rest] == [True]
        return [local[0][1], rest[0][1], local[1][1]]

    for scaled in (True, False):
        part = scale / hvd.size() if scaled else scale
        for call in both_ways(lambda scaled=scaled: step(scaled)):
            first, second, third = call()
            np.testing.assert_allclose(first, np.full((2, 1), part), rtol=1e-6)
            np.testing.assert_allclose(second, np.full((2, 1), mean_of_ranks(hvd)), rtol=1e-6)
            np.testing.assert_allclose(third, part, rtol=1e-6)
    with pytest.raises(ValueError, match="not a Keras layer"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def check_gradients_are_accumulated_over_backward_passes(hvd):
    for average in (False, True):
        for eager in (True, False):
            v, table, untouched = tf.Variable([0.0, 0.0]), tf.Variable(tf.zeros([3, 1])), tf.Variable(0.0)
            sums, seen = Accumulator(3, average), []

            def act(grads, v=v, table=table):
                v.assign_add(grads[0])
                table.assign_add(grads[1])

            def step(factor, sums=sums, v=v, table=table, untouched=untouched, act=act):
                sparse = tf.IndexedSlices(tf.ones([2, 1]) * factor, tf.constant([0, 0]), tf.constant([3, 1]))
                return sums.step([tf.ones(2) * factor, sparse, None], [v, table, untouched], act)

            call = step if eager else tf.function(step)
            for i in range(1, 7):
                seen.append(bool(call(tf.constant(float(i)))))
                if i == 3:
                    first = v.numpy().tolist(), table.numpy().tolist()
            assert seen == [False, False, True] * 2
            divisor = 3 if average else 1
            assert first == ([6 / divisor] * 2, [[12 / divisor], [0.0], [0.0]])
            assert v.numpy().tolist() == [21 / divisor] * 2
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        Accumulator(0)


def check_tensorflow_1_optimizer_averages_gradients(hvd):
    scale = float(hvd.rank() + 1)
    for passes in (1, 2, 3):
        for eager in (True, False):
            v = tf.Variable([1.0, 2.0])
            given = tf.compat.v1.train.AdamOptimizer(0.1)
            optimizer = hvd.DistributedOptimizer(given, backward_passes_per_step=passes)
            assert isinstance(optimizer, tf.compat.v1.train.AdamOptimizer)

            def step(factor, v=v, optimizer=optimizer):
                optimizer.minimize(lambda: tf.reduce_sum(v * v) * factor * scale, var_list=[v])

            alone = tf.Variable([1.0, 2.0])
            plain = tf.compat.v1.train.AdamOptimizer(0.1)
            call, held = step if eager else tf.function(step), tf.zeros(2)
            for i in range(6):
                call(tf.constant(i + 1.0))
                held += 2.0 * alone * (i + 1.0) * mean_of_ranks(hvd)
                if (i + 1) % passes == 0:
                    plain.apply_gradients([(held, alone)])
                    held = tf.zeros(2)
                np.testing.assert_allclose(v, alone, rtol=1e-5)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)


def check_registered_local_variable_of_an_optimizer_is_not_reduced(hvd):
    v, own = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), scale_local_gradients=False)
    optimizer.register_local_var(own)
    pairs = optimizer.compute_gradients(lambda: (v + own) * (hvd.rank() + 1.0), var_list=[v, own])
    assert [grad.numpy() for grad, _ in pairs] == [mean_of_ranks(hvd), hvd.rank() + 1]
