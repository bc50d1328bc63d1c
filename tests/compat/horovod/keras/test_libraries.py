"""Which Keras is used, what is loaded for it, and the error if there is none. Each in a separate process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import require_module
from tests.ranks import clean_environment
from tests.warm import KERAS_ON_TORCH, OLDER_KERAS, TENSORFLOW, run_alone

INSTALL = "import sys; import paceline.compat as c; c.install('horovod')\n"
LOADED = "print(sorted({'torch', 'tensorflow', 'keras', 'tf_keras'} & set(sys.modules)))"


def run(code: str, loaded: str, **variables: str) -> str:
    """Return the last line of output, or of the error, of a process that has only this loaded."""
    names = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS", "PYTHONPATH")
    clean = {name: value for name, value in clean_environment().items() if name not in names}
    script = Path("script.py")
    script.write_text(code)
    done = run_alone(str(script), loaded=loaded, environment=clean | {"TF_CPP_MIN_LOG_LEVEL": "3"} | variables)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1]


def test_keras_on_torch_loads_no_tensorflow():
    require_module("torch")
    require_module("keras")
    code = INSTALL + "import horovod.keras as hvd, horovod.keras.callbacks, horovod.keras.elastic\n" + LOADED
    assert run(code, KERAS_ON_TORCH, KERAS_BACKEND="torch") == "['keras', 'torch']"


def test_keras_on_tensorflow_loads_no_torch():
    require_module("tensorflow")
    assert (
        run(INSTALL + "import horovod.keras as hvd\n" + LOADED, TENSORFLOW, KERAS_BACKEND="tensorflow")
        == "['keras', 'tensorflow']"
    )


@pytest.mark.proof
def test_legacy_keras_is_used_if_requested():
    require_module("tf_keras")
    code = INSTALL + (
        "import horovod.keras as one, horovod.tensorflow.keras as other, tf_keras\n"
        "print([m.callbacks.MetricAverageCallback.__mro__[2].__module__.split('.')[0] for m in (one, other)],\n"
        "    one.callbacks.MetricAverageCallback is other.callbacks.MetricAverageCallback)"
    )
    assert run(code, OLDER_KERAS, TF_USE_LEGACY_KERAS="1") == "['tf_keras', 'tf_keras'] True"


def test_keras_3_is_used_if_the_script_has_loaded_it():
    require_module("tf_keras")
    code = (
        "import keras\n"
        + INSTALL
        + "import horovod.keras as hvd; print(hvd.callbacks.MetricAverageCallback.__mro__[2])"
    )
    assert "'keras.src." in run(code, TENSORFLOW, TF_USE_LEGACY_KERAS="1")


def test_tf_keras_model_takes_callbacks_and_optimizers_of_horovod_keras():
    require_module("tf_keras")
    code = INSTALL + (
        "import horovod.keras as hvd, tf_keras, numpy as np; hvd.init()\n"
        "model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,))])\n"
        "model.compile(optimizer=hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.5)), loss='mse')\n"
        "callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),\n"
        "    hvd.callbacks.LearningRateWarmupCallback(0.25, warmup_epochs=2)]\n"
        "x = np.ones((4, 1)); model.fit(x, x, verbose=0, callbacks=callbacks)\n"
        "print(callbacks[0].broadcast_done, float(model.optimizer.learning_rate.numpy())); hvd.shutdown()"
    )
    assert run(code, TENSORFLOW) == "True 0.25"


def test_error_for_an_unsupported_keras_backend_names_the_supported_backends():
    require_module("keras")
    require_module("torch")
    # Simulate Keras on jax, because jax is not installed.
    code = INSTALL + "import keras; keras.backend.backend = lambda: 'jax'\nimport horovod.keras"
    answer = run(code, KERAS_ON_TORCH, KERAS_BACKEND="torch")
    assert "backend 'jax'" in answer
    assert "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch" in answer


def test_missing_tf_keras_raises_an_error_with_the_next_step():
    code = INSTALL + (
        "sys.modules['tf_keras'] = None\nfrom paceline.compat.horovod._keras import settings\n"
        "import importlib\nsettings.of_tensorflow()"
    )
    answer = run(code, TENSORFLOW, TF_USE_LEGACY_KERAS="1")
    assert "this script needs tf_keras" in answer
    assert "unset TF_USE_LEGACY_KERAS" in answer
