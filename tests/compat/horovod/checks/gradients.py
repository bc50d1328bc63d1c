"""Gradients of the collectives."""

from __future__ import annotations

import torch


def weighted(result, hvd):
    """The gradient of a loss that weighs everything on this rank by rank + 1."""
    (result * (hvd.rank() + 1)).sum().backward()


def mean_weight(hvd):
    return (hvd.size() + 1) / 2


def check_gradient_of_allreduce_is_reduced_with_the_same_operation(hvd):
    for op, factor in ((hvd.Average, mean_weight(hvd)), (hvd.Sum, mean_weight(hvd) * hvd.size())):
        x = torch.ones(3, requires_grad=True)
        weighted(hvd.allreduce(x, op=op, prescale_factor=2.0, postscale_factor=0.25), hvd)
        assert torch.allclose(x.grad, torch.full((3,), factor * 0.5))
        a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
        one, two = hvd.grouped_allreduce([a, b], op=op)
        weighted(torch.cat([one, two]), hvd)
        assert torch.allclose(torch.cat([a.grad, b.grad]), torch.full((5,), factor))


def check_gradient_of_allgather_is_the_average_for_the_local_rows(hvd):
    x = torch.ones(hvd.rank() + 1, 2, requires_grad=True)
    weighted(hvd.allgather(x), hvd)
    assert torch.allclose(x.grad, torch.full_like(x, mean_weight(hvd)))
    y = torch.ones(hvd.rank() + 1, requires_grad=True)
    weighted(hvd.grouped_allgather([y])[0], hvd)
    assert torch.allclose(y.grad, torch.full_like(y, mean_weight(hvd)))


def check_gradient_of_broadcast_is_the_average_on_the_root_and_zero_elsewhere(hvd):
    x = torch.ones(2, requires_grad=True)
    weighted(hvd.broadcast(x, hvd.size() - 1), hvd)
    assert torch.allclose(x.grad, torch.full((2,), mean_weight(hvd) if hvd.rank() == hvd.size() - 1 else 0.0))


def check_gradient_of_alltoall_is_sent_back_to_its_rank(hvd):
    size, rank = hvd.size(), hvd.rank()
    x = torch.ones(size + 2, requires_grad=True)
    received, _ = hvd.alltoall(x, splits=[1] * size)
    weighted(received, hvd)
    assert x.grad.tolist() == [float(r + 1) for r in range(size)] + [0.0, 0.0]
    assert rank < size


def check_gradient_of_reducescatter_is_gathered(hvd):
    size = hvd.size()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        x = torch.ones(size, requires_grad=True)
        result = hvd.reducescatter(x, op=op)
        grad = torch.full_like(result, hvd.rank() + 1.0)
        result.backward(grad)
        assert x.grad.tolist() == [float((r + 1) * factor) for r in range(size)]
        assert grad.tolist() == [hvd.rank() + 1.0]
