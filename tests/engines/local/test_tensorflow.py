"""TensorFlow's own distribution in real runs: several workers, parameter servers, and the limits of Keras 3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import paceline as pl
from tests.engines.conftest import require_engine
from tests.engines.lab import Lab, log_text, wait_for_end
from tests.warm import OLDER_KERAS, submitting_with, warm_python

EXAMPLE = Path(__file__).parents[3] / "examples" / "tensorflow_multiworker"
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}

KERAS_3_LOOP = """
    import os
    import keras, tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x = tf.random.stateless_normal((64, 4), seed=(1, 2))
    batches = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).repeat().batch(16)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        def one(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / strategy.num_replicas_in_sync
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(one, args=(batch,)), axis=None)

    data = iter(strategy.experimental_distribute_dataset(batches))
    losses = [float(step(next(data))) for _ in range(20)]
    print(f"keras {keras.__version__}, {strategy.num_replicas_in_sync} replicas, {losses[0]:.6f} to {losses[-1]:.6f}")
    print("weights", *(f"{value:.6f}" for value in model.get_weights()[0].ravel()))
"""

PARAMETER_SERVER = """
    import json, os, time
    from pathlib import Path
    import tensorflow as tf

    config = json.loads(os.environ["TF_CONFIG"])
    head, *others = config["cluster"]["worker"]
    cluster = tf.train.ClusterSpec({"chief": [head], "worker": others, "ps": config["cluster"]["ps"]})
    kind, index = config["task"]["type"], config["task"]["index"]
    done = Path("outputs/done")
    if kind == "ps" or index > 0:
        tf.distribute.Server(cluster, kind, index - (kind == "worker"), protocol="grpc")
        while kind == "ps" or not done.exists():
            time.sleep(0.05)
        os._exit(0)

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="chief", task_id=0, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        w = tf.Variable([[0.0], [0.0]])

    def data():
        x = tf.random.stateless_normal((64, 2), seed=(1, 2))
        return tf.data.Dataset.from_tensor_slices((x, x @ tf.constant([[2.0], [-1.0]]))).repeat().batch(16)

    @tf.function
    def step(batches):
        def one(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - y) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
        strategy.run(one, args=(next(batches),))

    batches = iter(coordinator.create_per_worker_dataset(data))
    for _ in range(50):
        coordinator.schedule(step, args=(batches,))
    coordinator.join()
    print("on", w.device, "weights", *(f"{value:.3f}" for value in w.numpy().ravel()), flush=True)
    done.touch()
"""


@pytest.fixture(autouse=True)
def tensorflow() -> None:
    require_engine("tensorflow", find_spec("tensorflow"))


@pytest.fixture
def at_hand(python_with_tensorflow: Path) -> Iterator[None]:
    with submitting_with(python_with_tensorflow):
        yield


# Only `make proof` runs this test, because the next test uses the same strategy with Keras 3.
@pytest.mark.promise("strategies-tensorflow-table-names-work")
@pytest.mark.proof
def test_two_tensorflow_workers_train_one_model(lab: Lab, tmp_path: Path) -> None:
    require_engine("tf_keras", find_spec("tf_keras"))
    estimator = pl.TensorFlow(
        EXAMPLE,
        entry_script="train.py",
        node_count=2,
        distributed_backend="tensorflow",
        environment_variables=LEGACY | QUIET,
    )
    with warm_python(tmp_path / "warm", kind=OLDER_KERAS) as python, submitting_with(python):
        run = lab.experiment.submit(estimator)
        wait_for_end(run)
    run.wait_for_completion()
    seen = [
        re.findall(rf"worker {rank} of 2, epoch \d: loss (\d\.\d+), accuracy (\d\.\d+)", log_text(run, rank))
        for rank in range(2)
    ]
    assert seen[0] == seen[1], "both workers saw the same losses: those of the whole batch"
    losses = [float(loss) for loss, _ in seen[0]]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert float(seen[0][-1][1]) > 0.85


@pytest.mark.promise("strategies-tensorflow-table-names-work")
def test_failure_report_suggests_alternatives_if_distributed_model_fit_fails_under_keras_3(
    lab: Lab, at_hand: None
) -> None:
    require_engine("keras", find_spec("keras"))
    estimator = pl.TensorFlow(
        EXAMPLE, entry_script="train.py", node_count=2, distributed_backend="tensorflow", environment_variables=QUIET
    )
    run = lab.experiment.submit(estimator, script_params={"--epochs": 1})
    assert wait_for_end(run) == "Failed"
    assert run.failure is not None
    assert "Attempt to convert a value (PerReplica:" in (run.failure.exception or "")
    for way in ("'TF_USE_LEGACY_KERAS': '1'", "strategy.run", "horovod.keras"):
        assert way in run.failure.message


@pytest.mark.promise("strategies-tensorflow-table-names-work")
def test_custom_training_loop_works_under_keras_3(lab: Lab, at_hand: None) -> None:
    require_engine("keras", find_spec("keras"))
    run = lab.complete(
        KERAS_3_LOOP,
        estimator=pl.TensorFlow,
        node_count=2,
        distributed_backend="tensorflow",
        environment_variables=QUIET,
    )
    ends = [
        re.search(r"keras 3\.\S+ 2 replicas, (\S+) to (\S+)\nweights (.*)", log_text(run, rank)) for rank in range(2)
    ]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].groups() == ends[1].groups()
    assert float(ends[0][2]) < float(ends[0][1]) / 2


@pytest.mark.promise("strategies-tensorflow-table-names-work")
def test_parameter_server_holds_the_trained_variables(lab: Lab, at_hand: None) -> None:
    run = lab.complete(
        PARAMETER_SERVER,
        estimator=pl.TensorFlow,
        worker_count=2,
        parameter_server_count=1,
        distributed_backend="ps",
        environment_variables=QUIET,
    )
    found = re.search(r"on (\S+) weights (\S+) (\S+)", log_text(run))
    assert found is not None, log_text(run)
    assert found[1].startswith("/job:ps/replica:0/task:0")
    assert float(found[2]) == pytest.approx(2, abs=0.05)
    assert float(found[3]) == pytest.approx(-1, abs=0.05)
