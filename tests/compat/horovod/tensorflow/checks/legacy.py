"""What also has to hold with tf_keras: TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def check_tf_keras_is_used_if_requested(hvd):
    assert tf.keras.Model.__module__.startswith("tf_keras")
    assert hvd.SyncBatchNormalization.__mro__[1].__module__.startswith("tf_keras")


def check_keras_2_optimizer_averages_gradients_eagerly_and_in_fit(hvd):
    scale = hvd.rank() + 1.0
    mean = (hvd.size() + 1) / 2
    for make in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        v = tf.Variable([1.0, 2.0])
        optimizer = hvd.DistributedOptimizer(make(0.1), backward_passes_per_step=2)
        for _ in range(2):
            optimizer.minimize(lambda v=v: tf.reduce_sum(v) * scale, [v])
        np.testing.assert_allclose(v, np.array([1.0, 2.0]) - 0.2 * mean, rtol=1e-5)
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(1,))])
        model.compile(hvd.DistributedOptimizer(make(0.1)), loss=lambda y, p: -tf.reduce_sum(y * p))
        model.fit(np.full((1, 1), 2 * scale, np.float32), np.ones((1, 1), np.float32), verbose=0)
        np.testing.assert_allclose(model.get_weights()[0], [[0.2 * mean]], rtol=1e-5)


def check_sync_batch_norm_equals_batch_norm_over_the_whole_batch(hvd):
    whole = np.random.default_rng(0).normal(size=(4 * hvd.size(), 3, 2)).astype(np.float32) + 100.0
    own = whole[4 * hvd.rank() : 4 * hvd.rank() + 4]
    layer, plain = hvd.SyncBatchNormalization(momentum=0.5), tf.keras.layers.BatchNormalization(momentum=0.5)
    y = tf.function(lambda x: layer(x, training=True))(tf.constant(own))
    expected = plain(whole, training=True)[4 * hvd.rank() : 4 * hvd.rank() + 4]
    np.testing.assert_allclose(y, expected, atol=1e-3)
    np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-3)


def check_tape_and_broadcast_work_with_keras_2_variables(hvd):
    tf.keras.utils.set_random_seed(hvd.rank())
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(2,)), tf.keras.layers.Dense(1)])
    hvd.broadcast_variables(model.variables, root_rank=0)
    everyone = hvd.allgather_object([weight.tolist() for weight in model.get_weights()])
    assert all(weights == everyone[0] for weights in everyone)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[1])
        return tape.gradient(loss, model.trainable_variables)

    grads = step(tf.ones([1, 2]) * (hvd.rank() + 1.0))
    shared = hvd.allgather_object([grad.numpy().tolist() for grad in grads[:2]])
    assert all(found == shared[0] for found in shared)
    # The last bias belongs to a local layer. Its gradient of 1 is divided by the number of ranks.
    np.testing.assert_allclose(grads[3], [1.0 / hvd.size()])
