"""Starting from the same, batch normalisation over the ranks, elastic state."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf


def check_broadcast_variables_copies_every_kind_of_variable_from_the_root(hvd):
    root = hvd.size() - 1

    def fresh():
        start = float(hvd.rank())
        return [
            tf.Variable(start),
            tf.Variable(tf.fill([70_000], start), name="large"),
            tf.Variable([hvd.rank()], dtype=tf.int64),
            tf.Variable(tf.cast([start, start], tf.bfloat16)),
            tf.Variable(hvd.rank() == root),
            keras.Variable(np.full((2, 2), start), name="of_keras"),
        ]

    def in_graph(variables):
        @tf.function
        def send():
            with tf.control_dependencies([hvd.broadcast_variables(variables, root)]):
                return tf.constant(1)

        return send()

    for send in (lambda variables: hvd.broadcast_variables(variables, root), in_graph):
        variables = fresh()
        assert send(variables) in (None, 1)
        for variable in variables:
            value = tf.cast(tf.convert_to_tensor(variable), tf.float32).numpy()
            assert (value == (1.0 if variable.dtype == tf.bool else root)).all(), variable
    with pytest.raises(ValueError, match=r"takes variables, not a tensor .*hvd\.broadcast\("):
        hvd.broadcast_variables([tf.ones(1)], root)
    read = hvd.broadcast_(fresh()[:2], root_rank=root)
    assert [float(tf.reduce_max(tensor)) for tensor in read] == [root, root]


def check_broadcast_of_different_shapes_is_refused(hvd):
    if hvd.size() == 1:
        return
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched BROADCAST tensor shapes"):
        hvd.broadcast_variables([tf.Variable(tf.ones(2 + (hvd.rank() == 0)))], 0)


def check_broadcast_variables_makes_model_and_optimizer_equal_on_all_ranks(hvd):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(hvd.rank() + 5)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    everyone = hvd.allgather_object([weight.tolist() for weight in model.get_weights()])
    assert all(weights == everyone[0] for weights in everyone)
    assert int(optimizer.iterations) == 5


def check_sync_batch_norm_equals_batch_norm_over_the_whole_batch(hvd):
    generator = np.random.default_rng(0)
    # The values are far from 0, where a sum of squares would lose all precision.
    whole = (generator.normal(size=(3 * hvd.size(), 4, 2)) + 1000.0).astype(np.float32)
    start = sum(range(1, hvd.rank() + 1)) if hvd.size() > 1 else 0
    sizes = [rank + 1 for rank in range(hvd.size())]
    own = whole[start : start + sizes[hvd.rank()]]
    used = whole[: sum(sizes)]
    weights = generator.normal(size=used.shape).astype(np.float32)
    layer, plain = hvd.SyncBatchNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5)
    layer(own), plain(own)

    def run(layer, x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * y * weights)
        return y, *tape.gradient(loss, [x, layer.gamma, layer.beta])

    part = slice(start, start + sizes[hvd.rank()])
    wide = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
    wide(used.astype(np.float64))
    expected = run(wide, tf.constant(used, tf.float64), tf.constant(weights, tf.float64))
    for call in (run, tf.function(run)):
        y, dx, dgamma, dbeta = call(layer, tf.constant(own), tf.constant(weights[part]))
        np.testing.assert_allclose(y, expected[0][part], atol=2e-3)
        np.testing.assert_allclose(dx, expected[1][part], atol=5e-3)
        # Each rank has only the gradients of its own rows, so sum them over the ranks.
        np.testing.assert_allclose(hvd.allreduce(dgamma, op=hvd.Sum), expected[2], rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(hvd.allreduce(dbeta, op=hvd.Sum), expected[3], rtol=1e-2, atol=1e-2)
    run(wide, tf.constant(used, tf.float64), tf.constant(weights, tf.float64))
    np.testing.assert_allclose(layer.moving_mean, wide.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, wide.moving_variance, rtol=1e-3)
    np.testing.assert_allclose(layer(own), wide(own.astype(np.float64)), atol=5e-3)


def check_sync_batch_norm_ignores_masked_positions(hvd):
    layer = hvd.SyncBatchNormalization()
    x = np.full((2, 3, 2), float(hvd.rank()), np.float32)
    mask = np.array([[True, True, False], [True, False, False]])
    x[~mask] = 1e6
    y = layer(x, training=True, mask=tf.constant(mask)).numpy()
    ranks = np.arange(hvd.size())
    np.testing.assert_allclose(y[mask], (hvd.rank() - ranks.mean()) / np.sqrt(ranks.var() + 1e-3), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="does not support fused=True"):
        hvd.SyncBatchNormalization(fused=True)
    copy = type(layer).from_config(layer.get_config())
    assert isinstance(copy, hvd.SyncBatchNormalization)


def check_elastic_state_is_synchronized_saved_and_restored(hvd):
    v, of_keras = tf.Variable([float(hvd.rank())]), keras.Variable([float(hvd.rank()) + 1])
    state = hvd.elastic.TensorFlowState([v, of_keras], batch=hvd.rank(), epoch=0)
    state.sync()
    assert (v.numpy().tolist(), of_keras.numpy().tolist(), state.batch) == ([0.0], [1.0], 0)
    state.batch = 7
    v.assign([3.0])
    state.commit()
    v.assign([4.0])
    state.batch = 8
    state.restore()
    assert (v.numpy().tolist(), state.batch) == ([3.0], 7)


def check_committed_elastic_state_is_restored_in_another_process(hvd):
    state = hvd.elastic.TensorFlowState([tf.Variable([1.0, 2.0])], batch=4)
    other = hvd.elastic.TensorFlowState([tf.Variable([0.0, 0.0])], batch=0)
    other.take_kept(state.kept())
    other.restore()
    assert (other.variables[0].numpy().tolist(), other.batch) == ([1.0, 2.0], 4)


def check_elastic_state_works_in_a_tensorflow_1_session(hvd):
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("of_session", initializer=float(hvd.rank() + 1), use_resource=True)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(session=session, batch=hvd.rank())
            state.sync()
            assert (session.run(variable), state.batch) == (1.0, 0)
            session.run(variable.assign(5.0))
            state.restore()
            assert session.run(variable) == 1.0


def check_elastic_training_restores_the_last_commit_after_a_failure(hvd):
    if hvd.size() == 1:
        return
    v = tf.Variable(float(hvd.rank()), name="trained")
    state = hvd.elastic.TensorFlowState([v], batch=0)
    failures, resets = [], []
    state.register_reset_callbacks([lambda: resets.append(1)])
    bad = tf.function(lambda: hvd.allreduce(tf.ones(1 + hvd.rank()), name="bad"))

    @hvd.elastic.run
    def train(state):
        while state.batch < 4:
            v.assign_add(hvd.allreduce(tf.constant(1.0), name="step"))
            state.batch += 1
            if state.batch == 3 and len(failures) < 2:
                failures.append(1)
                # The first failure happens inside a graph, and the second one in eager mode.
                bad() if len(failures) == 1 else hvd.allreduce(tf.ones(1 + hvd.rank()), name="bad")
            if state.batch % 2 == 0:
                state.commit()
        return v.numpy()

    assert train(state) == 4.0
    assert (len(failures), len(resets)) == (2, 2)


def check_tensorflow_errors_other_than_a_lost_rank_are_raised(hvd):
    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)])
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        tf.debugging.assert_equal(1, 2)

    with pytest.raises(tf.errors.InvalidArgumentError):
        train(state)
    assert len(calls) == 1


def check_elastic_state_of_a_keras_model_is_synchronized_and_restored(hvd):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.TensorFlowKerasState(model, batch=hvd.rank())
    state.sync()
    everyone = hvd.allgather_object(model.get_weights()[0].tolist())
    assert all(weights == everyone[0] for weights in everyone)
    assert state.batch == 0
