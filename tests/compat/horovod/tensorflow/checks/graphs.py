"""What is special about graphs: nothing is folded, merged, dropped or held up."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.tensorflow import launch


class Counted:
    """Counts the submitted operations during a `with` block."""

    def __enter__(self):
        self.names, self._real = [], handles.submit

        def submit(kind, name, *rest):
            self.names.append(f"{kind}.{name}")
            return self._real(kind, name, *rest)

        handles.submit = submit
        return self

    def __exit__(self, *_):
        handles.submit = self._real


def check_allreduce_of_a_constant_runs_in_every_call_of_a_graph(hvd):
    reduced = tf.function(lambda: hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum))
    with Counted() as counted:
        for _ in range(3):
            assert reduced().numpy().tolist() == [hvd.size(), 2.0 * hvd.size()]
    assert len(counted.names) == 3, counted.names


def check_equal_operations_in_a_graph_are_not_merged(hvd):
    inner = tf.function(lambda t: hvd.allreduce(t, op=hvd.Sum))

    @tf.function
    def four(t):
        return inner(t) + inner(t) + hvd.allreduce(t, op=hvd.Sum) + hvd.allreduce(t, op=hvd.Sum)

    with Counted() as counted:
        for _ in range(2):
            assert four(tf.ones(2)).numpy().tolist() == [4.0 * hvd.size()] * 2
    assert len(counted.names) == 8, counted.names


def check_nested_tf_function_called_twice_reduces_twice(hvd):
    factor = tf.Variable(2.0)
    # The inner function reads a variable. TensorFlow does not order two calls of a function that only reads.
    inner = tf.function(lambda t: hvd.allreduce(t * factor, op=hvd.Sum))
    inner(tf.ones(3))

    @tf.function
    def outer(t):
        first = hvd.allreduce(t * factor, op=hvd.Sum)
        parts = [inner(t * float(i)) for i in range(6)]
        last = hvd.allreduce(t * factor, op=hvd.Sum)
        return first, parts, last

    for _ in range(5):
        first, parts, last = outer(tf.ones(3))
        assert first.numpy().tolist() == last.numpy().tolist() == [2.0 * hvd.size()] * 3
        for i, part in enumerate(parts):
            assert part.numpy().tolist() == [2.0 * i * hvd.size()] * 3


def check_tf_function_can_have_its_first_collective_in_a_later_trace(hvd):
    # Regression: Paceline kept the order of collectives in a variable, but a tf.function can create variables only in
    # its first trace.
    before, launch._line = launch._line, None

    @tf.function
    def step(t, reduces):
        return hvd.allreduce(t, op=hvd.Sum) if reduces else t

    try:
        assert step(tf.constant(2.0), False).numpy() == 2.0
        assert step(tf.constant(2.0), True).numpy() == 2.0 * hvd.size()
    finally:
        launch._line = before


def check_allreduce_with_an_unused_result_still_runs(hvd):
    @tf.function
    def one_rank_looks(t):
        found = hvd.allreduce(t, op=hvd.Sum, name="looked at by one rank")
        return found if hvd.rank() == 0 else t

    result = one_rank_looks(tf.ones(2)).numpy()
    assert result.tolist() == [hvd.size() if hvd.rank() == 0 else 1.0] * 2


def check_collectives_work_in_graph_loops_and_branches(hvd):
    @tf.function
    def looped(t):
        total = tf.zeros_like(t)
        for i in tf.range(5):
            if i % 2 == 0:
                total += hvd.allreduce(t + tf.cast(i, t.dtype), op=hvd.Sum)
        return total

    for _ in range(3):
        assert looped(tf.ones(2)).numpy().tolist() == [9.0 * hvd.size()] * 2
    large = looped(tf.ones(100_000)).numpy()
    assert (large == 9.0 * hvd.size()).all()


def check_named_operations_may_be_submitted_in_any_order(hvd):
    launch = list(range(12))
    random.Random(hvd.rank()).shuffle(launch)

    @tf.function
    def shuffled():
        found = {i: hvd.allreduce(tf.fill([i + 1], float(i)), name=f"any.{i}", op=hvd.Sum) for i in launch}
        return [found[i] for i in range(12)]

    for _ in range(3):
        for i, result in enumerate(shuffled()):
            assert result.numpy().tolist() == [float(i * hvd.size())] * (i + 1)


def check_gradients_of_many_sizes_may_be_reduced_in_any_order(hvd):
    launch = list(range(10))
    random.Random(hvd.rank()).shuffle(launch)
    # Large gradients are submitted one by one, and small gradients are submitted together.
    variables = [tf.Variable(tf.ones([10 ** (i % 6)]), name=f"v{i}") for i in range(10)]

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variables[i] * variables[i]) * factor * float(i) for i in range(10)])
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, [variables[i] for i in launch])

    mean = (hvd.size() + 1) / 2
    for _ in range(3):
        for i, grad in zip(launch, step(tf.constant(hvd.rank() + 1.0)), strict=True):
            np.testing.assert_allclose(grad, np.full(grad.shape, 2.0 * i * mean))


def check_large_gradients_are_submitted_before_the_backward_pass_ends(hvd):
    large = [tf.Variable(tf.ones([70_000]), name=f"large{i}") for i in range(3)]
    events = []

    @tf.custom_gradient
    def noted(tensor):
        def gradient(grad):
            return tf.numpy_function(lambda g: (events.append("first layer"), g)[1], [grad], tf.float32)

        return tf.identity(tensor), gradient

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            x = noted(large[0])
            x.set_shape([70_000])
            loss = tf.reduce_sum(x * large[1] * large[2])
        return hvd.DistributedGradientTape(tape).gradient(loss, large)

    real = handles.submit
    handles.submit = lambda kind, name, *rest: (events.append(name), real(kind, name, *rest))[1]
    try:
        step()
    finally:
        handles.submit = real
    if hvd.size() > 1:
        assert len(events) == 4, events
        # TensorFlow may submit large1 and large2 in any order. But it must submit large0 after it has computed the
        # gradient of the first layer.
        assert any("large0" in name for name in events[events.index("first layer") :]), events


def check_xla_compiled_collective_is_refused_with_the_next_step(hvd):
    for call in (
        hvd.allreduce,
        lambda t: hvd.broadcast(t, 0),
        lambda t: t + tf.cast(hvd.size_op(), t.dtype),
    ):
        with pytest.raises(NotImplementedError, match=r"jit_compile=False"):
            tf.function(call, jit_compile=True)(tf.ones(2))
    assert hvd.allreduce(tf.ones(2)).numpy().tolist() == [1.0, 1.0]


def check_mismatched_tensors_raise_on_every_rank_and_later_operations_work(hvd):
    if hvd.size() == 1:
        return
    rank = hvd.rank()

    @tf.function
    def wrong():
        good = hvd.allreduce(tf.ones(2), name="good", op=hvd.Sum)
        return good, hvd.allreduce(tf.ones(2 + (rank > 0)), name="bad")

    for _ in range(3):
        for caught in (tf.errors.FailedPreconditionError, hvd.HorovodInternalError):
            with pytest.raises(caught, match="Mismatched ALLREDUCE tensor shapes"):
                wrong()
        assert hvd.allreduce(tf.ones(2), name="good", op=hvd.Sum).numpy().tolist() == [hvd.size()] * 2


def check_mismatched_gradient_raises_and_later_steps_work(hvd):
    if hvd.size() == 1:
        return
    rank = hvd.rank()
    variables = [tf.Variable(tf.ones(2 + (rank > 0 and i == 1)), name=f"fit{i}") for i in range(3)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    for _ in range(3):
        with pytest.raises(tf.errors.OpError, match="Mismatched"):
            step()


def check_collectives_accept_shapes_unknown_during_tracing(hvd):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def unknown(t):
        return hvd.allreduce(t, op=hvd.Sum), hvd.broadcast(t, 0)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def rows(t):
        gathered = hvd.allgather(t)
        assert gathered.shape.as_list() == [None, 2]
        return gathered, hvd.reducescatter(t, op=hvd.Sum), hvd.alltoall(t)

    for shape in ((), (3,), (2, 2)):
        summed, sent = unknown(tf.ones(shape))
        assert summed.shape == shape
        assert sent.shape == shape
    for result in rows(tf.ones([hvd.size(), 2])):
        assert result.shape[1] == 2


def check_operations_of_a_tensorflow_1_graph_do_not_deadlock(hvd):
    # Regression: each waiting operation blocked a thread of the session. When the ranks had blocked all threads with
    # different operations, none of them could finish.
    size, rank = hvd.size(), hvd.rank()
    with tf.Graph().as_default():
        ranks = tf.compat.v1.placeholder(tf.float32, [1])
        sums = [hvd.allreduce(ranks + i, op=hvd.Sum, name=f"beside.{i}") for i in range(8)]
        random.Random(rank).shuffle(sums)
        gathered = [hvd.allgather(ranks, name=f"beside.{i}") for i in range(8)]
        two_threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)
        with tf.compat.v1.Session(config=two_threads) as session:
            added, lists = session.run((sums, gathered), {ranks: [rank]})
    assert sorted(int(one[0]) for one in added) == [sum(range(size)) + i * size for i in range(8)]
    assert all(one.tolist() == list(range(size)) for one in lists)


def check_allreduce_and_its_gradient_work_in_a_tensorflow_1_graph(hvd):
    with tf.Graph().as_default():
        given = tf.compat.v1.placeholder(tf.float32, [2])
        summed = hvd.allreduce(given, op=hvd.Sum)
        gradient = tf.gradients(summed * float(hvd.rank() + 1), given)[0]
        # Regression: a rank whose gradient of a broadcast was 0 did not take part in its reduction, so the root waited
        # forever.
        from_root = tf.gradients(hvd.broadcast(given, 0) * float(hvd.rank() + 1), given)[0]
        variable = tf.compat.v1.get_variable("v", initializer=float(hvd.rank()), use_resource=True)
        sent = hvd.broadcast_global_variables(hvd.size() - 1)
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.5))
        train = optimizer.minimize(variable * float(hvd.rank() + 1))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            total = hvd.size() * (hvd.size() + 1) / 2
            assert session.run(summed, {given: [1.0, 2.0]}).tolist() == [hvd.size(), 2.0 * hvd.size()]
            assert session.run(gradient, {given: [1.0, 2.0]}).tolist() == [total, total]
            mean = 0.0 if hvd.rank() else total / hvd.size()
            assert session.run(from_root, {given: [1.0, 2.0]}).tolist() == [mean, mean]
            session.run(sent)
            assert session.run(variable) == hvd.size() - 1
            session.run(train)
            np.testing.assert_allclose(session.run(variable), hvd.size() - 1 - 0.1 * total / hvd.size(), rtol=1e-5)


def check_monitored_session_starts_with_the_variables_of_the_root(hvd):
    # Regression: BroadcastGlobalVariablesHook raised an error, although the sessions of tf.compat.v1 can use such hooks.
    root = hvd.size() - 1
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=float(hvd.rank()), use_resource=True)
        hooks = [hvd.BroadcastGlobalVariablesHook(root)]
        for _ in range(2):
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                assert session.run(variable) == root
