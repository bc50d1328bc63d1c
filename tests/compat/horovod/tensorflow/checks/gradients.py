"""Gradients through the collectives, eagerly and within a tf.function."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def gradients(loss, *arrays):
    """The gradients of `loss(*variables)`: taken eagerly, and within one graph."""
    variables = [tf.Variable(array) for array in arrays]

    def both():
        with tf.GradientTape() as tape:
            value = loss(*variables)
        return tape.gradient(value, variables)

    return [[grad.numpy() for grad in call()] for call in (both, tf.function(both))]


def is_all(found, *expected):
    for grads in found:
        for grad, value in zip(grads, expected, strict=True):
            np.testing.assert_allclose(grad, value)


def check_gradient_of_allreduce_is_reduced_with_the_same_operation(hvd):
    size, rank = hvd.size(), hvd.rank()
    weights = np.float32(rank + 1)
    total = size * (size + 1) / 2
    one = np.ones(3, np.float32)
    is_all(gradients(lambda v: tf.reduce_sum(hvd.allreduce(v) * weights), one), np.full(3, total / size))
    is_all(gradients(lambda v: tf.reduce_sum(hvd.allreduce(v, op=hvd.Sum) * weights), one), np.full(3, total))
    factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
    is_all(gradients(lambda v: tf.reduce_sum(hvd.allreduce(v, **factors) * weights), one), np.full(3, 1.5 * total))


def check_gradients_of_grouped_allreduce_are_reduced(hvd):
    weights = np.float32(hvd.rank() + 1)
    mean = (hvd.size() + 1) / 2

    def loss(a, b):
        first, second = hvd.grouped_allreduce([a, b])
        return tf.reduce_sum(first) * weights + tf.reduce_sum(second) * 2.0 * weights

    is_all(
        gradients(loss, np.ones(2, np.float32), np.ones((2, 2), np.float32)),
        np.full(2, mean),
        np.full((2, 2), 2 * mean),
    )


def check_gradient_of_allgather_is_the_average_for_the_local_rows(hvd):
    size, rank = hvd.size(), hvd.rank()
    weights = np.float32(rank + 1)
    rows = np.ones((rank + 1, 2), np.float32)
    mean = (size + 1) / 2
    is_all(gradients(lambda v: tf.reduce_sum(hvd.allgather(v) * weights), rows), np.full_like(rows, mean))
    # Each rank's gradient consists of the rows that this rank has sent.
    starts = sum(r + 1 for r in range(rank))
    places = tf.range(sum(r + 1 for r in range(size)), dtype=tf.float32)[:, None]
    expected = (np.arange(rank + 1)[:, None] + starts).repeat(2, 1)
    is_all(gradients(lambda v: tf.reduce_sum(hvd.allgather(v) * places), rows), expected)

    def both(a, b):
        first, second = hvd.grouped_allgather([a, b])
        return tf.reduce_sum(first) + 3.0 * tf.reduce_sum(second)

    is_all(gradients(both, rows, np.ones(2, np.float32)), np.ones_like(rows), np.full(2, 3.0))


def check_gradient_of_broadcast_is_the_average_on_the_root_and_zero_elsewhere(hvd):
    root = hvd.size() - 1
    mean = (hvd.size() + 1) / 2
    weights = np.float32(hvd.rank() + 1)
    expected = np.full(2, mean if hvd.rank() == root else 0.0)
    is_all(gradients(lambda v: tf.reduce_sum(hvd.broadcast(v, root) * weights), np.ones(2, np.float32)), expected)


def check_gradient_of_alltoall_is_sent_back_to_its_rank(hvd):
    size, rank = hvd.size(), hvd.rank()
    weights = np.float32(rank + 1)
    equal = np.ones((2 * size, 3), np.float32)
    expected = np.repeat(np.arange(size) + 1.0, 2)[:, None].repeat(3, 1)
    is_all(gradients(lambda v: tf.reduce_sum(hvd.alltoall(v) * weights), equal), expected)
    # Rank r sends i rows to rank i. It does not send its own last row, whose gradient is 0.
    splits = list(range(size))
    rows = np.ones((sum(splits) + 1, 2), np.float32)
    expected = np.concatenate([np.repeat(np.arange(size) + 1.0, splits), [0.0]])[:, None].repeat(2, 1)
    is_all(gradients(lambda v: tf.reduce_sum(hvd.alltoall(v, splits=splits)[0] * weights), rows), expected)


def check_gradient_of_reducescatter_is_gathered(hvd):
    size, rank = hvd.size(), hvd.rank()
    weights = np.float32(rank + 1)
    rows = np.ones((2 * size + 1, 2), np.float32)
    share = [3] + [2] * (size - 1)
    expected = np.repeat(np.arange(size) + 1.0, share)[:, None].repeat(2, 1)
    is_all(gradients(lambda v: tf.reduce_sum(hvd.reducescatter(v) * weights), rows), expected)
    is_all(gradients(lambda v: tf.reduce_sum(hvd.reducescatter(v, op=hvd.Sum) * weights), rows), expected * size)


def check_second_derivative_of_allreduce_is_computed(hvd):
    x = tf.Variable([3.0])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = hvd.allreduce(x * x * x, op=hvd.Average)
        first = inner.gradient(y, x)
    np.testing.assert_allclose(first, [27.0])
    np.testing.assert_allclose(outer.gradient(first, x), [18.0])


def check_gradient_of_a_tf_function_with_allreduce_is_computed_outside_it(hvd):
    v = tf.Variable([1.0, 2.0])
    weights = float(hvd.rank() + 1)

    @tf.function
    def summed(tensor):
        return tf.reduce_sum(hvd.allreduce(tensor, op=hvd.Sum))

    with tf.GradientTape() as tape:
        loss = summed(v * v) * weights
    np.testing.assert_allclose(tape.gradient(loss, v), np.array([2.0, 4.0]) * hvd.size() * (hvd.size() + 1) / 2)


def check_gradient_of_allreduce_can_be_computed_twice_in_one_graph(hvd):
    v = tf.Variable([1.0, 2.0])

    @tf.function
    def both():
        with tf.GradientTape(persistent=True) as tape:
            reduced = hvd.allreduce(v, op=hvd.Sum, name="taken twice")
            one, other = tf.reduce_sum(reduced), 2.0 * tf.reduce_sum(hvd.allgather(v))
            third = tf.reduce_sum(reduced * reduced)
        return tape.gradient(one, v), tape.gradient(other, v), tape.gradient(third, v)

    size = hvd.size()
    for _ in range(3):
        first, second, third = both()
        np.testing.assert_allclose(first, [size] * 2)
        np.testing.assert_allclose(second, [2.0] * 2)
        np.testing.assert_allclose(third, [2.0 * size * size, 4.0 * size * size])
