"""Parameters and optimizers begin everywhere as on the root."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def model_of(hvd):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(hvd.rank() + 1))
    model[1].num_batches_tracked.fill_(hvd.rank())
    return model


def check_broadcast_parameters_accepts_dict_list_and_generator(hvd):
    root = hvd.size() - 1
    for how in (
        lambda m: m.state_dict(),
        lambda m: m.named_parameters(),
        lambda m: list(m.named_parameters()),
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
    ):
        model = model_of(hvd)
        hvd.broadcast_parameters(how(model), root_rank=root)
        assert all((p == root + 1).all() for p in model.parameters())
    hvd.broadcast_parameters(model.state_dict(), root)
    assert model[1].num_batches_tracked.item() == root
    hvd.broadcast_parameters({"nothing": None, "some": torch.ones(1)}, root)
    for wrong in (torch.ones(2), [1], 3):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(wrong, 0)
    with pytest.raises(ValueError, match="'step' is of type int"):
        hvd.broadcast_parameters({"step": 3}, 0)


def check_broadcast_optimizer_state_copies_state_and_options_of_the_root(hvd):
    root = hvd.size() - 1
    makers = (
        lambda p: torch.optim.SGD(p, lr=0.1 + hvd.rank(), momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1 + hvd.rank(), amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1 + hvd.rank()),
        lambda p: torch.optim.RMSprop(p, lr=0.1 + hvd.rank(), momentum=0.5),
    )
    for make in makers:
        model = model_of(hvd)
        plain = make(model.parameters())
        groups = plain.param_groups
        if hvd.rank() == root:
            model(torch.randn(5, 3)).sum().backward()
            plain.step()
        opt = hvd.DistributedOptimizer(plain, model.named_parameters())
        before = [p.detach().clone() for p in model.parameters()]
        hvd.broadcast_optimizer_state(opt, root_rank=root)
        assert plain.param_groups is groups
        assert groups[0]["lr"] == 0.1 + root
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), "a step was taken"
        states = hvd.allgather_object(dict(opt.state_dict()["state"]))
        for state in states:
            assert state.keys() == states[root].keys()
            for key, values in states[root].items():
                for name, value in values.items():
                    assert (
                        torch.equal(torch.as_tensor(state[key][name]), torch.as_tensor(value))
                        if value is not None
                        else state[key][name] is None
                    )
        hvd.broadcast_parameters(model.state_dict(), root)
        opt.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        opt.step()
        weights = hvd.allgather_object([p.tolist() for p in model.parameters()])
        assert all(weight == weights[0] for weight in weights)


def check_broadcast_step_is_on_the_device_if_the_optimizer_reads_it_there(hvd):
    # The device "meta" stands for a GPU. The root's state is on the CPU, because tensors on "meta" can't be sent.
    parameters = [torch.zeros(2, device="meta" if hvd.rank() else "cpu", requires_grad=True) for _ in range(3)]
    flags = ({}, {"capturable": True}, {"fused": True})
    opt = torch.optim.NAdam([{"params": [p], **flag} for p, flag in zip(parameters, flags, strict=True)])
    if hvd.rank() == 0:
        for p in parameters:
            opt.state[p] = {"step": torch.tensor(3.0), "mu_product": torch.tensor(0.5), "exp_avg": torch.zeros(2)}
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    places = [{key: str(value.device) for key, value in opt.state[p].items()} for p in parameters]
    here = str(parameters[0].device)
    moved = {"step": here, "mu_product": here, "exp_avg": here}
    assert places == [moved | {"step": "cpu"}, moved, moved]


def check_broadcast_optimizer_state_creates_zero_gradients(hvd):
    """As in Horovod, whose scripts read `p.grad` before the first step."""
    model = torch.nn.ModuleDict({"dense": torch.nn.Linear(2, 2), "table": torch.nn.Embedding(3, 2, sparse=True)})
    model["dense"].bias.requires_grad_(False)
    hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0, model=model)
    assert model["dense"].weight.grad.tolist() == [[0.0, 0.0]] * 2
    assert model["dense"].bias.grad is None
    assert model["table"].weight.grad.is_sparse
    assert model["table"].weight.grad.to_dense().count_nonzero() == 0
    # An existing gradient is kept, even if the optimizer already has a state.
    plain = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(torch.ones(1, 2)).sum().backward()
    opt.step()
    hvd.broadcast_optimizer_state(opt, 0)
    assert plain.weight.grad.tolist() == [[1.0, 1.0]]
    opt.zero_grad()
    hvd.broadcast_optimizer_state(opt, 0)
    assert plain.weight.grad is None


def check_broadcasting_an_empty_optimizer_state_clears_that_of_other_ranks(hvd):
    model = model_of(hvd)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() > 0:
        model(torch.randn(5, 3)).sum().backward()
        opt.step()
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    assert not opt.state


def check_optimizer_state_that_cannot_be_broadcast_is_refused(hvd):
    model = model_of(hvd)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    if hvd.size() > 1:
        params = list(model.parameters())
        opt = torch.optim.SGD(params[:2] if hvd.rank() else params, lr=0.1)
        with pytest.raises(ValueError, match="other groups"):
            hvd.broadcast_optimizer_state(opt, 0)


def check_unpicklable_object_is_refused_on_every_rank(hvd):
    # Regression: the rank with the unpicklable object raised an error, but the other ranks waited forever.
    import threading

    root = hvd.size() - 1
    with pytest.raises(ValueError, match=rf"rank {root}: TypeError: cannot pickle"):
        hvd.broadcast_object(threading.Lock() if hvd.rank() == root else None, root)
    with pytest.raises(ValueError, match=r"rank 0: TypeError: cannot pickle") as refused:
        hvd.allgather_object(hvd.rank() or threading.Lock())
    assert isinstance(refused.value.__cause__, TypeError) == (hvd.rank() == 0)
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


class _UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


class _Unpicklable:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self):
        raise self._error


def check_pickling_error_with_an_unprintable_text_is_reported(hvd):
    # Regression: an error text with a lone surrogate, as in the name of a file that is not UTF-8, can't be encoded. So
    # this rank sent no error, and the other ranks waited forever.
    for error, text in (
        (OSError("no file 'w\udcff'"), r"rank 0: OSError: no file 'w\\udcff'"),
        (_UnspeakableError(), "rank 0: _UnspeakableError"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.broadcast_object(None if hvd.rank() else _Unpicklable(error), 0)
        with pytest.raises(ValueError, match=text):
            hvd.allgather_object(hvd.rank() or _Unpicklable(error))
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
