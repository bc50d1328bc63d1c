"""Elastic state: commits, and the way back to them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compat.horovod.keras.checks.training import fit


def linear(keras, value=0.0, built=True):
    model = keras.Sequential([*([keras.Input((1,))] if built else []), keras.layers.Dense(1, use_bias=False)])
    if built:
        model.set_weights([np.full((1, 1), value)])
    return model


def optimizer_values(optimizer):
    variables = optimizer.variables
    return [np.array(v.numpy()) for v in (variables() if callable(variables) else variables)]


def check_commit_file_holds_bfloat16_variables(hvd, keras):
    import tempfile

    from paceline.compat.horovod.common.kept_commits import KeptCommits

    def made(value):
        layer = keras.layers.Dense(1, use_bias=False, dtype="bfloat16")
        model = keras.Sequential([keras.Input((1,)), layer])
        layer.kernel.assign(np.full((1, 1), value))
        return hvd.elastic.KerasState(model, batch=int(value))

    with tempfile.TemporaryDirectory() as folder:
        commits, other = KeptCommits(f"{folder}/commit"), made(1.0)
        commits.save(made(3.0).kept())
        if hvd.local_rank() == 0:
            other.take_kept(commits.load())
            other.restore()
            assert np.array(other.model.weights[0].numpy()).astype("float32").item() == 3.0
            assert other.batch == 3


def check_new_process_restores_the_committed_keras_state(hvd, keras):
    """By way of what a commit keeps of it; the files are tried with torch."""
    from paceline.checkpoint.values import decode_state, encode_state

    def made(value):
        model = linear(keras, value)
        model.compile(optimizer=keras.optimizers.SGD(0.5, momentum=0.5), loss=lambda y, p: -p * y)
        return hvd.elastic.KerasState(model, batch=int(value), epoch=0)

    state = made(3.0)
    fit(keras, state.model, np.ones((2, 1), "float32"), np.ones((2, 1), "float32"), rows=1)
    state.save()
    told, arrays = encode_state(state.kept())
    other = made(1.0)
    other.take_kept(decode_state(told, lambda name, of: arrays[name]))
    other.restore()
    assert other.batch == 3
    for ours, theirs in zip(
        optimizer_values(other.model.optimizer), optimizer_values(state.model.optimizer), strict=True
    ):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(other.model.get_weights()[0], state.model.get_weights()[0])


def check_failed_training_restores_the_commit_and_the_state_of_rank_0(hvd, keras):
    model = linear(keras, 1.0 + hvd.rank())
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5)), loss=lambda y, p: -p * y)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    seen, resets = [], []
    state.register_reset_callbacks([lambda: resets.append(True)])

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append((state.batch, self.model.get_weights()[0].item()))
            if state.batch == 2 and not resets:
                raise hvd.HorovodInternalError("made up")

    @hvd.elastic.run
    def train(state):
        x = np.ones((4 - state.batch, 1), "float32")
        fit(
            keras,
            state.model,
            x,
            x,
            rows=1,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, batches_per_commit=1),
                Fail(),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
            ],
        )
        return "done"

    assert train(state) == "done"
    # Batch 2 fails before it begins. The commit was made just before batch 2, so the training continues with batch 2.
    assert [batch for batch, _ in seen] == [0, 1, 2, 2, 3]
    assert seen[0][1] == 1.0
    assert seen[2] == seen[3]
    assert (state.batch, state.epoch, len(resets)) == (0, 1, 1)


def check_failed_collective_within_fit_restores_the_commit(hvd, keras):
    """The ranks' shapes differ in one batch; within a graph, the error comes out as one of TensorFlow's."""
    model = linear(keras, 1.0)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss=lambda y, p: -p * y)
    state = hvd.elastic.KerasState(model, tries=0)

    class Disturb(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if state.tries == 0 and hvd.size() > 1:
                hvd.allreduce(np.ones(1 + (hvd.rank() > 0)), name="differs")

    tries = []

    @hvd.elastic.run
    def train(state):
        tries.append(1)
        if len(tries) > 1:
            state.tries = 1
        x = np.ones((2, 1), "float32")
        fit(keras, state.model, x, x, callbacks=[Disturb()])

    train(state)
    assert len(tries) == (2 if hvd.size() > 1 else 1)
    assert model.get_weights()[0].item() == 1.5


def check_restore_resets_weights_and_optimizer_state_to_the_commit(hvd, keras):
    model = linear(keras, 1.0)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.5)), loss="mse")
    x = np.ones((2, 1), "float32")
    state = hvd.elastic.KerasState(model, values=[1])
    fit(keras, model, x, x * 3)
    state.commit()
    weights, values = model.get_weights(), optimizer_values(model.optimizer)
    fit(keras, model, x, x * 9, epochs=2)
    state.values = [2]
    model.optimizer.learning_rate = 0.125
    assert not np.array_equal(model.get_weights()[0], weights[0])
    state.restore()
    assert np.array_equal(model.get_weights()[0], weights[0])
    for now, before in zip(optimizer_values(model.optimizer), values, strict=True):
        assert np.array_equal(now, before)
    assert state.values == [1]


def check_sync_copies_the_state_of_rank_0_to_every_rank(hvd, keras):
    model = linear(keras, float(hvd.rank()))
    model.compile(optimizer=keras.optimizers.SGD(0.5 + hvd.rank(), momentum=0.5), loss="mse")
    state = hvd.elastic.KerasState(model, model.optimizer, batch=hvd.rank() + 3)
    state.sync()
    assert (model.get_weights()[0].item(), state.batch) == (0.0, 3)
    state.model.set_weights([np.full((1, 1), 7.0)])
    state.restore()
    assert model.get_weights()[0].item() == 0.0


def check_keras_state_of_a_model_without_weights_is_refused(hvd, keras):
    model = linear(keras, built=False)
    with pytest.raises(ValueError, match="has no weights yet"):
        hvd.elastic.KerasState(model)


def check_elastic_callbacks_continue_the_epoch_and_batch_count(hvd, keras):
    class State:
        epoch, batch, commits = 2, 3, 0

        def commit(self):
            self.commits += 1
            seen.append((self.epoch, self.batch))

    for first in (0, 2):
        seen, state = [], State()
        model = linear(keras)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        x = np.ones((4, 1), "float32")
        fit(
            keras,
            model,
            x,
            x,
            rows=1,
            initial_epoch=first,
            epochs=first + 2,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
            ],
        )
        assert seen == [(2, 5), (3, 0), (3, 2), (4, 0)]
        assert (state.epoch, state.batch) == (4, 0)
    with pytest.raises(ValueError, match="batches_per_commit=0"):
        hvd.elastic.CommitStateCallback(State(), batches_per_commit=0)
