"""Whole training: the ranks together compute what one process computes on the whole batch.

Tolerances: float32 sums in another order differ by about 1e-7 of their size for each of the additions' levels; 1e-5 of the
largest gradient leaves room for a few steps of it. float16 has 11 bits: 1e-3.
"""

from __future__ import annotations

import copy
import importlib.util

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy


def digits():
    """scikit-learn's digits, read from its file: to load it takes each rank longer than to train."""
    (package,) = importlib.util.find_spec("sklearn").submodule_search_locations
    rows = torch.from_numpy(np.loadtxt(f"{package}/datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32))
    return rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()


class DigitsNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


class TiedTransformer(nn.Module):
    """Its output layer is its embedding's own matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.layer(self.embedding(tokens))).transpose(1, 2)


def compare(
    hvd,
    model,
    x,
    y,
    *,
    passes=1,
    tolerance=1e-5,
    make=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    **how,
):
    """Three steps: each rank on its rows, in `passes` parts, against one process on all of them."""
    alone = copy.deepcopy(model)
    plain, opt = make(alone.parameters()), make(model.parameters())
    opt = hvd.DistributedOptimizer(opt, model.named_parameters(), backward_passes_per_step=passes, **how)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    rows = 12 * passes
    for step in range(3):
        start = step * rows * hvd.size()
        plain.zero_grad()
        whole = cross_entropy(alone(x[start : start + rows * hvd.size()]), y[start : start + rows * hvd.size()])
        whole.backward()
        opt.zero_grad()
        losses = []
        for part in range(passes):
            begin = start + hvd.rank() * rows + part * 12
            loss = cross_entropy(model(x[begin : begin + 12]), y[begin : begin + 12]) / passes
            loss.backward()
            losses.append(loss.detach())
        opt.synchronize()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=0, atol=tolerance * max(1.0, q.grad.abs().max().item())), (
                name,
                step,
            )
        assert abs(hvd.allreduce(sum(losses)).item() - whole.item()) < tolerance
        with opt.skip_synchronize():
            opt.step()
        plain.step()
    return model


def check_digits_training_with_several_backward_passes_equals_one_process(hvd):
    x, y = digits()
    for passes in (1, 2, 4):
        torch.manual_seed(passes)
        compare(hvd, DigitsNet(), x, y, passes=passes)


def check_digits_training_with_groups_predivide_and_adam_equals_one_process(hvd):
    x, y = digits()
    compare(hvd, DigitsNet(), x, y, groups=2, gradient_predivide_factor=2.0)
    compare(hvd, DigitsNet(), x, y, make=lambda params: torch.optim.AdamW(params, lr=1e-3))


def check_digits_training_with_fp16_compression_stays_close_to_one_process(hvd):
    x, y = digits()
    compare(hvd, DigitsNet(), x, y, tolerance=2e-3, compression=hvd.Compression.fp16)


def check_transformer_with_a_tied_embedding_equals_one_process(hvd):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (300, 6)))
    for passes in (1, 2):
        torch.manual_seed(passes)
        compare(hvd, TiedTransformer(), tokens, tokens.flip(1), passes=passes)


def check_ranks_with_fewer_batches_call_join_and_training_completes(hvd):
    x, y = digits()
    model = DigitsNet()
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for batch in range(2 + 2 * hvd.rank()):
        opt.zero_grad()
        rows = slice(batch * 8, batch * 8 + 8)
        cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
    assert hvd.join() in range(hvd.size())
    # The last rank has the most batches, so its weights are the final weights.
    hvd.broadcast_parameters(model.state_dict(), hvd.size() - 1)
    weights = hvd.allgather_object(model[0].weight.detach().numpy())
    assert all((weight == weights[0]).all() for weight in weights)


def check_sync_batch_norm_equals_batch_norm_over_the_whole_batch(hvd):
    for shape in ((3,), (3, 5), (3, 4, 4)):
        # The ranks have batches of different sizes, and the mean is large compared with the variance.
        sizes = [2 + rank for rank in range(hvd.size())]
        whole = torch.randn(sum(sizes), *shape) + 100
        start = sum(sizes[: hvd.rank()])
        sync, plain = hvd.SyncBatchNorm(3), (nn.BatchNorm1d if len(shape) < 3 else nn.BatchNorm2d)(3)
        with torch.no_grad():
            sync.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
            plain.weight.copy_(sync.weight)
        if len(shape) == 2:
            # In new versions of torch, layers with bias=False have a weight alone.
            sync.bias = plain.bias = None
        mine = whole[start : start + sizes[hvd.rank()]].clone().requires_grad_()
        whole.requires_grad_()
        weights = torch.randn(whole.shape)
        got, expected = sync(mine), plain(whole)
        (got * weights[start : start + sizes[hvd.rank()]]).sum().backward()
        (expected * weights).sum().backward()
        part = slice(start, start + sizes[hvd.rank()])
        assert torch.allclose(got, expected[part], atol=2e-4)
        assert torch.allclose(mine.grad, whole.grad[part], atol=2e-3)
        assert torch.allclose(hvd.allreduce(sync.weight.grad, op=hvd.Sum), plain.weight.grad, atol=5e-3)
        assert torch.allclose(sync.running_mean, plain.running_mean, atol=1e-4)
        assert torch.allclose(sync.running_var, plain.running_var, atol=1e-4)
        sync.eval()
        plain.eval()
        assert torch.allclose(sync(mine), plain(whole)[part], atol=1e-3)


def check_number_of_stored_handles_does_not_grow(hvd):
    from paceline.compat.horovod.common import handles

    before = len(handles._pending), len(handles._in_flight)
    for step in range(300):
        hvd.allreduce_(torch.ones(4), name=f"step.{step}")
    assert (len(handles._pending), len(handles._in_flight)) == before
