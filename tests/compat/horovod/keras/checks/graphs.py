"""What only TensorFlow has: graphs of the script's own, several steps in one call, rows of gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.horovod.keras.checks.training import (
    agree,
    compare,
    digits,
    digits_model,
    fit,
    loss_of,
    share,
    start_and_end,
)


def check_steps_per_execution_equals_one_process(hvd, keras):
    def optimizer():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    compare(hvd, keras, digits_model, digits, optimizer, steps=6, compiled={"steps_per_execution": 3})
    compare(hvd, keras, digits_model, digits, optimizer, steps=2, passes=2, compiled={"steps_per_execution": 2})


def check_custom_training_loop_in_a_graph_equals_one_process(hvd, keras):
    x, y = digits()
    for passes in (1, 2):
        rows = 8 * passes * hvd.size()

        def step_of(own, optimizer):
            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = loss_of(keras)(y, own(x, training=True))
                grads = tape.gradient(loss, own.trainable_variables)
                optimizer.apply_gradients(zip(grads, own.trainable_variables, strict=True))
                return loss

            return step

        # This reference training runs eagerly, because creating a graph takes longer.
        def train(alone, rows=rows, step_of=step_of):
            all_together = step_of(alone, keras.optimizers.Adam(0.01))
            for start in range(0, 3 * rows, rows):
                all_together(x[start : start + rows], y[start : start + rows])

        model, expected = start_and_end(hvd, keras, digits_model, train)
        # The optimizer is not built before the trace, so it creates its variables while TensorFlow traces the graph.
        opt = hvd.DistributedOptimizer(
            keras.optimizers.Adam(0.01), backward_passes_per_step=passes, average_aggregated_gradients=True
        )
        one = tf.function(step_of(model, opt))
        mine = share(hvd, x, 3, 8, passes), share(hvd, y, 3, 8, passes)
        for start in range(0, len(mine[0]), 8):
            one(mine[0][start : start + 8], mine[1][start : start + 8])
        agree(model, expected, 1e-4)


def check_two_optimizers_in_one_graph_reduce_their_own_gradients(hvd, keras):
    """As in a GAN: both are in flight at the same time, their variables have the same places."""
    one, other = (keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2))
    for layer in (one, other):
        layer.build((None, 1))
    opts = [hvd.DistributedOptimizer(keras.optimizers.SGD(rate)) for rate in (1.0, 10.0)]
    for layer, opt in zip((one, other), opts, strict=True):
        opt.build(layer.trainable_variables)

    @tf.function
    def step(value):
        for layer, opt in zip((one, other), opts, strict=True):
            opt.apply_gradients([(tf.reshape(value, (1, 1)), layer.trainable_variables[0])])

    for _ in range(3):
        step(tf.constant(hvd.rank() + 1.0))
    mean = np.mean([r + 1.0 for r in range(hvd.size())])
    assert one.get_weights()[0].item() == pytest.approx(-3 * mean)
    assert other.get_weights()[0].item() == pytest.approx(-30 * mean)


def check_sparse_embedding_gradients_are_averaged(hvd, keras):
    """Each rank looks up other rows, some of them twice, in one pass and in two."""
    for how in ({}, {"sparse_as_dense": True}, {"backward_passes_per_step": 2}):
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 1, embeddings_initializer="zeros")]
        )
        opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **how)
        model.compile(optimizer=opt, loss=lambda y, p: -tf.reduce_sum(p))
        rows = np.array([[hvd.rank(), 4]] * 2, "int32")
        fit(keras, model, rows, np.zeros((2, 1), "float32"), rows=1)
        table = model.get_weights()[0].ravel()
        expected = np.zeros(5)
        for rank in range(hvd.size()):
            expected[[rank, 4]] += 2 / hvd.size()
        assert table == pytest.approx(expected)


def check_loss_scale_optimizer_works_within_a_graph(hvd, keras):
    if keras.__name__ != "keras":
        return
    opt = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), initial_scale=4.0)
    variable = keras.Variable(np.zeros((1,), "float32"), name="weight")
    opt.build([variable])

    @tf.function
    def step(grad):
        opt.apply([grad], [variable])

    step(tf.constant([4.0 * (hvd.rank() + 1)]))
    step(tf.constant([np.inf if hvd.rank() == 0 else 1.0]))
    step(tf.constant([2.0 * (hvd.rank() + 1)]))
    assert variable.numpy().item() == pytest.approx(-2 * np.mean([r + 1 for r in range(hvd.size())]))


def check_xla_compiled_training_step_is_refused(hvd, keras):
    if hvd.size() == 1:
        return
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    layer = keras.layers.Dense(1, use_bias=False)
    layer.build((None, 1))
    opt.build(layer.trainable_variables)

    @tf.function(jit_compile=True)
    def step():
        opt.apply_gradients([(tf.ones((1, 1)), layer.trainable_variables[0])])

    with pytest.raises(NotImplementedError, match="jit_compile"):
        step()


def check_horovod_keras_and_horovod_tensorflow_keras_have_the_same_callbacks(hvd, keras):
    import paceline.compat.horovod.keras as standalone
    import paceline.compat.horovod.tensorflow.keras as of_tensorflow

    missing = [name for module in (standalone, of_tensorflow) for name in module.__all__ if not hasattr(module, name)]
    assert missing == []
    names = standalone.callbacks.__all__
    assert of_tensorflow.callbacks.__all__ == names
    for name in names:
        assert getattr(standalone.callbacks, name) is getattr(of_tensorflow.callbacks, name)
    assert issubclass(hvd.callbacks.MetricAverageCallback, keras.callbacks.Callback)
