"""What only Keras 3 has: its own accumulation of gradients, its loss scale, `apply`."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.compat.horovod.common import handles
from tests.compat.horovod.keras.checks.training import (
    agree,
    compare,
    digits,
    digits_model,
    fit,
    loss_of,
    share,
    start_and_end,
    train_alone,
)


def product(y, p):
    return -p * y


def single(keras, optimizer, **compiled):
    """One weight, from 0; its gradient is minus the target."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer=optimizer, loss=product, **compiled)
    return model


@contextmanager
def submissions():
    """The names of all that is submitted meanwhile."""
    names, original = [], handles.submit
    handles.submit = lambda kind, name, *rest: names.append(str(name)) or original(kind, name, *rest)
    try:
        yield names
    finally:
        handles.submit = original


def its_own_accumulation_equals_one_process(hvd, keras, **clipping):
    """Sent are the sums alone."""

    def optimizer(steps=None):
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=steps, **clipping)

    x, y = digits()
    rows, passes, steps = 4, 3, 2
    together = rows * passes * hvd.size()

    def train(alone):
        train_alone(keras, alone, optimizer(), x[: steps * together], y[: steps * together], together)

    model, expected = start_and_end(hvd, keras, digits_model, train)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer(passes)), loss=loss_of(keras))
    mine = share(hvd, x, steps, rows, passes), share(hvd, y, steps, rows, passes)
    with submissions() as names:
        fit(keras, model, *mine, rows)
    agree(model, expected)
    kernels = [name for name in names if ".0.kernel" in name]
    assert len(kernels) == (steps if hvd.size() > 1 else 0), names


def check_keras_gradient_accumulation_equals_one_process(hvd, keras):
    its_own_accumulation_equals_one_process(hvd, keras)
    with pytest.raises(ValueError, match="give one of them"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2)


def check_clipping_with_keras_gradient_accumulation_equals_one_process(hvd, keras):
    its_own_accumulation_equals_one_process(hvd, keras, global_clipnorm=0.05)


def check_apply_and_apply_gradients_average_gradients_once(hvd, keras):
    mean = np.mean([r + 1.0 for r in range(hvd.size())])
    for way in ("apply_gradients", "apply", "apply without variables"):
        variable = keras.Variable(np.zeros((2,), "float32"), name="weight")
        opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        grad = keras.ops.convert_to_tensor(np.full((2,), hvd.rank() + 1.0, "float32"))
        if way == "apply_gradients":
            opt.apply_gradients([(grad, variable)])
        elif way == "apply":
            opt.apply([grad], [variable])
        else:
            opt.build([variable])
            opt.apply([grad])
        assert variable.numpy() == pytest.approx([-mean, -mean])
        assert int(opt.iterations.numpy()) == 1
    # Calls that Keras refuses or ignores are also refused or ignored by the wrapped optimizer.
    opt.apply([])
    with pytest.raises(ValueError, match="grad"):
        opt.apply([grad, grad])
    with pytest.raises(ValueError, match="2 gradients were given for 1 variables"):
        opt.apply([grad, grad], [variable])


def check_failed_reduction_does_not_add_old_gradients_to_the_next_step(hvd, keras):
    variable = keras.Variable(np.zeros((1,), "float32"), name="weight")
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    original, values = handles.submit, []

    def fail(*args):
        raise hvd.HorovodInternalError("made up")

    for value in (100.0, 100.0, 1.0, 1.0):
        grad = keras.ops.convert_to_tensor(np.full((1,), value, "float32"))
        handles.submit = fail if value > 1 else original
        try:
            opt.apply([grad], [variable])
        except hvd.HorovodInternalError:
            values.append("failed")
        finally:
            handles.submit = original
        values.append(variable.numpy().item())
    assert values == ([0, "failed", 0, 0, -2] if hvd.size() > 1 else [0, -200, -200, -202])


def check_rank_that_created_other_models_before_uses_the_same_gradient_names(hvd, keras):
    for _ in range(hvd.rank()):
        keras.optimizers.SGD(0.1)
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model = single(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    one = np.ones((1, 1), "float32")
    fit(keras, model, one, one * (hvd.rank() + 1))
    assert model.get_weights()[0].item() == pytest.approx(0.1 * np.mean([r + 1 for r in range(hvd.size())]))


def check_missing_gradient_is_skipped_with_a_warning(hvd, keras):
    used, unused = (keras.Variable(np.zeros((1,), "float32"), name=name) for name in ("used", "unused"))
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    grad = keras.ops.convert_to_tensor(np.full((1,), hvd.rank() + 1.0, "float32"))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        opt.apply([None, grad], [unused, used])
    assert used.numpy().item() == pytest.approx(-np.mean([r + 1 for r in range(hvd.size())]))
    assert unused.numpy().item() == 0


def check_step_with_an_infinite_gradient_is_skipped_on_all_ranks(hvd, keras):
    """Rank 0 alone has a gradient without end: no rank may go on into a collective that it will not come to."""
    for wrapped in ("by the script", "within"):
        variable = keras.Variable(np.zeros((1,), "float32"), name="weight")
        sgd = keras.optimizers.SGD(1.0)
        if wrapped == "within":
            opt = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd, initial_scale=4.0))
        else:
            opt = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd), initial_scale=4.0)
        assert opt.inner_optimizer.distribution.settings.passes == 1
        for step, value in enumerate(("finite", "infinite", "finite")):
            broken = value == "infinite" and hvd.rank() == 0
            scale = float(opt.scale_loss(1.0))
            grad = np.full((1,), np.inf if broken else scale * (hvd.rank() + 1), "float32")
            opt.apply([keras.ops.convert_to_tensor(grad)], [variable])
            done = step + (value == "finite") - (step == 2)
            assert variable.numpy().item() == pytest.approx(-done * np.mean([r + 1 for r in range(hvd.size())]) or 0)
            # After the second step, all ranks halve the scale because rank 0 had an infinite gradient.
            assert float(opt.scale_loss(1.0)) == (4.0 if step == 0 else 2.0)


def check_mixed_float16_model_is_trained(hvd, keras):
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = digits_model(keras)
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=loss_of(keras))
        assert type(model.optimizer).__name__ == "LossScaleOptimizer"
        x, y = digits()
        mine = slice(hvd.rank(), 64 * hvd.size(), hvd.size())
        fit(keras, model, x[mine], y[mine], rows=32, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        everyone = np.array(hvd.allgather(np.concatenate([w.ravel() for w in model.get_weights()])[None]))
        assert np.ptp(everyone, axis=0).max() == 0
        assert np.isfinite(everyone).all()
    finally:
        keras.mixed_precision.set_dtype_policy(before)


def check_explicit_jit_compile_is_refused(hvd, keras):
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for given in (opt, keras.optimizers.LossScaleOptimizer(opt)):
        with pytest.raises(ValueError, match="Leave jit_compile out"):
            single(keras, given, jit_compile=True)
        # With jit_compile="auto" the model does not use XLA, even if the machine supports it.
        model = single(keras, given)
        assert model._resolve_auto_jit_compile() is False
        assert model.jit_compile is False
    from keras.src.trainers import trainer

    plain = single(keras, keras.optimizers.SGD(0.1))
    assert trainer.model_supports_jit(plain) is True
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Simulate a GPU, with which jit_compile="auto" selects XLA for any other optimizer.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tf.config, "list_physical_devices", lambda *kind: [SimpleNamespace(device_type="GPU")])
            assert plain._resolve_auto_jit_compile() is True
            assert model._resolve_auto_jit_compile() is False
            assert single(keras, opt).jit_compile is False


def check_eager_training_equals_one_process(hvd, keras):
    sgd = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    compare(hvd, keras, digits_model, digits, sgd, compiled={"run_eagerly": True}, steps=2)
    compare(hvd, keras, digits_model, digits, sgd, compiled={"run_eagerly": True}, steps=1, passes=2)


def check_gradients_of_local_layers_are_not_reduced(hvd, keras):
    if not hasattr(hvd, "PartialDistributedOptimizer"):
        return
    for scaled in (True, False):
        local = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        opt = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=[local], scale_local_gradients=scaled
        )
        # The layers are built only after the optimizer was created.
        model = keras.Sequential([keras.Input((1,)), local, shared])
        model.compile(optimizer=opt, loss=product)
        one = np.ones((1, 1), "float32")
        fit(keras, model, one, one * (hvd.rank() + 1))
        own, together = (weight.item() for weight in model.get_weights())
        assert own == pytest.approx(1 + (hvd.rank() + 1) / (hvd.size() if scaled else 1))
        assert together == pytest.approx(1 + np.mean([r + 1 for r in range(hvd.size())]))
    with pytest.raises(ValueError, match="not a Keras layer"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=["dense"])
