"""The digits of scikit-learn, by Keras; each epoch's loss and accuracy is logged by a callback."""

import argparse

import tensorflow as tf
from azureml.core.run import Run
from sklearn.datasets import load_digits
from tensorflow import keras

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--first-layer-neurons", type=int, default=64)
args = parser.parse_args()

run = Run.get_context()
keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)


class LogRunMetrics(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, log):
        run.log("Loss", log["val_loss"])
        run.log("Accuracy", log["val_accuracy"])


model = keras.Sequential(
    [
        keras.layers.Input(shape=(64,)),
        keras.layers.Dense(args.first_layer_neurons, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    images / 16,
    labels,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_split=0.2,
    verbose=2,
    callbacks=[LogRunMetrics()],
)
tf.saved_model.save(model, "outputs/model")
