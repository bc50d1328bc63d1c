"""Keras on TensorFlow, with the collectives of `horovod.tensorflow`, which work within a graph too."""

from __future__ import annotations

from dataclasses import replace

import tensorflow as tf

from paceline.compat.horovod._keras.settings import KerasSettings, key_of, shared_name
from paceline.compat.horovod.common.ops import Min
from paceline.compat.horovod.tensorflow.allreduce import allreduce
from paceline.compat.horovod.tensorflow.arrays import Gradient
from paceline.compat.horovod.tensorflow.broadcast import broadcast
from paceline.compat.horovod.tensorflow.compression import Compression
from paceline.compat.horovod.tensorflow.gather import allgather
from paceline.compat.horovod.tensorflow.names import Named
from paceline.compat.horovod.tensorflow.reducescatter import reducescatter
from paceline.compat.horovod.tensorflow.reduction import Accumulator, divided, reduce_gradients

__all__ = ["Accumulator", "Compression", "allgather", "allreduce", "broadcast", "divided", "on_all_ranks", "reduce"]
__all__ += ["reducescatter", "tensor"]


def reduce(grads: list[Gradient], variables: list[tf.Variable], settings: KerasSettings) -> list[Gradient]:
    named = [Named(shared_name(place, variable)) for place, variable in enumerate(variables)]
    groups = settings.groups
    if groups and not isinstance(groups, int):
        place_of = {key_of(variable): place for place, variable in enumerate(variables)}
        groups = [[named[place_of[key_of(v)]] for v in members if key_of(v) in place_of] for members in groups]
    # Leave the name scope of the optimizer: it may have another name on other ranks, but the names of operations must match.
    with tf.name_scope(""):
        return list(reduce_gradients(grads, named, replace(settings, groups=groups)))


def on_all_ranks(condition: tf.Tensor, settings: KerasSettings) -> tf.Tensor:
    with tf.name_scope(""):
        held = allreduce(
            tf.cast(condition, tf.int32), op=Min, name=f"{settings.prefix}.finite", process_set=settings.process_set
        )
    return tf.cast(held, tf.bool)


def tensor(value: object) -> tf.Tensor:
    """Convert a number, an array, a tensor or a variable to a tensor."""
    return tf.convert_to_tensor(value)
