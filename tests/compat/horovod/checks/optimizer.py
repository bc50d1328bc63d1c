"""DistributedOptimizer's own rules."""

from __future__ import annotations

import copy
import os

import pytest
import torch


def linear(value=1.0):
    """A model of one weight, whose gradient is its input."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def wrapped(hvd, model, **how):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **how)


def backward(model, value):
    model(torch.tensor([[float(value)]])).sum().backward()


def mean_rank(hvd):
    return (hvd.size() + 1) / 2


def check_distributed_optimizer_is_a_subclass_with_the_name_of_the_wrapped_class(hvd):
    model = linear()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    opt = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    assert type(opt).__name__ == "SGD"
    assert "horovod" in str(type(opt)), "Lightning asks it whether an optimizer is wrapped"
    assert isinstance(opt, torch.optim.SGD)
    assert opt.param_groups is sgd.param_groups
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.1)
    backward(model, 1)
    opt.step()
    scheduler.step()
    assert abs(sgd.param_groups[0]["lr"] - 0.05) < 1e-9
    assert opt.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0]]


def check_scheduler_created_for_the_wrapped_optimizer_does_not_bypass_reduction(hvd):
    model = linear()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(sgd, 1)
    opt = hvd.DistributedOptimizer(sgd)
    backward(model, hvd.rank() + 1)
    opt.step()
    assert model.weight.item() == 1 - mean_rank(hvd)


def check_gradients_of_several_backward_passes_are_summed(hvd):
    for passes in (2, 4):
        model = linear()
        opt = wrapped(hvd, model, backward_passes_per_step=passes)
        for _ in range(2):
            opt.zero_grad()
            for _ in range(passes):
                backward(model, hvd.rank() + 1)
            opt.synchronize()
            assert model.weight.grad.item() == passes * mean_rank(hvd)


def check_backward_pass_beyond_backward_passes_per_step_raises(hvd):
    if hvd.size() == 1:
        return
    model = linear()
    opt = wrapped(hvd, model)
    backward(model, 1)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        backward(model, 1)
    opt.synchronize()
    opt.set_backward_passes_per_step(2)
    opt.zero_grad()
    backward(model, 1)
    backward(model, 1)
    # A step before the last backward pass reduces the gradients that exist so far.
    with opt.skip_synchronize():
        pass
    opt.step()
    opt.zero_grad()
    backward(model, hvd.rank() + 1)
    opt.synchronize()
    assert model.weight.grad.item() == mean_rank(hvd)


def check_zero_grad_between_backward_and_step_raises(hvd):
    model = linear()
    opt = wrapped(hvd, model)
    backward(model, 1)
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="zero_grad"):
            opt.zero_grad()
    opt.step()
    opt.zero_grad(set_to_none=False)
    assert model.weight.grad.item() == 0
    opt.zero_grad(set_to_none=True)
    assert model.weight.grad is None


def check_gradients_can_be_clipped_between_synchronize_and_step(hvd):
    model = linear()
    opt = wrapped(hvd, model)
    backward(model, 10 * (hvd.rank() + 1))
    opt.synchronize()
    assert model.weight.grad.item() == 10 * mean_rank(hvd)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    with opt.skip_synchronize():
        opt.step()
    assert model.weight.item() == 0.5


def check_step_after_synchronize_without_skip_synchronize_warns(hvd):
    if hvd.size() == 1:
        return
    model = linear()
    opt = wrapped(hvd, model, op=hvd.Sum)
    backward(model, 1)
    opt.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        opt.step()
    assert model.weight.item() == 1 - hvd.size() ** 2


def check_step_with_a_closure_returns_the_loss(hvd):
    model = linear()
    opt = wrapped(hvd, model)
    loss = model(torch.tensor([[hvd.rank() + 1.0]])).sum()
    loss.backward()
    assert opt.step(lambda: loss) is loss
    assert model.weight.item() == 1 - mean_rank(hvd)


def check_gradients_computed_in_a_closure_are_reduced(hvd):
    model = linear()
    opt = wrapped(hvd, model)

    def closure():
        opt.zero_grad()
        loss = model(torch.tensor([[hvd.rank() + 1.0]])).sum()
        loss.backward()
        return loss

    for step in range(3):
        opt.step(closure)
        assert model.weight.item() == 1 - (step + 1) * mean_rank(hvd)


def check_lbfgs_line_search_keeps_the_ranks_equal(hvd):
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    x = torch.randn(5 * hvd.size(), 2, generator=torch.Generator().manual_seed(1))
    y = x[:, :1] * 3 - x[:, 1:] + x[:, :1].square()
    alone = copy.deepcopy(model)
    lbfgs = lambda m: torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")  # noqa: E731

    def trained(model, opt, rows):
        def closure():
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            return loss

        return [opt.step(closure).item() for _ in range(3)]

    expected = trained(alone, lbfgs(alone), slice(None))
    opt = hvd.DistributedOptimizer(lbfgs(model), model.named_parameters())
    losses = trained(model, opt, slice(hvd.rank(), None, hvd.size()))
    # Compare only the first loss and the minimum: the way between them depends on roundings.
    assert losses[::2] == pytest.approx(expected[::2], rel=1e-3)
    weights = hvd.allgather_object(model.weight.tolist())
    assert weights == [weights[0]] * hvd.size()


def check_sparse_adam_contributes_sparse_zeros_for_an_unused_embedding(hvd):
    model = torch.nn.Embedding(4, 1, sparse=True)
    torch.nn.init.zeros_(model.weight)
    opt = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(model.parameters()), lr=1.0), model.named_parameters())
    if hvd.rank() == 0:
        model(torch.tensor([1])).sum().backward()
    opt.step()
    assert model.weight.flatten().tolist() == pytest.approx([0, -1, 0, 0], abs=1e-3)


def check_parameter_without_a_gradient_contributes_zeros(hvd):
    model = torch.nn.ModuleList([linear(), linear()])
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    backward(model[0], 1)
    if hvd.rank() == 0:
        backward(model[1], hvd.size())
    opt.step()
    assert model[1].weight.item() == 0
    assert model[0].weight.item() == 0


def check_incomplete_or_duplicate_parameter_names_are_refused(hvd):
    model = torch.nn.Sequential(linear(), linear())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    named = list(model.named_parameters())
    for wrong, reason in (
        (named[:1], "were not named"),
        ([(named[0][0], p) for _, p in named], "must be unique"),
        ([p for _, p in named], "sequence of tuples"),
    ):
        with pytest.raises(ValueError, match=reason):
            hvd.DistributedOptimizer(sgd, named_parameters=wrong)
    opt = hvd.DistributedOptimizer(sgd)
    assert list(opt._parameter_names.values()) == ["allreduce.noname.0.0", "allreduce.noname.0.1"]


def check_gradient_groups_and_predivide_factor_keep_the_average(hvd):
    for how in (
        {"groups": 2},
        {"groups": 7},
        {"lists": True},
        {"groups": 1, "gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 4.0},
    ):
        model = torch.nn.Sequential(linear(), linear(), linear())
        params = list(model.parameters())
        given = {"groups": [params[:2]]} if how.pop("lists", False) else how
        opt = wrapped(hvd, model, **given)
        for _ in range(2):
            opt.zero_grad()
            model(torch.tensor([[hvd.rank() + 1.0]])).sum().backward()
            opt.synchronize()
            assert all(abs(p.grad.item() - mean_rank(hvd)) < 1e-6 for p in params)
    with pytest.raises(ValueError, match="not supported with op != Average"):
        wrapped(hvd, linear(), gradient_predivide_factor=2.0, op=hvd.Sum)
    # The groups may contain parameters that another optimizer trains.
    wrapped(hvd, model, groups=[[torch.nn.Parameter(torch.ones(1)), params[0]], [torch.nn.Parameter(torch.ones(1))]])
    for groups in (-1, "many", [["weight"]], [[params[0]], [params[0]]]):
        with pytest.raises(ValueError, match="groups"):
            wrapped(hvd, model, groups=groups)
    with pytest.warns(DeprecationWarning, match="groups"):
        wrapped(hvd, linear(), num_groups=1)


def check_sparse_gradients_are_averaged(hvd):
    # In Horovod itself, sparse gradients with fp16 compression crash. Paceline averages them.
    dense = {"sparse_as_dense": True}
    for how in ({}, dense, {"compression": hvd.Compression.fp16}, {"groups": 1}, dense | {"groups": 1}):
        model = torch.nn.Embedding(8, 2, sparse=True)
        torch.nn.init.zeros_(model.weight)
        opt = wrapped(hvd, model, **how)
        for _ in range(2):
            opt.zero_grad()
            model(torch.tensor([hvd.rank(), 7])).sum().backward()
            opt.step()
        expected = torch.zeros(8, 2)
        expected[: hvd.size()] = -2 / hvd.size()
        expected[7] = -2
        assert torch.allclose(model.weight, expected, atol=1e-3), how
        if hvd.size() > 1:
            # A rank whose batch has no gradient takes part with an empty gradient.
            opt.zero_grad()
            if hvd.rank():
                model(torch.tensor([6])).sum().backward()
            opt.step()
            assert torch.allclose(model.weight[6], torch.full((2,), -(hvd.size() - 1) / hvd.size()), atol=1e-3)


def check_sparse_as_dense_gradients_are_sparse_again_in_the_step(hvd):
    # Regression: with several ranks, gradients stayed dense after the reduction, and SparseAdam refused them. With one
    # rank the script worked.
    for groups in (None, 1):
        model = torch.nn.Embedding(8, 2, sparse=True)
        torch.nn.init.zeros_(model.weight)
        sparse_adam = torch.optim.SparseAdam(list(model.parameters()), lr=1.0)
        opt = hvd.DistributedOptimizer(sparse_adam, sparse_as_dense=True, groups=groups)
        for _ in range(2):
            opt.zero_grad()
            model(torch.tensor([hvd.rank()])).sum().backward()
            opt.step()
        assert model.weight.grad.sparse_dim() == 1
        assert model.weight[: hvd.size()].max() < -1
        assert not model.weight[hvd.size() :].any()


def check_fp16_compression_keeps_parameters_in_float32(hvd):
    model = linear()
    opt = wrapped(hvd, model, compression=hvd.Compression.fp16)
    backward(model, 0.1)
    opt.step()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
    assert abs(model.weight.item() - 0.9) < 1e-4


def check_adasum_optimizer_combines_the_steps_of_the_ranks(hvd):
    if hvd.size() == 3:
        return
    model = linear()
    opt = wrapped(hvd, model, op=hvd.Adasum, backward_passes_per_step=2)
    for step in range(2):
        opt.zero_grad()
        backward(model, 0.5)
        backward(model, 0.5)
        opt.step()
        # Equal gradients are parallel, so Adasum returns just one of them.
        assert abs(model.weight.item() - (0.0 - step)) < 1e-6
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="Adasum"), opt.skip_synchronize():
            pass
        with pytest.raises(NotImplementedError, match="all ranks"):
            wrapped(hvd, model, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))


def check_noncontiguous_gradients_are_reduced_and_frozen_parameters_skipped(hvd):
    conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    conv.bias.requires_grad_(False)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(conv.parameters(), lr=1.0), conv.named_parameters())
    hvd.broadcast_parameters(conv.state_dict(), 0)
    x = torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last) * (hvd.rank() + 1)
    conv(x).sum().backward()
    opt.synchronize()
    assert torch.allclose(conv.weight.grad, torch.full_like(conv.weight, 9 * mean_rank(hvd)))
    assert conv.bias.grad is None


def _trained_over_time(hvd, distributed, change, **how):
    """The weights of two layers after six steps, of which one process sees whole batches; `change` comes after three."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    inputs = torch.randn(6, 2 * hvd.size(), 3)
    change("begin", model, None)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01)
    if distributed:
        opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(), **how)
    for step, batch in enumerate(inputs):
        if step == 3:
            opt = change("later", model, opt) or opt
        mine = batch[2 * hvd.rank() : 2 * hvd.rank() + 2] if distributed else batch
        model.zero_grad()
        model(mine).square().mean().backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


def check_layers_can_be_frozen_unfrozen_and_added_during_training(hvd):
    # Regression: parameters that were unfrozen or added during training were never reduced, and momentum still moved
    # frozen parameters.
    def freeze(when, model, opt):
        if when == "later":
            model[0].requires_grad_(False)

    def unfreeze(when, model, opt):
        if when == "begin":
            model[0].requires_grad_(False)
        elif len(opt.param_groups[0]["params"]) == 2:
            opt.add_param_group({"params": list(model[0].requires_grad_(True).parameters()), "lr": 0.05})

    def unfreeze_known(when, model, opt):
        model[0].requires_grad_(when == "later")

    for change in (freeze, unfreeze, unfreeze_known):
        for groups in (None, 1):
            alone = _trained_over_time(hvd, False, change)
            together = _trained_over_time(hvd, True, change, groups=groups)
            for one, other in zip(alone, together, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def check_layers_can_be_frozen_and_unfrozen_repeatedly(hvd):
    # Regression: a layer that was frozen in one step caused a KeyError in the next step.
    def trained(distributed, passes):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if distributed:
            named = model.named_parameters()
            opt = hvd.DistributedOptimizer(opt, named_parameters=named, backward_passes_per_step=passes)
        for step, batches in enumerate(torch.randn(9, passes, hvd.size(), 2, 3, dtype=torch.float64)):
            model[0].requires_grad_(step % 3 != 1)
            model[2].requires_grad_(step % 3 != 2)
            opt.zero_grad()
            for batch in batches:
                mine = batch[hvd.rank()] if distributed else batch
                model(mine).square().mean().backward()
            opt.step()
        return [p.detach() for p in model.parameters()]

    for passes in (1, 2):
        for one, other in zip(trained(False, passes), trained(True, passes), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def check_second_optimizer_of_the_same_parameters_replaces_the_first(hvd):
    # Regression: if two optimizers had the same parameters, the hooks of both submitted operations with the same names.
    model = linear()
    first = wrapped(hvd, model)
    backward(model, 1)
    first.step()
    assert model.weight.item() == 0
    second = wrapped(hvd, model)
    for _ in range(2):
        second.zero_grad()
        backward(model, hvd.rank() + 1)
        second.step()
    assert model.weight.item() == -2 * mean_rank(hvd)
    del first, second
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        plain.zero_grad()
        backward(model, hvd.rank() + 1)
        assert model.weight.grad.item() == hvd.rank() + 1
        plain.step()


def check_optimizer_wrapped_twice_uses_the_newer_settings(hvd):
    # Regression: wrapping an optimizer twice raised "Cannot create a consistent method resolution order".
    model = linear()
    opt = wrapped(hvd, model)
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), op=hvd.Sum)
    assert type(opt).__mro__.count(torch.optim.SGD) == 1
    backward(model, hvd.rank() + 1)
    opt.step()
    assert model.weight.item() == 1 - mean_rank(hvd) * hvd.size()


def check_invalid_optimizer_or_compression_argument_is_refused(hvd):
    model = linear()
    for given in (model, model.parameters(), torch.optim.SGD):
        with pytest.raises(ValueError, match=r"optimizer=.* is not an optimizer of torch. Give an instance"):
            hvd.DistributedOptimizer(given)
    for how, said in (
        ({"compression": "fp16"}, r"compression='fp16': give hvd.Compression.none"),
        ({"op": "average"}, r"op='average' is not an operation of Horovod's"),
        ({"backward_passes_per_step": 1.5}, r"backward_passes_per_step=1.5 must be > 0, a whole number"),
    ):
        with pytest.raises(ValueError, match=said):
            wrapped(hvd, model, **how)


def check_optimizer_reduces_gradients_within_its_process_set(hvd):
    # Regression: a rank outside the process set got an error. In Horovod, such a rank trains alone.
    if hvd.size() < 3:
        return
    made = hvd.add_process_set([0, 1])
    for groups in (None, 1):
        model = linear()
        opt = wrapped(hvd, model, process_set=made, groups=groups)
        backward(model, hvd.rank() + 1)
        opt.step()
        assert model.weight.item() == (-0.5 if made.included() else -hvd.rank())
    hvd.remove_process_set(made)
    with pytest.raises(ValueError, match="not registered"):
        wrapped(hvd, model, process_set=made)


def check_optimizer_of_a_single_elastic_rank_has_gradient_hooks(hvd):
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        assert wrapped(hvd, linear())._hooked
    finally:
        del os.environ["HOROVOD_ELASTIC"]
    assert wrapped(hvd, linear())._hooked == (hvd.size() > 1)
