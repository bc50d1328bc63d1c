"""Training on several ranks comes to what training in one process does, at every number of passes."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

VOCABULARY, WIDTH, LENGTH = 11, 8, 5


class Transformer(keras.Model):
    """One block; what embeds the tokens also reads the answer off (tied): a sparse and a dense gradient meet in it."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(VOCABULARY, WIDTH), initializer="glorot_uniform", name="table")
        self.mix = keras.layers.MultiHeadAttention(2, WIDTH // 2)
        self.first, self.second = keras.layers.Dense(16, "relu"), keras.layers.Dense(WIDTH)
        self.norm = keras.layers.LayerNormalization()

    def call(self, tokens):
        x = tf.gather(self.table.value, tokens)
        x = x + self.mix(x, x)
        x = self.norm(x + self.second(self.first(x)))
        return tf.matmul(x, self.table.value, transpose_b=True)


def cnn():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def digits(batches, size):
    from sklearn.datasets import load_digits

    found = load_digits()
    rows = batches * size
    images = (found.images[:rows] / 16).astype(np.float32)[..., None]
    return np.split(images, batches), np.split(found.target[:rows].astype(np.int32), batches)


def tokens(batches, size):
    generator = np.random.default_rng(3)
    given = generator.integers(0, VOCABULARY, (batches * size, LENGTH)).astype(np.int32)
    return np.split(given, batches), np.split((given + 1) % VOCABULARY, batches)


def steps(model, optimizer, batches, tape=None):
    """Train on the batches in graphs; the gradients of the last step are taken by `tape`, or the optimizer's own way."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as plain:
            loss = loss_of(y, model(x, training=True))
        used = tape(plain) if tape else plain
        grads = used.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    for x, y in batches:
        step(tf.constant(x), tf.constant(y))
    return [np.array(weight) for weight in model.get_weights()]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def trained_alone(make, xs, ys, passes, size):
    """One process that sees all ranks' batches at once, and sums over the passes."""
    keras.utils.set_random_seed(5)
    model = make()
    model(xs[0])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    held = None
    for index in range(len(xs) // size):
        # All ranks have equally large batches, so the mean over all rows equals the mean of the ranks' means.
        x = np.concatenate(xs[index * size : (index + 1) * size])
        y = np.concatenate(ys[index * size : (index + 1) * size])
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        grads = [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, model.trainable_variables)]
        held = grads if held is None else [a + b for a, b in zip(held, grads, strict=True)]
        if (index + 1) % passes == 0:
            optimizer.apply_gradients(zip(held, model.trainable_variables, strict=True))
            held = None
    return model.get_weights()


def start_alike(hvd, make, x):
    """A model with the same weights on all ranks, sent by the first, whose seed is the one that `trained_alone` takes: the others
    made it from another seed."""
    keras.utils.set_random_seed(5 + hvd.rank())
    model = make()
    model(x)
    hvd.broadcast_variables(model.variables, root_rank=0)
    return model


def compare(hvd, make, data, every=(), *, by_tape=False):
    """Train with every number of passes by the optimizer, and by the tape, as one process does."""
    size, rank = hvd.size(), hvd.rank()
    xs, ys = data(6 * size, 4)
    ends = {}
    for passes in (*every, *([None] if by_tape else ())):
        if (held := passes or 1) not in ends:
            # Only rank 0 trains the model on one process, for comparison.
            end = trained_alone(make, xs, ys, held, size) if rank == 0 else None
            if rank != 0:
                # The other ranks create a model too, because Keras numbers layers and gradients are matched by these names.
                make()
            ends[held] = hvd.broadcast_object(end, 0)
        expected = ends[held]
        own = list(zip(xs[rank::size], ys[rank::size], strict=True))
        model, optimizer = start_alike(hvd, make, xs[0]), keras.optimizers.SGD(0.05, momentum=0.9)
        if passes is None:
            same(steps(model, optimizer, own, hvd.DistributedGradientTape), expected)
        else:
            same(steps(model, hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes), own), expected)


def check_digits_cnn_training_equals_one_process(hvd):
    compare(hvd, cnn, digits, (1, 3), by_tape=True)


def check_digits_cnn_training_with_two_backward_passes_equals_one_process(hvd):
    compare(hvd, cnn, digits, (2,))


def check_transformer_with_tied_embedding_equals_one_process(hvd):
    compare(hvd, Transformer, tokens, (2,))


def check_transformer_with_tied_embedding_equals_one_process_by_tape_and_in_three_passes(hvd):
    compare(hvd, Transformer, tokens, (1, 3), by_tape=True)


def check_weights_are_equal_on_all_ranks_after_one_step_of_fit(hvd):
    # Under Keras 3, Horovod's optimizer reduces nothing: two ranks would have 0.2 and 0.4, but both must have 0.3.
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss=lambda y, predicted: -tf.reduce_sum(y * predicted))
    x = np.array([[2.0 * (hvd.rank() + 1)]], np.float32)
    model.fit(x, np.ones((1, 1), np.float32), epochs=1, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], [[0.2 * (hvd.size() + 1) / 2]], rtol=1e-6)


def check_op_and_groups_arguments_apply_to_a_keras_optimizer(hvd):
    # Horovod itself ignores `op` and `groups` for this optimizer.
    v = keras.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, groups=[[v]])
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), v)])
    np.testing.assert_allclose(v, [1.0 - hvd.size(), 2.0 - hvd.size()])
    assert type(optimizer).__name__ == "SGD"
