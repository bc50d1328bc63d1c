"""Whole training: the ranks together compute what one process computes on the whole batch, whichever way they train.

Tolerances: float32 sums in another order differ by about 1e-7 of their size for each level of additions; 1e-5 of the
largest weight leaves room for a few steps of it.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from paceline.compat.horovod.common import objects


@functools.cache
def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images / 16).astype("float32")[..., None], data.target.astype("int32")


def sequences():
    rows = np.arange(600)[:, None]
    tokens = (rows * 7 + np.arange(6) * rows % 11) % 20
    return tokens.astype("int32"), ((tokens + 3) % 20).astype("int32")


def digits_model(keras):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def tied_transformer(keras):
    """Its output layer is its embedding's own matrix, so that one gradient comes from two places."""

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(20, 8)
            self.attention = keras.layers.MultiHeadAttention(2, 4)
            self.norm = keras.layers.LayerNormalization()
            self.inner = keras.layers.Dense(16, activation="relu")
            self.outer = keras.layers.Dense(8)

        def call(self, tokens):
            x = self.embedding(tokens)
            x = self.norm(x + self.attention(x, x))
            x = x + self.outer(self.inner(x))
            table = self.embedding.embeddings
            if hasattr(keras, "ops"):
                return keras.ops.matmul(x, keras.ops.transpose(table))
            import tensorflow as tf

            return tf.matmul(x, table, transpose_b=True)

    model = Tied()
    model(np.zeros((1, 6), "int32"))
    return model


def loss_of(keras):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(keras, model, x, y, rows=None, **how):
    """`fit`, so many rows at a time, or all at once, in their order.

    TensorFlow is given batches: to cut arrays into batches Keras has it make two graphs, which takes longer than a few steps.
    """
    how = {"shuffle": False, "verbose": 0} | how
    if on_tensorflow(keras):
        import tensorflow as tf

        return model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(rows or len(x)), **how)
    return model.fit(x, y, batch_size=rows, **how)


def on_tensorflow(keras):
    return keras.__name__ == "tf_keras" or keras.backend.backend() == "tensorflow"


def start_and_end(hvd, keras, make, train):
    """A model with the same weights on every rank, and what they become where `train` trains one like it in one process: the
    first rank does so for all."""
    keras.utils.set_random_seed(3)
    model, trained = make(keras), None
    if hvd.rank() == 0:
        alone = make(keras)
        alone.set_weights(model.get_weights())
        train(alone)
        trained = alone.get_weights()
    return model, objects.broadcast_object(trained, 0, name="trained alone")


def share(hvd, array, steps, rows, passes=1):
    """This rank's rows of each pass of each step."""
    return np.concatenate(
        [
            array[step * rows * passes * hvd.size() + hvd.rank() * rows * passes + part * rows :][:rows]
            for step in range(steps)
            for part in range(passes)
        ]
    )


def compare(hvd, keras, make, data, optimizer, *, steps=3, rows=8, passes=1, tolerance=1e-5, compiled=None, **how):
    """`fit` of each rank on its rows, in `passes` parts a step, against `fit` of one process on all of them."""
    x, y = data()
    together = rows * passes * hvd.size()

    def train(alone):
        train_alone(keras, alone, optimizer(), x[: steps * together], y[: steps * together], together)

    model, expected = start_and_end(hvd, keras, make, train)
    opt = hvd.DistributedOptimizer(
        optimizer(), backward_passes_per_step=passes, average_aggregated_gradients=passes > 1, **how
    )
    model.compile(optimizer=opt, loss=loss_of(keras), **(compiled or {}))
    mine = share(hvd, x, steps, rows, passes), share(hvd, y, steps, rows, passes)
    fit(keras, model, *mine, rows, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    agree(model, expected, tolerance)
    return model


def train_alone(keras, model, optimizer, x, y, rows):
    """One pass over all rows, so many at a time. Not by a graph, which takes longer to make than a few steps take."""
    model.compile(optimizer=optimizer, loss=loss_of(keras), run_eagerly=True)
    for start in range(0, len(x), rows):
        model.train_on_batch(x[start : start + rows], y[start : start + rows])
    if finish := getattr(model.optimizer, "finalize_variable_values", None):  # `fit` calls this method at its end
        finish(model.trainable_variables)


def agree(model, expected, tolerance=1e-5):
    for weight, b in zip(model.weights, expected, strict=True):
        a = weight.numpy()
        assert np.allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max())), (
            weight.name,
            np.abs(a - b).max(),
        )


def check_gradients_are_averaged_in_fit(hvd, keras):
    """Where an optimizer doesn't average, rank r holds 0.2 * (r + 1) after this step; all must hold the average."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=opt, loss=lambda y, p: -p * y)
    rank = float(hvd.rank())
    # Pass arrays to `fit`, as most scripts do.
    model.fit(np.ones((1, 1), "float32"), np.full((1, 1), 2 * (rank + 1), "float32"), verbose=0)
    expected = 0.2 * np.mean([r + 1 for r in range(hvd.size())])
    assert model.get_weights()[0].item() == pytest.approx(expected, rel=1e-6)


def check_digits_training_equals_one_process(hvd, keras):
    compare(hvd, keras, digits_model, digits, lambda: keras.optimizers.SGD(0.1, momentum=0.9))


def check_digits_training_with_adam_equals_one_process(hvd, keras):
    # Adam divides by the size of the gradients, which enlarges the errors of small gradients.
    compare(hvd, keras, digits_model, digits, lambda: keras.optimizers.Adam(0.01), tolerance=1e-4)


def check_digits_training_with_two_backward_passes_equals_one_process(hvd, keras):
    compare(hvd, keras, digits_model, digits, lambda: keras.optimizers.SGD(0.1, momentum=0.9), passes=2)


def check_digits_training_with_three_backward_passes_equals_one_process(hvd, keras):
    compare(hvd, keras, digits_model, digits, lambda: keras.optimizers.Adam(0.01), passes=3, rows=4, tolerance=1e-4)


def check_transformer_with_tied_weights_equals_one_process(hvd, keras):
    compare(hvd, keras, tied_transformer, sequences, lambda: keras.optimizers.SGD(0.1, momentum=0.9))


def check_tied_transformer_with_two_backward_passes_equals_one_process(hvd, keras):
    compare(hvd, keras, tied_transformer, sequences, lambda: keras.optimizers.SGD(0.1, momentum=0.9), passes=2)


def check_tied_transformer_with_three_backward_passes_equals_one_process(hvd, keras):
    compare(hvd, keras, tied_transformer, sequences, lambda: keras.optimizers.SGD(0.1), passes=3, rows=4)


def check_backward_passes_are_summed_unless_averaging_is_requested(hvd, keras):
    for average, expected in ((False, 0.3), (True, 0.15)):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        opt = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        model.compile(optimizer=opt, loss=lambda y, p: -p * y)
        x, y = np.ones((3, 1), "float32"), np.array([[1], [2], [9]], "float32")
        # The third batch has no effect yet, because the optimizer waits for a fourth batch.
        fit(keras, model, x, y, rows=1)
        assert model.get_weights()[0].item() == pytest.approx(expected, rel=1e-6)
        assert int(opt.iterations.numpy()) == 1


def check_gradient_groups_predivide_and_compression_keep_the_average(hvd, keras):
    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    compare(hvd, keras, digits_model, digits, sgd, groups=2)
    compare(hvd, keras, digits_model, digits, sgd, gradient_predivide_factor=float(hvd.size()))
    # float16 has a precision of 11 bits.
    compare(hvd, keras, digits_model, digits, sgd, compression=hvd.Compression.fp16, tolerance=2e-3)


def check_gradient_sum_is_not_divided_by_the_ranks(hvd, keras):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum), loss=lambda y, p: -p * y)
    fit(keras, model, np.ones((1, 1), "float32"), np.full((1, 1), 1.0, "float32"))
    assert model.get_weights()[0].item() == pytest.approx(0.1 * hvd.size(), rel=1e-6)


def check_global_norm_clipping_acts_on_averaged_gradients(hvd, keras):
    compare(hvd, keras, digits_model, digits, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05))


def check_per_variable_clipping_acts_on_averaged_gradients(hvd, keras):
    for clipping in ({"clipnorm": 0.05}, {"clipvalue": 0.002}):
        compare(hvd, keras, digits_model, digits, lambda given=clipping: keras.optimizers.SGD(0.1, **given))


def check_weight_decay_and_moving_averages_equal_one_process(hvd, keras):
    compare(
        hvd,
        keras,
        digits_model,
        digits,
        lambda: keras.optimizers.SGD(0.1, weight_decay=0.1, use_ema=True, ema_momentum=0.5),
    )


def check_learning_rate_schedule_equals_one_process(hvd, keras):
    def optimizer():
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.5))

    compare(hvd, keras, digits_model, digits, optimizer)


def check_local_variables_are_not_reduced(hvd, keras):
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    opt.register_local_var(model.layers[0].trainable_weights[0])
    model.compile(optimizer=opt, loss=lambda y, p: -p * y)
    fit(keras, model, np.ones((1, 1), "float32"), np.full((1, 1), hvd.rank() + 1, "float32"))
    local, shared = (weight.item() for weight in model.get_weights())
    assert local == pytest.approx(1 + (hvd.rank() + 1) / hvd.size())
    assert shared == pytest.approx(1 + np.mean([r + 1 for r in range(hvd.size())]))


def check_distributed_optimizer_keeps_class_config_and_learning_rate(hvd, keras):
    plain = keras.optimizers.SGD(0.1, momentum=0.5)
    opt = hvd.DistributedOptimizer(plain)
    assert type(opt).__name__ == "SGD"
    assert isinstance(opt, type(plain))
    assert opt.get_config() == plain.get_config()
    opt.learning_rate = 0.25
    assert float(plain.learning_rate.numpy()) == 0.25
    again = type(opt).from_config(opt.get_config())
    assert float(again.learning_rate.numpy()) == 0.25
    # The gradients are averaged only once, with the settings of the outer wrapper.
    twice = hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain), op=hvd.Sum)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    twice.learning_rate = 1.0
    model.compile(optimizer=twice, loss=lambda y, p: -p * y)
    fit(keras, model, np.ones((1, 1), "float32"), np.ones((1, 1), "float32"))
    assert model.get_weights()[0].item() == pytest.approx(hvd.size())


def check_unsupported_distributed_optimizer_options_are_refused(hvd, keras):
    sgd = keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match=r"op=hvd\.Average or op=hvd\.Sum"):
        hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="not an optimizer of Keras"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="groups=-1"):
        hvd.DistributedOptimizer(sgd, groups=-1)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(sgd, num_groups=1)
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
