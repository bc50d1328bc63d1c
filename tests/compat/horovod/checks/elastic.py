"""Elastic state, sampler and loop."""

from __future__ import annotations

import pytest
import torch

from tests.compat.horovod.checks.optimizer import linear


def check_failed_collective_restores_the_last_commit(hvd):
    model = linear(hvd.rank() + 1.0)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=opt, batch=0)
    seen, resets = [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.is_initialized())])

    @hvd.elastic.run
    def train(state, factor):
        while state.batch < 4:
            seen.append((state.batch, state.model.weight.item()))
            state.optimizer.zero_grad()
            state.model(torch.tensor([[factor]])).sum().backward()
            if state.batch == 2 and not resets:
                if hvd.size() == 1:
                    raise hvd.HorovodInternalError("made up")
                hvd.allreduce(torch.ones(1 + (hvd.rank() > 0)), name="mismatch")
            state.optimizer.step()
            state.batch += 1
            if state.batch == 1:
                state.commit()
        return "done"

    assert train(state, 1.0) == "done"
    # All ranks start with the weight of rank 0. After the failure, the training continues from the last commit, so
    # batch 1 is repeated.
    assert [batch for batch, _ in seen] == [0, 1, 2, 1, 2, 3]
    assert seen[0][1] == 1.0
    assert seen[3] == seen[1]
    assert seen[4] == seen[2]
    assert resets == [True]


def check_new_process_resumes_from_the_last_commit(hvd):
    import itertools
    import os
    import shutil
    import tempfile

    from paceline.compat.horovod.common import kept_commits

    folder = hvd.broadcast_object(tempfile.mkdtemp(), name="folder")
    os.environ[kept_commits.VARIABLE] = os.path.join(folder, "commit")

    def training(weight):
        """What a new process would begin with; it fails after the second commit."""
        kept_commits._numbers = itertools.count()
        model = linear(weight + hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=weight, momentum=0.9)
        sampler = hvd.elastic.ElasticSampler(range(24), shuffle=False)
        state = hvd.elastic.TorchState(
            model=model, optimizer=optimizer, sampler=sampler, batch=0, lock=None, sparse=torch.ones(2)
        )
        resets = []
        state.register_reset_callbacks([lambda: resets.append(state.batch)])

        @hvd.elastic.run
        def train(state):
            begin = state.batch, model.weight.item(), optimizer.param_groups[0]["lr"], list(sampler)
            while state.batch < 2:
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                sampler.record_batch(0, 1)
                state.batch += 1
                # A module can't be pickled, and a file of a commit can't hold a sparse tensor.
                state.lock, state.sparse = hvd, torch.eye(2).to_sparse()
                state.commit()
            state.batch, model.weight.data = 9, torch.zeros(1, 1)
            return begin

        return train(state), resets, optimizer.state_dict()["state"][0]["momentum_buffer"].item()

    try:
        begin, resets, momentum = training(1.0)
        assert (begin[:2], resets) == ((0, 1.0), [])
        again, resets, same = training(5.0)
        assert again[0] == 2
        assert again[1:3] == (pytest.approx(1.0 - 1.0 - 1.9), 1.0), "rank 0's, with its learning rate"
        assert again[3] == list(range(24))[2 * hvd.size() + hvd.rank() :: hvd.size()]
        assert (resets, same) == ([2], momentum)
        hvd.barrier()
        assert len(os.listdir(folder)) == 1
    finally:
        del os.environ[kept_commits.VARIABLE]
        hvd.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def check_added_hosts_interrupt_training_without_restoring_the_commit(hvd):
    from horovod.common.elastic import notification_manager

    state = hvd.elastic.TorchState(batch=0)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])

    @hvd.elastic.run
    def train(state):
        while state.batch < 3:
            state.batch += 1
            if state.batch == 2 and not resets and hvd.rank() == 0:
                notification_manager.handle_hosts_updated()
            state.commit()

    train(state)
    assert resets == [2]
    assert notification_manager._listeners == []


def check_repeated_horovod_error_is_raised_after_ten_retries(hvd):
    state = hvd.elastic.TorchState(batch=0)
    tries = []

    @hvd.elastic.run
    def train(state):
        tries.append(1)
        raise hvd.HorovodInternalError("for ever")

    with pytest.raises(hvd.HorovodInternalError, match="for ever"):
        train(state)
    assert len(tries) == 11


def check_assigning_to_elastic_state_saves_the_value(hvd):
    values = [1]
    state = hvd.elastic.TorchState(model=linear(), values=values, other=None)
    state.model = linear(5.0)
    with torch.no_grad():
        state.model.weight.fill_(9.0)
    values.append(2)
    state.restore()
    assert state.model.weight.item() == 5.0
    assert state.values is values
    assert state.other is None


def check_second_restore_has_the_values_of_the_commit(hvd):
    model = linear(1.0)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()["state"][0]["exp_avg"].item(), model.weight.item()

    step()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        results.append(step())
        state.restore()
    assert results[0] == results[1]
    optimizer.zero_grad()
    assert step() == results[0]


def check_elastic_sampler_divides_remaining_samples_among_the_ranks(hvd):
    sampler = hvd.elastic.ElasticSampler(range(50), shuffle=True, seed=3)
    everyone = hvd.allgather_object(list(sampler))
    assert len({len(part) for part in everyone}) == 1
    assert set().union(*everyone) == set(range(50))
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 5)
    processed = {index for part in everyone for index in part[:5]}
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 5 * hvd.size()}
    state.commit()
    sampler.set_epoch(1)
    state.restore()
    left = hvd.allgather_object(list(sampler))
    assert set().union(*left) == set(range(50)) - processed
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert hvd.allgather_object(list(sampler)) != everyone
    small = hvd.elastic.ElasticSampler(range(1), shuffle=False)
    assert list(small) == [0]
    small.record_batch(0, 1)
    small.reset()
    assert list(small) == []


def check_custom_state_handler_of_the_user_is_used(hvd):
    from horovod.torch.elastic import state as module

    class Box:
        value = hvd.rank()

    class BoxHandler(module.StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.saves = 0

        def save(self):
            self.saves += 1
            self._saved = self.value.value

        def restore(self):
            self.value.value = self._saved

        def sync(self):
            self.value.value = hvd.broadcast_object(self.value.value)
            self.save()

    before = module.get_handler_registry()
    module.set_handler_registry([(Box, BoxHandler), *before])
    try:
        state = hvd.elastic.TorchState(box=Box())
        assert state._handlers["box"].saves == 1
        assert (state.model, state.optimizer) == (None, None)
        state.sync()
        assert state.box.value == 0
    finally:
        module.set_handler_registry(before)
