"""Files: what a distributed optimizer writes is read without Horovod, and the other way round."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.compat.horovod.keras.checks.training import fit


def trained(hvd, keras, optimizer, file):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse")
    x = np.linspace(0, 1, 4, dtype="float32").reshape(-1, 1)
    fit(keras, model, x, x, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    name = f"{file}_{hvd.rank()}.keras"
    model.save(name)
    return model, name


def state_of(optimizer):
    variables = optimizer.variables
    return [np.array(v.numpy()) for v in (variables() if callable(variables) else variables)]


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def check_saved_model_is_loaded_without_horovod(hvd, keras):
    model, name = trained(hvd, keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "written")
    plain = keras.models.load_model(name)
    assert type(plain.optimizer) is type(keras.optimizers.Adam(0.1))
    assert same(plain.get_weights(), model.get_weights())
    assert same(state_of(plain.optimizer), state_of(model.optimizer))


def check_loaded_model_averages_gradients_and_has_its_optimizer_state(hvd, keras):
    # A compression of None is the same as Compression.none.
    for distributed, given in ((True, {}), (False, {"compression": None})):
        opt = keras.optimizers.Adam(0.1)
        model, name = trained(hvd, keras, hvd.DistributedOptimizer(opt) if distributed else opt, "loaded")
        if not distributed:
            hvd.broadcast(0.0, 0, name="wait")
        again = hvd.load_model(name, **given)
        assert same(state_of(again.optimizer), state_of(model.optimizer))
        x = np.full((2, 1), hvd.rank() + 1.0, "float32")
        if not distributed:
            # Before this point, each rank has trained alone, so set equal weights and states.
            again.set_weights([np.ones_like(w) for w in again.get_weights()])
            for variable in again.optimizer.variables:
                variable.assign(np.zeros_like(variable.numpy()))
            again.optimizer.learning_rate = 0.1
        fit(keras, again, x, x)
        everyone = hvd.allgather(np.concatenate([w.ravel() for w in again.get_weights()])[None])
        assert np.ptp(np.array(everyone), axis=0).max() == 0


def check_model_loaded_on_one_rank_is_broadcast_to_models_built_on_others(hvd, keras):
    # Regression: ranks matched gradients by layer names, but Keras 3 renames the layers of a loaded model. So the ranks
    # waited forever.
    model, name = trained(hvd, keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "resumed")
    if hvd.rank() == 0:
        model = hvd.load_model(name)
    x = np.full((2, 1), hvd.rank() + 1.0, "float32")
    fit(keras, model, x, x, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    everyone = hvd.allgather(np.concatenate([w.ravel() for w in model.get_weights()])[None])
    assert np.ptp(np.array(everyone), axis=0).max() == 0


def check_model_with_a_custom_optimizer_class_is_loaded(hvd, keras):
    class Halving(keras.optimizers.SGD):
        def __init__(self, learning_rate=0.5, momentum=0.0, **kwargs):
            super().__init__(learning_rate=learning_rate, momentum=momentum, **kwargs)

    _, name = trained(hvd, keras, hvd.DistributedOptimizer(Halving(0.1)), "own")
    for given in ({"custom_optimizers": [Halving]}, {"custom_objects": {"Halving": Halving}}):
        model = hvd.load_model(name, **given)
        assert isinstance(model.optimizer, Halving)
        assert model.optimizer.distribution.settings.passes == 1


def check_saved_weights_are_loaded_with_another_optimizer(hvd, keras):
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model, _ = trained(hvd, keras, first, "weights")
    model.save_weights(f"own_{hvd.rank()}.weights.h5")
    before = model.get_weights()
    model.set_weights([np.zeros_like(w) for w in before])
    model.load_weights(f"own_{hvd.rank()}.weights.h5")
    assert same(model.get_weights(), before)


def check_copy_of_a_distributed_optimizer_has_the_same_config(hvd, keras):
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    again = copy.copy(opt)
    assert again.get_config() == opt.get_config()


def check_legacy_optimizer_option_is_refused_under_keras_3(hvd, keras):
    if keras.__name__ == "keras":
        with pytest.raises(ValueError, match="Keras 3 has no legacy optimizers"):
            hvd.load_model("nothing.keras", legacy_opts=True)
