from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from paceline.data import DistributedSampler, GlobalOrder
from paceline.data.sampling.tensorflow import tensorflow_dataset
from paceline.errors import DataError
from tests.engines.conftest import require_engine

X = np.arange(100, dtype=np.float32).reshape(50, 2)
Y = np.arange(50)


@pytest.fixture(autouse=True)
def tensorflow():
    require_engine("tensorflow", find_spec("tensorflow"))


def numbers(dataset):
    return [int(sample) for batch in dataset for sample in batch]


@pytest.mark.promise("tensorflow-gets-same-samples-same")
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"pad": True}, {"shuffle": False}], ids=str)
def test_tensorflow_dataset_gives_each_rank_the_same_samples_as_the_torch_sampler(options):
    for rank in range(3):
        sampler = DistributedSampler(50, rank, 3, seed=4, **options)
        sampler.set_epoch(2)
        dataset = tensorflow_dataset(50, 4, rank, 3, seed=4, epoch=2, **options)
        assert numbers(dataset) == list(sampler)
        assert int(dataset.cardinality()) == -(-len(sampler) // 4)


def test_dataset_resumed_on_another_worker_count_keeps_the_order():
    before = [numbers(tensorflow_dataset(50, 4, rank, 3, seed=4).take(2)) for rank in range(3)]
    position = 2 * 4 * 3
    after = [numbers(tensorflow_dataset(50, 4, rank, 2, seed=4, start=position)) for rank in range(2)]
    order = GlobalOrder(50, 4)
    assert sorted(sample for part in before for sample in part) == sorted(order[:position])
    assert sorted(sample for part in after for sample in part) == sorted(order[position:])
    resumed = DistributedSampler(50, 1, 2, seed=4)
    resumed.load_state_dict({**resumed.state_dict(), "position": position})
    assert after[1] == list(resumed)


def test_batches_have_the_structure_of_the_given_arrays():
    batches = list(tensorflow_dataset({"x": X, "y": (Y, Y + 1)}, 7, 1, 2))
    assert [len(batch["x"]) for batch in batches] == [7, 7, 7, 4]
    assert all((batch["x"][:, 0].numpy() == 2 * batch["y"][0].numpy()).all() for batch in batches)
    assert all((batch["y"][1].numpy() == batch["y"][0].numpy() + 1).all() for batch in batches)
    assert tensorflow_dataset((X, Y), 7, 0, 1).element_spec[0].shape.as_list() == [None, 2]
    assert numbers(tensorflow_dataset([5, 6, 7], 2, 0, 1, shuffle=False)) == [5, 6, 7]


def test_each_epoch_of_a_tensorflow_dataset_has_another_order():
    dataset = tensorflow_dataset(10, 4, 0, 1, seed=1, epoch=3, epochs=2, start=7)
    assert [len(batch) for batch in dataset] == [3, 4, 4, 2]
    assert numbers(dataset) == [*GlobalOrder(10, 1, 3)[7:], *GlobalOrder(10, 1, 4)]
    assert int(dataset.cardinality()) == 4


def test_tensorflow_dataset_turns_off_the_automatic_sharding_of_tensorflow():
    import tensorflow as tf

    options = tensorflow_dataset(10, 4, 0, 2).options()
    assert options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF


def test_tf_distribute_strategy_trains_on_the_dataset():
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    seen = []

    def of_worker(context):
        seen.append((context.input_pipeline_id, context.num_input_pipelines))
        return tensorflow_dataset(Y, 5, context.input_pipeline_id, context.num_input_pipelines)

    total = sum(int(tf.reduce_sum(batch)) for batch in strategy.distribute_datasets_from_function(of_worker))
    assert seen == [(0, 1)]
    assert total == Y.sum()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((X, Y[:3]), 4, 0, 1), {}, r"arrays of shapes .*\(3,\).*same first dimension"),
        ((np.float32(3), 4, 0, 1), {}, "same first dimension"),
        ((10, 0, 0, 1), {}, "batch_size=0"),
        ((10, 4, 0, 1), {"epochs": 0}, "epochs=0"),
        ((10, 4, 0, 1), {"start": 11}, "start=11 of 10 samples"),
        ((10, 4, 0, 1), {"drop_last": True, "pad": True}, "either left out or filled up"),
        ((10, 4, 1, 1), {}, "rank=1 with world_size=1"),
        ((10, 4, 0, 1), {"seed": 1.5}, r"seed=1\.5"),
    ],
)
def test_calling_tensorflow_dataset_with_invalid_arguments_raises_data_error(arguments, options, message):
    with pytest.raises(DataError, match=message):
        tensorflow_dataset(*arguments, **options)
