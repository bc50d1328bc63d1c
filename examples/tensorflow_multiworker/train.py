"""Trains on scikit-learn's digits with TensorFlow's MultiWorkerMirroredStrategy; nothing in it is Paceline's.

    TensorFlow("examples/tensorflow_multiworker", entry_script="train.py", node_count=2,
               distributed_backend="tensorflow", environment_variables={"TF_USE_LEGACY_KERAS": "1"})

`fit` under this strategy needs the Keras of tf_keras (pip install tf_keras): with Keras 3 it fails inside TensorFlow.
"""

from __future__ import annotations

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
arguments = parser.parse_args()

# Before anything else of TensorFlow: the workers meet here.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
worker = strategy.cluster_resolver.task_id or 0

digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
labels = digits.target.astype("int64")


def batches(begin: int, end: int) -> tf.data.Dataset:
    """The images between these two, in batches of which each worker takes its part."""
    data = tf.data.Dataset.from_tensor_slices((images[begin:end], labels[begin:end]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.batch(arguments.batch_size).with_options(options)


tf.keras.utils.set_random_seed(1)
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.01),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    batches(0, 1472).shuffle(23, seed=1), epochs=arguments.epochs, validation_data=batches(1472, 1792), verbose=0
)
for epoch, (loss, accuracy) in enumerate(zip(history.history["loss"], history.history["val_accuracy"], strict=True)):
    print(
        f"worker {worker} of {strategy.num_replicas_in_sync}, epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.3f}",
        flush=True,
    )
