"""What only tf_keras has: optimizers of the kind before, and its loss scale."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.horovod.keras.checks.training import compare, digits, digits_model, fit, loss_of


def check_tf_keras_is_the_keras_of_tensorflow(hvd, keras):
    assert keras.__name__ == "tf_keras"
    assert tf.keras.optimizers.SGD is keras.optimizers.SGD


def check_legacy_optimizers_equal_one_process(hvd, keras):
    legacy = keras.optimizers.legacy
    compare(hvd, keras, digits_model, digits, lambda: legacy.SGD(0.1, momentum=0.9))
    compare(hvd, keras, digits_model, digits, lambda: legacy.Adam(0.01), passes=3, rows=4, tolerance=1e-4)
    compare(hvd, keras, digits_model, digits, lambda: legacy.SGD(0.1, global_clipnorm=0.05))


def check_legacy_optimizer_with_two_backward_passes_equals_one_process(hvd, keras):
    compare(hvd, keras, digits_model, digits, lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9), passes=2)


def check_eager_training_equals_one_process(hvd, keras):
    for optimizer in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        compare(hvd, keras, digits_model, digits, lambda o=optimizer: o(0.1), compiled={"run_eagerly": True}, steps=2)


def check_apply_gradients_averages_once_unless_aggregation_is_disabled(hvd, keras):
    mean = np.mean([r + 1.0 for r in range(hvd.size())])
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        variable = tf.Variable([0.0, 0.0])
        grad = tf.constant([hvd.rank() + 1.0] * 2)
        opt = hvd.DistributedOptimizer(make(1.0))
        opt.apply_gradients([(grad, variable)])
        assert variable.numpy() == pytest.approx([-mean, -mean])
        opt.apply_gradients([(grad, variable)], experimental_aggregate_gradients=False)
        assert variable.numpy() == pytest.approx([-mean - hvd.rank() - 1] * 2)
        assert int(opt.iterations.numpy()) == 2


def check_gradients_from_compute_gradients_are_reduced_once(hvd, keras):
    """Scripts clip what `_compute_gradients` gives, and apply it: in Horovod those are the ranks' averages."""
    ranks = range(hvd.size())
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        for op, reduced in ((hvd.Average, np.mean([r + 1.0 for r in ranks])), (hvd.Sum, sum(r + 1.0 for r in ranks))):
            variable = tf.Variable(0.0)
            opt = hvd.DistributedOptimizer(make(1.0), op=op)

            def step(opt=opt, variable=variable):
                with tf.GradientTape() as tape:
                    loss = variable * (hvd.rank() + 1.0)
                [(grad, _)] = opt._compute_gradients(loss, [variable], tape=tape)
                opt.apply_gradients([(tf.clip_by_value(grad, -0.5, 0.5), variable)])
                return grad

            assert step().numpy() == reduced
            assert tf.function(step)().numpy() == reduced
            assert variable.numpy() == pytest.approx(-1.0)
            [(grad, _)] = opt.compute_gradients(lambda v=variable: v * (hvd.rank() + 1.0), [variable])
            assert grad.numpy() == reduced
            [(again, _)] = opt._aggregate_gradients([(grad, variable)])
            assert again.numpy() == reduced
            assert opt._allreduce([tf.constant(hvd.rank() + 1.0)], [variable])[0].numpy() == reduced
            opt.apply_gradients([(grad, variable)])
            # Gradients that don't come from compute_gradients are reduced as usual.
            opt.apply_gradients([(tf.constant(hvd.rank() + 1.0), variable)])
            opt.minimize(lambda v=variable: v * (hvd.rank() + 1.0), [variable])
            assert variable.numpy() == pytest.approx(-1.0 - 3 * reduced)


def check_accumulated_gradients_applied_as_aggregated_are_still_reduced(hvd, keras):
    """Regression: with experimental_aggregate_gradients=False, no gradient was reduced, and each rank trained alone.
    `_compute_gradients` relied on `apply_gradients` to reduce, but this argument made `apply_gradients` skip the
    reduction."""
    mean = np.mean([2.0 * r for r in range(hvd.size())])
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        variable = tf.Variable(0.0)
        opt = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=2, average_aggregated_gradients=True)

        def step(opt=opt, variable=variable):
            with tf.GradientTape() as tape:
                loss = variable * 2.0 * hvd.rank()
            pairs = opt._compute_gradients(loss, [variable], tape=tape)
            opt.apply_gradients(pairs, experimental_aggregate_gradients=False)

        for number in range(1, 5):
            step()
            assert variable.numpy() == pytest.approx(-mean * (number // 2))
        # A gradient that the script has reduced itself is applied at once.
        opt.apply_gradients([(tf.constant(1.0), variable)], experimental_aggregate_gradients=False)
        assert variable.numpy() == pytest.approx(-2 * mean - 1)


def check_aggregation_helper_exists_only_with_several_backward_passes(hvd, keras):
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        assert hvd.DistributedOptimizer(make(1.0))._agg_helper is None
        opt = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=3, average_aggregated_gradients=True)
        variable = tf.Variable(0.0)
        opt.apply_gradients(opt._compute_gradients(lambda v=variable: v * 3.0, [variable]))
        helper = opt._agg_helper
        assert (helper.backward_passes_per_step, helper.average_aggregated_gradients) == (3, True)
        assert int(helper.counter) == 1
        assert variable.numpy() == 0.0


def check_legacy_get_gradients_returns_reduced_gradients_in_a_graph(hvd, keras):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", [], initializer=tf.zeros_initializer())
        opt = hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(1.0))
        [grad] = opt.get_gradients(variable * (hvd.rank() + 1.0), [variable])
        update = opt.apply_gradients([(grad, variable)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(update)
        assert session.run(variable) == pytest.approx(-np.mean([r + 1.0 for r in range(hvd.size())]))


def check_momentum_of_legacy_optimizers_is_corrected(hvd, keras):
    opt = keras.optimizers.legacy.SGD(0.1, momentum=0.9)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer=opt, loss=lambda y, p: -p * y)
    x = np.ones((2, 1), "float32")
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 4.0**epoch)
    fit(keras, model, x, x, rows=1, epochs=2, callbacks=[callback])
    v, w = 0.0, 0.0
    for rate, ratio in ((0.1, 1), (0.1, 1), (0.4, 4), (0.4, 1)):
        v = 0.9 * v * ratio + rate
        w += v
    assert model.get_weights()[0].item() == pytest.approx(w, rel=1e-6)


def check_step_with_an_infinite_gradient_is_skipped_on_all_ranks(hvd, keras):
    for make in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        for within in (True, False):
            variable = tf.Variable([0.0])
            scaled = keras.mixed_precision.LossScaleOptimizer
            if within:
                opt = hvd.DistributedOptimizer(scaled(make(1.0), initial_scale=4.0))
            else:
                opt = scaled(hvd.DistributedOptimizer(make(1.0)), initial_scale=4.0)
            for value in (hvd.rank() + 1.0, np.inf if hvd.rank() == 0 else 1.0, hvd.rank() + 1.0):
                with tf.GradientTape() as tape:
                    loss = opt.get_scaled_loss(tf.reduce_sum(variable * value))
                grads = opt.get_unscaled_gradients(tape.gradient(loss, [variable]))
                opt.apply_gradients(zip(grads, [variable], strict=True))
            assert variable.numpy().item() == pytest.approx(-2 * np.mean([r + 1 for r in range(hvd.size())]))
            assert float(opt.loss_scale.numpy()) == 2.0
    opt = scaled(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2))
    with pytest.raises(ValueError, match="LossScaleOptimizer of tf_keras"):
        opt.apply_gradients([(tf.constant([1.0]), variable)])


def check_model_files_with_legacy_optimizers_are_loaded(hvd, keras):
    opt = hvd.DistributedOptimizer(keras.optimizers.legacy.Adam(0.1))
    model = digits_model(keras)
    model.compile(optimizer=opt, loss=loss_of(keras))
    x, y = digits()
    fit(keras, model, x[:8], y[:8], callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    name = f"before_{hvd.rank()}.h5"
    with pytest.warns(UserWarning, match="HDF5"):
        model.save(name)
    plain = keras.models.load_model(name)
    assert type(plain.optimizer) is keras.optimizers.legacy.Adam
    again = hvd.load_model(name, legacy_opts=True)
    assert again.optimizer.distribution.settings.passes == 1
    for now, before in zip(again.optimizer.variables(), model.optimizer.variables(), strict=True):
        assert np.array_equal(now.numpy(), before.numpy())
