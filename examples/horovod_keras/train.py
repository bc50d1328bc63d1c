"""Trains on scikit-learn's digits as a Horovod script with Keras 3 does; nothing in it is Paceline's.

paceline run -j 1x2 --backend mpi examples/horovod_keras/train.py
"""

from __future__ import annotations

import argparse

import horovod.keras as hvd
import keras
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--backward-passes-per-step", type=int, default=1)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--save-to", default="")
arguments = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())

digits = load_digits()
images, labels = (digits.images / 16).astype("float32")[..., None], digits.target
# Equally many for each rank: one that has a batch more would wait for the others for ever.
count = 1500 // hvd.size()
mine = slice(hvd.rank(), count * hvd.size(), hvd.size())

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
scaled_lr = 0.002 * hvd.size()
model.compile(
    optimizer=hvd.DistributedOptimizer(
        keras.optimizers.Adam(scaled_lr),
        backward_passes_per_step=arguments.backward_passes_per_step,
        average_aggregated_gradients=True,
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
    ),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    images[mine],
    labels[mine],
    batch_size=arguments.batch_size,
    epochs=arguments.epochs,
    validation_data=(images[1500:], labels[1500:]),
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(scaled_lr, warmup_epochs=2),
    ],
).history

if hvd.rank() == 0:
    for epoch, accuracy in enumerate(history["val_accuracy"]):
        print(f"epoch {epoch}: accuracy {accuracy:.3f} on {hvd.size()} ranks", flush=True)
    if arguments.save_to:
        model.save(arguments.save_to)
