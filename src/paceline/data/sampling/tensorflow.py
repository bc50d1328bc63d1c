"""A `tf.data.Dataset` of this rank's samples, in the order of `DistributedSampler`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.data.sampling.order import GlobalOrder
from paceline.data.sampling.world import check_tail, length_of, own_positions, own_rank
from paceline.errors import DataError
from paceline.system.lazy_import import load_triton_before_tensorflow

load_triton_before_tensorflow()


def tensorflow_dataset(
    arrays_or_length: Any,
    batch_size: int,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    seed: int = 0,
    epoch: int = 0,
    epochs: int = 1,
    start: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    pad: bool = False,
) -> Any:
    """Return a `tf.data.Dataset` of this rank's batches, with a known cardinality.

    Its options switch off TensorFlow's own sharding. With `MultiWorkerMirroredStrategy`:

        def of_worker(context):
            return tensorflow_dataset((x, y), 32, context.input_pipeline_id, context.num_input_pipelines, epochs=10)

        model.fit(strategy.distribute_datasets_from_function(of_worker), epochs=10, steps_per_epoch=steps)

    Args:
        arrays_or_length: A numpy array or memory map, a tuple or dict of arrays of equal length, or a number of samples.
            For arrays, batches are rows in the same structure; for a number, batches are arrays of sample numbers.
        batch_size: Samples per batch of one rank; the last batch of an epoch may be smaller.
        rank: This rank. Default: `torch.distributed` if initialised, else RANK; 0 without a run or a launcher.
        world_size: Number of ranks; give it together with rank. Default: from the same source as rank.
        seed: Seed of the order, equal on every rank.
        epoch: The first epoch.
        epochs: Number of consecutive epochs, each in its own order, for one call of `model.fit`.
        start: Global position to resume the first epoch at: steps done x batch_size x world_size.
        shuffle: False keeps the order of the arrays.
        drop_last: Leave out the last samples that do not divide evenly among the ranks.
        pad: Repeat the epoch's first samples until all ranks have equally many.

    Raises:
        DataError: A value is invalid, or the arrays differ in length.
        RunContextError: RANK or WORLD_SIZE is missing in a worker.
    """
    import numpy as np
    import tensorflow as tf

    check_tail(drop_last, pad)
    rank, world_size = own_rank(rank, world_size)
    arrays, length = _arrays(arrays_or_length)
    _check_counts(batch_size=batch_size, epochs=epochs)
    if not 0 <= start <= length:
        raise DataError(f"start={start} of {length} samples: a position is one of 0 .. {length}.")
    # Check the arguments here: TensorFlow's thread would raise only at the first batch.
    GlobalOrder(length, seed, epoch)
    # Only the first epoch resumes at the position `start`; all later epochs begin at 0.
    shares = [
        (epoch + number, own_positions(length, rank, world_size, start=from_, drop_last=drop_last, pad=pad))
        for number, from_ in enumerate([start] + [0] * (epochs - 1))
    ]

    def batches() -> Iterator[Any]:
        for number, positions in shares:
            order = GlobalOrder(length, seed, number, shuffle=shuffle)
            for first in range(0, len(positions), batch_size):
                samples = np.asarray(order.samples(positions[first : first + batch_size]))
                yield samples if arrays is None else tf.nest.map_structure(lambda array, at=samples: array[at], arrays)

    if arrays is None:
        signature = tf.TensorSpec((None,), tf.int64)
    else:
        signature = tf.nest.map_structure(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), arrays)
    made = tf.data.Dataset.from_generator(batches, output_signature=signature)
    # TensorFlow can't infer the length of a generator, and Keras needs it for the number of steps.
    made = made.apply(
        tf.data.experimental.assert_cardinality(sum(-(-len(positions) // batch_size) for _, positions in shares))
    )
    options = tf.data.Options()
    # Turn off TensorFlow's sharding: it would split this rank's part again, so that most samples would never be used.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return made.with_options(options)


def _arrays(source: Any) -> tuple[Any, int]:
    import numpy as np
    import tensorflow as tf

    if hasattr(source, "__index__") and not hasattr(source, "__len__"):
        return None, length_of(source, "tensorflow_dataset")
    # Convert a list to an array, because TensorFlow would treat each of its numbers as an array.
    arrays = tf.nest.map_structure(np.asanyarray, np.asarray(source) if isinstance(source, list) else source)
    # A scalar has no first dimension.
    lengths = {len(array) if array.ndim else -1 for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1 or -1 in lengths:
        shapes = [array.shape for array in tf.nest.flatten(arrays)]
        raise DataError(f"arrays of shapes {shapes}: all need the same first dimension, the number of samples.")
    return arrays, lengths.pop()


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise DataError(f"{name}={value!r}: give an integer of 1 or more.")
