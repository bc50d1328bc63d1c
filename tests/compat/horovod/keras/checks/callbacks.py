"""The callbacks, within `fit`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compat.horovod.keras.checks.training import digits, digits_model, fit, loss_of


def line(keras, optimizer, **compiled):
    """y = w x + b, from weights that differ between ranks."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse", **compiled)
    return model


def seen_by_all(hvd, array, name):
    """Each rank's array, as a row."""
    return np.array(hvd.allgather(np.asarray(array, "float64").reshape(1, -1), name=name))


def check_broadcast_callback_makes_ranks_equal_before_the_first_batch(hvd, keras):
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * (hvd.rank() + 1), momentum=0.9))
    model = line(keras, opt)
    model.set_weights([np.full((1, 1), hvd.rank() + 1.0), np.full((1,), hvd.rank() + 5.0)])
    first = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            first.append([weight.item() for weight in self.model.get_weights()])

    root = hvd.size() - 1
    x = np.arange(8, dtype="float32").reshape(-1, 1)
    # A second `fit` with the same callback does not broadcast the weights again.
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root), Look()]
    fit(keras, model, x, x, rows=4, callbacks=callbacks)
    assert first[0] == [root + 1.0, root + 5.0]
    everyone = seen_by_all(hvd, [w.item() for w in model.get_weights()] + [float(opt.learning_rate.numpy())], "equal")
    assert (everyone == everyone[0]).all()
    assert float(opt.learning_rate.numpy()) == pytest.approx(0.1 * (root + 1))
    model.set_weights([np.full((1, 1), hvd.rank() + 1.0), np.full((1,), 0.0)])
    fit(keras, model, x, x, rows=8, callbacks=callbacks)
    assert first[-1] == [hvd.rank() + 1.0, 0.0]


def check_model_without_an_input_shape_is_equal_on_all_ranks_after_the_first_batch(hvd, keras):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    x = np.ones((4, 2), "float32")
    fit(keras, model, x, x[:, :1], rows=2, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    everyone = seen_by_all(hvd, np.concatenate([w.ravel() for w in model.get_weights()]), "unbuilt")
    assert (everyone == everyone[0]).all()


def check_broadcast_callback_sends_statistics_but_no_local_variables(hvd, keras):
    model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    rank = float(hvd.rank())
    model.set_weights([np.full_like(w, rank + 1) for w in model.get_weights()])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    bias = model.layers[-1].weights[1]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[bias])
    callback.set_model(model)
    callback.on_train_begin()
    assert [w.item() for w in model.get_weights()] == [1.0] * 5 + [rank + 1]


def check_different_models_on_the_ranks_raise_an_error(hvd, keras):
    if hvd.size() == 1:
        return
    model = keras.Sequential([keras.Input((1,)), *[keras.layers.Dense(1) for _ in range(1 + (hvd.rank() == 1))]])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    x = np.ones((2, 1), "float32")
    with pytest.raises(ValueError, match="Build the same model"):
        fit(keras, model, x, x, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def check_later_callbacks_get_metrics_averaged_over_the_ranks(hvd, keras):
    model = line(keras, keras.optimizers.SGD(0.0), metrics=["mae"])
    model.set_weights([np.zeros((1, 1)), np.zeros((1,))])
    seen = {}

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.update(logs)

    y = np.full((2, 1), hvd.rank() + 1.0, "float32")
    x = np.ones_like(y)
    history = model.fit(
        x, y, validation_data=(x, 2 * y), verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback(), Look()]
    ).history
    ranks = np.arange(1, hvd.size() + 1)
    assert seen["mae"] == pytest.approx(ranks.mean())
    assert seen["loss"] == pytest.approx((ranks**2).mean())
    assert seen["val_mae"] == pytest.approx(2 * ranks.mean())
    assert history["val_loss"] == [pytest.approx(4 * (ranks**2).mean())]


def check_metric_missing_on_one_rank_is_named(hvd, keras):
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0, "words": "left alone", "by_class": [1.0 * hvd.rank(), 2.0]}
    if hvd.size() > 1:
        mine = logs | ({"val_loss": 2.0} if hvd.rank() == 0 else {})
        with pytest.raises(ValueError, match=r"rank 1 lacks val_loss; rank 0 has .*loss, val_loss"):
            callback.on_epoch_end(0, mine)
    # The average that failed must not affect the next average.
    callback.on_epoch_end(0, logs)
    assert logs["words"] == "left alone"
    assert np.asarray(logs["by_class"]).tolist() == [np.mean(np.arange(hvd.size())), 2.0]


def rates(hvd, keras, callback, epochs, *, steps=4, optimizer=None):
    """The learning rate of each batch."""
    opt = optimizer or keras.optimizers.SGD(7.0)
    model = line(keras, opt)
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(float(opt.learning_rate.numpy()))

    x = np.zeros((steps, 1), "float32")
    history = fit(keras, model, x, x, rows=1, epochs=epochs, callbacks=[callback, Look()]).history
    return np.array(found).reshape(epochs, steps), history["lr"]


def check_warmup_callback_raises_the_learning_rate_linearly(hvd, keras):
    found, logged = rates(hvd, keras, hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2), 3)
    start = 0.8 / hvd.size()
    assert found.ravel()[:8] == pytest.approx([start + (0.8 - start) * (batch + 1) / 8 for batch in range(8)])
    # After the warmup, the learning rate stays constant.
    assert found[2] == pytest.approx([0.8] * 4)
    assert logged == pytest.approx([found[0, -1], 0.8, 0.8])


def check_learning_rate_schedule_callback_accepts_factors_and_functions(hvd, keras):
    make = hvd.callbacks.LearningRateScheduleCallback
    found, _ = rates(hvd, keras, make(0.5, 0.1, start_epoch=1, end_epoch=2), 3)
    assert found[:, 0] == pytest.approx([7.0, 0.05, 0.05])
    found, _ = rates(hvd, keras, make(0.5, lambda epoch: 0.5**epoch), 3)
    assert found == pytest.approx(np.array([[0.5], [0.25], [0.125]]) * np.ones((1, 4)))
    found, _ = rates(hvd, keras, make(1.0, lambda epoch: 1 + epoch, staircase=False), 2)
    assert found.ravel() == pytest.approx(1 + np.arange(8) / 4)
    found, _ = rates(hvd, keras, make(1.0, lambda epoch: 1 + epoch, staircase=False, steps_per_epoch=8), 1)
    assert found.ravel() == pytest.approx(1 + np.arange(4) / 8)


def check_momentum_is_corrected_when_the_learning_rate_changes(hvd, keras):
    """v' = m v r - lr' g, where r = lr'/lr; without the correction r is 1."""
    for corrected in (True, False):
        opt = keras.optimizers.SGD(0.1, momentum=0.9)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(optimizer=opt, loss=lambda y, p: -p * y)
        callback = hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 4.0**epoch, momentum_correction=corrected
        )
        x = np.ones((2, 1), "float32")
        fit(keras, model, x, x, rows=1, epochs=2, callbacks=[callback])
        v, w = 0.0, 0.0
        for rate, ratio in ((0.1, 1), (0.1, 1), (0.4, 4 if corrected else 1), (0.4, 1)):
            v = 0.9 * v * ratio + rate
            w += v
        assert model.get_weights()[0].item() == pytest.approx(w, rel=1e-6)


def check_learning_rate_callback_refuses_an_optimizer_with_its_own_schedule(hvd, keras):
    opt = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.5))
    with pytest.raises(ValueError, match="ExponentialDecay, a schedule that sets the rate"):
        rates(hvd, keras, hvd.callbacks.LearningRateWarmupCallback(0.8), 1, optimizer=opt)
    with pytest.raises(ValueError, match="initial_lr=None"):
        hvd.callbacks.LearningRateWarmupCallback(None)
    callback = hvd.callbacks.LearningRateWarmupCallback(0.8)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch=<batches>"):
        callback.on_train_begin()


def check_best_model_checkpoint_is_saved_only_by_rank_0(hvd, keras):
    model = line(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    x = np.ones((2, 1), "float32")
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=f"best_{hvd.rank()}.keras")
    fit(keras, model, x, x, epochs=2, callbacks=[callback])
    import os

    assert os.path.exists(f"best_{hvd.rank()}.keras") == (hvd.rank() == 0)
    if hvd.rank() == 0:
        assert keras.models.load_model("best_0.keras").count_params() == 2
    with pytest.raises(ValueError, match=r"filepath='best\.keras'"):
        fit(keras, model, x, x, callbacks=[hvd.callbacks.BestModelCheckpoint(monitor="loss")])


def check_training_with_all_callbacks_learns_the_digits(hvd, keras):
    x, y = digits()
    model = digits_model(keras)
    scaled = 0.05 * hvd.size()
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(scaled, momentum=0.9))
    model.compile(optimizer=opt, loss=loss_of(keras), metrics=["accuracy"])
    mine = slice(hvd.rank(), 1500, hvd.size())
    rows = len(range(1500)[mine]) // 32 * 32
    history = model.fit(
        x[mine][:rows],
        y[mine][:rows],
        batch_size=32,
        epochs=4,
        steps_per_epoch=1500 // hvd.size() // 32,
        validation_data=(x[1500:], y[1500:]),
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(scaled, warmup_epochs=2),
            keras.callbacks.ReduceLROnPlateau(patience=10),
        ],
    ).history
    assert history["val_accuracy"][-1] > 0.7
    everyone = seen_by_all(hvd, np.concatenate([w.ravel() for w in model.get_weights()]), "together")
    assert (everyone == everyone[0]).all()
