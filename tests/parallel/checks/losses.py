"""Losses that a comparison might disturb, or that are no mean over rows: trained as in one process, or refused."""

from __future__ import annotations

import functools
import logging
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel, WorkerError
from tests.parallel.models import Mlp
from tests.parallel.world import Ranks

SIZES = (2,)
REPLICAS = (DataParallel(), FullyShard())


class Tower(nn.Module):
    """A mean over tokens and their positions, whose numbers are a buffer that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.last = nn.Embedding(32, 8), nn.Embedding(6, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8).eval()
        self.register_buffer("ids", torch.arange(6)[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm((self.tokens(x) + self.places(self.ids[:, : x.shape[1]])).mean(1))
        return F.normalize(self.last(found), dim=-1)


class Labelled(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.head(self.tower(x))
        return {"loss": F.cross_entropy(output, labels), "logits": output}


class Pair(nn.Module):
    """Returns a contrastive loss: each row against all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        output = 10 * self.left(x) @ self.right(z).t()
        return {"loss": F.cross_entropy(output, torch.arange(len(output))), "logits": output}


def _trained(make: Callable[[], nn.Module], batches: Any, strategy: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    par = paceline.parallelize(model, optimizer, batches, strategy=strategy, **options)
    for batch in batches:
        par.step(batch)
    return par


def _assert_equals_one_process(par: Any, one: nn.Module, limit: float = 1e-10) -> None:
    many = par.full_state_dict()
    for name, value in one.state_dict().items():
        apart = float((value - many[name]).abs().max())
        assert apart < limit, f"{par.world.layout}: {name} differs by {apart:g}"


def _tokens(rows: int = 8) -> Tensor:
    return torch.randint(0, 32, (rows, 6))


def check_model_whose_buffer_is_saved_by_autograd_equals_one_process(ranks: Ranks) -> None:
    torch.manual_seed(4)
    batches = [{"x": _tokens(), "labels": torch.randint(0, 5, (8,))} for _ in range(3)]
    torch.manual_seed(3)
    one = Labelled().double()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        one(**batch)["loss"].backward()
        optimizer.step()
    for strategy in (*REPLICAS, TensorParallel()):
        par = _trained(Labelled, batches, strategy)
        assert "equal to the plain model" in par.compared, par.compared
        _assert_equals_one_process(par, one)


def check_contrastive_loss_inside_the_model_is_refused(ranks: Ranks) -> None:
    torch.manual_seed(4)
    batches = [(_tokens(), _tokens())]
    for strategy in REPLICAS:
        with pytest.raises(ParallelError, match="compares the rows of a batch with one another"):
            _trained(Pair, batches, strategy)


def check_training_without_comparison_is_logged_on_rank_0(ranks: Ranks) -> None:
    class Rows(Labelled):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if len(x) < 5:
                raise ValueError("five rows at least")
            return super().forward(x, labels)

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paceline.parallel.first_check")
    logger.addHandler(handler)
    try:
        batch = {"x": _tokens(24), "labels": torch.randint(0, 5, (24,))}
        par = _trained(Rows, [batch], DataParallel(), microbatches=2)
    finally:
        logger.removeHandler(handler)
    assert len(lines) == (ranks.rank == 0), (lines, par.compared)
    assert all("trained without the comparison" in line and "five rows at least" in line for line in lines)


CALLS = [0]


def _warm_up(calls: int, output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * min(1.0, calls / 4)


class CountsInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return _warm_up(int(self.calls), output, target)


class CountsInAttribute:
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return _warm_up(self.calls, output, target)


def _counts_in_variable() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return _warm_up(calls, output, target)

    return loss


def _counts_in_global() -> Callable[[Tensor, Tensor], Tensor]:
    CALLS[0] = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        CALLS[0] += 1
        return _warm_up(CALLS[0], output, target)

    return loss


def _vectors(count: int = 3, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(rows, 12, dtype=torch.float64), torch.randint(0, 5, (rows,))) for _ in range(count)]


def _in_one_process(batches: Any, loss: Any, microbatches: int = 1) -> nn.Module:
    torch.manual_seed(3)
    model = Mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        for x_part, y_part in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            (loss(model(x_part), y_part) * len(y_part) / len(y)).backward()
        optimizer.step()
    return model


def check_loss_that_counts_its_calls_equals_one_process(ranks: Ranks) -> None:
    batches = _vectors()
    makers = {
        "buffer": CountsInBuffer,
        "attribute": lambda: CountsInAttribute().loss,
        "variable": _counts_in_variable,
        "global": _counts_in_global,
        "partial": lambda: functools.partial(_counts_in_list, [0]),
        "namespace": lambda: functools.partial(_counts_in_namespace, types.SimpleNamespace(calls=0)),
    }
    for make in makers.values():
        for strategy, microbatches in (*((one, 1) for one in (*REPLICAS, TensorParallel())), (PipelineParallel(), 2)):
            one = _in_one_process(batches, make(), microbatches)
            par = _trained(Mlp, batches, strategy, loss=make(), microbatches=microbatches)
            assert "equal to the plain model" in par.compared, par.compared
            _assert_equals_one_process(par, one)


def _counts_in_list(box: list[int], output: Tensor, target: Tensor) -> Tensor:
    box[0] += 1
    return _warm_up(box[0], output, target)


def _counts_in_namespace(kept: types.SimpleNamespace, output: Tensor, target: Tensor) -> Tensor:
    kept.calls += 1
    return _warm_up(kept.calls, output, target)


def check_loss_is_not_called_more_often_than_in_one_process(ranks: Ranks) -> None:
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.cross_entropy(output, target)
        seen.append(float(found))
        return found

    for strategy in (*REPLICAS, TensorParallel(), PipelineParallel()):
        seen.clear()
        _trained(Mlp, _vectors(), strategy, loss=loss, microbatches=2)
        assert len(seen) in (6, 0), "a stage that is not the last one calls no loss"
        assert seen or strategy == PipelineParallel()


def check_loss_with_state_that_depends_on_replica_rows_is_refused(ranks: Ranks) -> None:
    class Scaled(nn.Module):
        """Divides by a running mean of the losses."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones((), dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            found = F.cross_entropy(output, target)
            with torch.no_grad():
                self.mean.lerp_(found, 0.1)
            return found / self.mean

    for strategy in REPLICAS:
        with pytest.raises(ParallelError, match=r"keeps something else between its calls.*Scaled\.mean"):
            _trained(Mlp, _vectors(), strategy, loss=Scaled())
    # The loss `Scaled` keeps a running mean, which each microbatch changes. So several microbatches do not give the
    # loss of a whole batch.
    for strategy, microbatches, check in ((TensorParallel(), 1, "first"), (PipelineParallel(), 2, "off")):
        par = _trained(Mlp, _vectors(), strategy, loss=Scaled(), microbatches=microbatches, check=check)
        _assert_equals_one_process(par, _in_one_process(_vectors(), Scaled(), microbatches))


def check_loss_with_state_that_cannot_be_restored_is_refused_by_name(ranks: Ranks) -> None:
    def make() -> Any:
        weights = iter([1.0, 0.5, 0.25, 0.125] * 100)
        return lambda output, target: F.cross_entropy(output, target) * next(weights)

    for strategy in (*REPLICAS, PipelineParallel()):
        with pytest.raises(ParallelError, match=r"the loss .*make.*can't put back \(weights of .*check='off'"):
            _trained(Mlp, _vectors(), strategy, loss=make(), microbatches=2)


def _masked(kind: str) -> Any:
    """A loss that is a mean over the targets that count."""
    weights = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)

    def by_hand(output: Tensor, target: Tensor) -> Tensor:
        mask = target != -100
        return (F.cross_entropy(output, target, reduction="none") * mask).sum() / mask.sum()

    def clamped(output: Tensor, target: Tensor) -> Tensor:
        mask = target >= 3
        return (output.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)

    def zero(output: Tensor, target: Tensor) -> Tensor:
        return clamped(output, target) if (target >= 3).any() else output.sum() * 0

    def chosen(output: Tensor, target: Tensor) -> Tensor:
        mask = target != -100
        return 2 * (output[mask].logsumexp(-1) - output[mask, target[mask]]).square().mean()

    return {
        "function": F.cross_entropy,
        "module": nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1),
        "weights": functools.partial(F.cross_entropy, weight=weights),
        "log likelihood": lambda output, target: 0.5 * F.nll_loss(output.log_softmax(-1), target),
        "by hand": by_hand,
        "clamped": clamped,
        "zero": zero,
        "chosen": chosen,
    }[kind]


class Tagged(nn.Module):
    """Returns its own loss, the mean over the tokens but the first that count, as a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.head(torch.tanh(self.body(self.tokens(input_ids))))
        return {"loss": F.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": output}


def _masks_come_later(rows: int = 10) -> list[tuple[Tensor, Tensor]]:
    """The first batch has no masked target, the last has replicas and microbatches in which none counts."""
    batches = _vectors(4, rows)
    batches[1][1][:3] = -100
    batches[2][1][rows // 2 :: 2] = -100
    batches[3][1][1:] = -100
    return batches


def check_mean_loss_over_unmasked_targets_is_weighted_automatically(ranks: Ranks) -> None:
    batches = _masks_come_later()
    kinds = ("function", "module", "weights", "log likelihood", "by hand", "chosen", "clamped", "zero")
    for number, kind in enumerate(kinds):
        given = batches if kind not in ("by hand", "chosen") else batches[:3]
        one = _in_one_process(given, _masked(kind))
        layouts = [
            (DataParallel(), 1),
            (FullyShard(), 2),
            (DataParallel(), 3),
            (PipelineParallel(), 2),
            (TensorParallel(), 2),
        ]
        for strategy, microbatches in layouts if ranks.is_whole else layouts[number % 2 :: 2]:
            par = _trained(Mlp, given, strategy, loss=_masked(kind), microbatches=microbatches)
            _assert_equals_one_process(par, one)


def check_mean_loss_inside_the_model_over_unmasked_tokens_is_weighted_automatically(ranks: Ranks) -> None:
    torch.manual_seed(4)
    batches = [{"input_ids": _tokens(), "labels": torch.randint(0, 5, (8, 6))} for _ in range(3)]
    batches[1]["labels"][:3, 1:] = -100
    batches[2]["labels"][5] = -100
    torch.manual_seed(3)
    one = Tagged().double()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        one(**batch)["loss"].backward()
        optimizer.step()
    for strategy, microbatches in ((DataParallel(), 2), (FullyShard(), 1), (PipelineParallel(), 4)):
        _assert_equals_one_process(_trained(Tagged, batches, strategy, microbatches=microbatches), one)


def check_loss_with_terms_over_different_targets_is_refused_in_unequal_parts(ranks: Ranks) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * output.square().mean()

    batches = _masks_come_later()
    for strategy, microbatches in ((DataParallel(), 1), (PipelineParallel(), 2)):
        with pytest.raises((ParallelError, WorkerError), match="Make all terms means over the same targets"):
            _trained(Mlp, batches, strategy, loss=loss, microbatches=microbatches)
        weight: dict[str, Any] = {"loss_weight": lambda target: (target != -100).sum(), "check": "off"}
        _trained(Mlp, batches, strategy, loss=loss, microbatches=microbatches, **weight)
    _assert_equals_one_process(_trained(Mlp, batches, TensorParallel(), loss=loss), _in_one_process(batches, loss))


def _two_heads(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.clamp(min=0)) + F.cross_entropy(-output, target)


def check_two_means_of_which_one_ignores_targets_are_refused_in_the_first_unequal_batch(ranks: Ranks) -> None:
    """Not only in the steps in which all losses are checked: the third step is none."""
    batches = _vectors(4)
    stack: Any = lambda o, c: torch.stack([F.cross_entropy(o, c.clamp(min=0)), F.cross_entropy(-o, c)]).mean()  # noqa: E731
    batches[2][1][:3] = -100
    for loss in (_two_heads, stack):
        for strategy in REPLICAS:
            _assert_equals_one_process(
                _trained(Mlp, batches[:2], strategy, loss=loss), _in_one_process(batches[:2], loss)
            )
            with pytest.raises(
                (ParallelError, WorkerError), match=r"(terms means over the same targets|not a mean over rows)"
            ):
                _trained(Mlp, batches, strategy, loss=loss)
        par = _trained(Mlp, batches[:2], DataParallel(), loss=loss)
        with pytest.raises(
            (ParallelError, WorkerError), match=r"(terms means over the same targets|not a mean over rows)"
        ):
            par.evaluate(batches)


def check_hinge_loss_of_zero_on_one_row_equals_one_process(ranks: Ranks) -> None:
    for scale in (1.0, 40.0):

        def loss(output: Tensor, target: Tensor, scale: float = scale) -> Tensor:
            return F.relu(1 - output[:, 0] * (target.double() - 2).sign() * scale).sum() / len(target)

        batches = _vectors(4, rows=2)
        one = _in_one_process(batches, loss)
        for strategy in REPLICAS:
            par = _trained(Mlp, batches, strategy, loss=loss)
            _assert_equals_one_process(par, one)
            expected = sum(float(loss(one(x), y).detach()) for x, y in batches) / 4
            assert abs(par.evaluate(batches) - expected) < 1e-10


def check_stateful_loss_equals_one_process_if_only_one_replica_has_rows(ranks: Ranks) -> None:
    batches = [*_vectors(2), *_vectors(1, rows=1), *_vectors(2)]
    one = _in_one_process(batches, _counts_in_variable())
    for strategy in REPLICAS:
        _assert_equals_one_process(_trained(Mlp, batches, strategy, loss=_counts_in_variable()), one)


def check_evaluated_loss_is_the_mean_over_unmasked_targets(ranks: Ranks) -> None:
    batches = _masks_come_later()
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return F.cross_entropy(output, target)

    for strategy in (*REPLICAS, PipelineParallel()):
        torch.manual_seed(3)
        one = Mlp().double()
        output, target = one(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])
        model = Mlp().double()
        model.load_state_dict(one.state_dict())
        par = paceline.parallelize(model, None, batches, loss=loss, strategy=strategy, microbatches=2)
        calls.clear()
        assert abs(par.evaluate(batches) - float(F.cross_entropy(output.detach(), target))) < 1e-12
        assert strategy == PipelineParallel() or len(calls) == 8


def check_evaluated_loss_inside_the_model_is_the_mean_over_unmasked_targets(ranks: Ranks) -> None:
    class Own(Mlp):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return {"loss": F.cross_entropy(super().forward(x), labels)}

    batches = _masks_come_later()
    for strategy in (*REPLICAS, PipelineParallel()):
        torch.manual_seed(3)
        model = Own().double()
        with torch.no_grad():
            one = float(model(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))["loss"])
        par = paceline.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches, strategy=strategy, microbatches=2
        )
        assert abs(par.evaluate(batches) - one) < 1e-12
        # The graph of an evaluation must not disturb a step.
        par.step(batches[2])
        assert math.isfinite(par.evaluate(batches))
    # The number of targets is unknown if the loss has no gradient.
    model = Own().double().requires_grad_(False)
    par = paceline.parallelize(model, None, batches, strategy=DataParallel(), microbatches=2)
    with pytest.raises((ParallelError, WorkerError), match=r"hides how many targets count.*weight=lambda"):
        par.evaluate(batches[3:])
    assert par.evaluate(batches[3:], weight=lambda target: (target != -100).sum()) > 0


def check_evaluation_refuses_losses_with_terms_over_different_targets(ranks: Ranks) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * output.square().mean()

    batches = _masks_come_later()
    for strategy, microbatches in ((DataParallel(), 1), (FullyShard(), 1), (PipelineParallel(), 2)):
        par = paceline.parallelize(
            Mlp().double(), None, batches, loss=loss, strategy=strategy, microbatches=microbatches, check="off"
        )
        with pytest.raises((ParallelError, WorkerError), match="Make all terms means over the same targets"):
            par.evaluate(batches)
        assert math.isfinite(par.evaluate(batches[:1]))
    par = paceline.parallelize(Mlp().double(), None, batches, loss=loss, strategy=TensorParallel(), check="off")
    assert math.isfinite(par.evaluate(batches))


def _divided_by_the_batch(output: Any, y: Any) -> Any:
    return F.kl_div(output.log_softmax(1), y, reduction="batchmean")


def check_losses_that_save_their_output_for_backward_are_trained(ranks: Ranks) -> None:
    torch.manual_seed(4)
    batch = torch.randn(8, 12), torch.rand(8, 5)
    for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits, _divided_by_the_batch):
        for strategy in (DataParallel(), FullyShard(), PipelineParallel(cut=["2"])):
            model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            par = paceline.parallelize(model, optimizer, loss=loss, strategy=strategy, microbatches=2)
            par.step(batch)
            assert "equal to the plain model" in par.compared, par.compared


class _Fused(torch.autograd.Function):
    """A cross entropy with its gradient made in the forward pass, as fused kernels do: autograd does not see the count."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            own = output.detach().requires_grad_()
            loss = F.cross_entropy(own, target)
        (ctx.grad,) = torch.autograd.grad(loss, own)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.grad, None


class _FusedOwn(Labelled):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.head(self.tower(x))
        return {"loss": _Fused.apply(output, labels), "logits": output}


def _batches_of_which_the_third_ignores_targets() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    batches = [(_tokens(), torch.randint(0, 5, (8,))) for _ in range(3)]
    batches[2][1][[1, 6, 7]] = -100
    return batches


def check_fused_loss_is_refused_in_the_first_batch_with_ignored_targets(ranks: Ranks) -> None:
    """Not only in the steps in which other losses are checked."""

    def made() -> nn.Module:
        return nn.Sequential(Tower(), nn.Linear(8, 5))

    batches = _batches_of_which_the_third_ignores_targets()
    for strategy in REPLICAS:
        with pytest.raises(ParallelError, match="not a mean over rows"):
            _trained(made, batches, strategy, loss=_Fused.apply)
    _trained(made, batches[:2], DataParallel(), loss=_Fused.apply)
    counted = _trained(
        made, batches, DataParallel(), loss=_Fused.apply, loss_weight=lambda target: (target != -100).sum()
    )
    torch.manual_seed(3)
    one = made().double()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for x, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(one(x), target).backward()
        optimizer.step()
    _assert_equals_one_process(counted, one)


def check_fused_loss_with_ignored_targets_in_any_microbatch_is_refused(ranks: Ranks) -> None:
    def made() -> nn.Module:
        return nn.Sequential(Tower(), nn.Linear(8, 5))

    for ignored in ([7], [6, 7]):
        batches = _batches_of_which_the_third_ignores_targets()
        batches[2][1][:] = batches[1][1]
        batches[2][1][ignored] = -100
        for microbatches in (2, 4):
            with pytest.raises(ParallelError, match="not a mean over rows"):
                _trained(made, batches, DataParallel(), loss=_Fused.apply, microbatches=microbatches)
            _trained(made, batches[:2], DataParallel(), loss=_Fused.apply, microbatches=microbatches)


def check_fused_loss_inside_the_model_is_refused_with_ignored_targets(ranks: Ranks) -> None:
    batches = [{"x": x, "labels": target} for x, target in _batches_of_which_the_third_ignores_targets()]
    _trained(_FusedOwn, batches[:2], DataParallel())
    with pytest.raises((ParallelError, WorkerError), match="hides how many targets count"):
        _trained(_FusedOwn, batches, DataParallel())
