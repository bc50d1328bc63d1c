"""Train on scikit-learn's digits with horovod.tensorflow, a loop of one's own and a tape, as scripts for Horovod are written.

paceline run -j 1x2 --backend mpi examples/horovod_tensorflow/train.py
"""

import argparse

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
arguments = parser.parse_args()

hvd.init()
tf.random.set_seed(hvd.rank())

digits = load_digits()
images = (digits.images / 16).astype("float32")[..., None]
labels = digits.target.astype("int32")
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
train = train.shard(hvd.size(), hvd.rank()).shuffle(1500, seed=1).batch(arguments.batch_size, drop_remainder=True)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
scale = 1 if arguments.use_adasum else hvd.size()
optimizer = tf.keras.optimizers.SGD(0.05 * scale, momentum=0.9)


@tf.function
def train_step(x: tf.Tensor, y: tf.Tensor, first_batch: bool) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(
        tape,
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if arguments.use_adasum else hvd.Average,
    )
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


first_batch = True
for epoch in range(arguments.epochs):
    for x, y in train:
        train_step(x, y, first_batch)
        first_batch = False
    right = tf.argmax(model(images[1500:]), 1, tf.int32) == labels[1500:]
    accuracy = hvd.allreduce(tf.reduce_mean(tf.cast(right, tf.float32)), name="accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f} on {hvd.size()} ranks", flush=True)
