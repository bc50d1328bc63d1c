"""The loop around the step: loaders, evaluation, optimizers, batch normalisation, precision, parameters left out."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler, random_split

import paceline
from paceline.parallel import (
    ContextParallel,
    DataParallel,
    FullyShard,
    ParallelError,
    Parts,
    PipelineParallel,
    TensorParallel,
    Whole,
)
from paceline.parallel.reduce import broadcast
from tests.parallel.equality import (
    Outcome,
    adamw,
    alone,
    assert_equal,
    batches,
    made,
    read,
    sgd,
    together,
    whole,
)
from tests.parallel.models import CASES, SHALLOW, Mlp, Transformer, count_tokens, token_loss
from tests.parallel.world import Ranks

SIZES = (2,)

BOTH: tuple[Any, ...] = (DataParallel(), FullyShard())


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Sample i contains i, so that the seen samples can be read back."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.full((12,), float(index)), torch.tensor(index % 5)


def numbered(length: int, batch: int, **options: Any) -> tuple[Any, Numbered]:
    dataset = Numbered(length)
    model = Mlp()
    loader = DataLoader(dataset, batch_size=batch, **options)
    par = paceline.parallelize(model, adamw(model), loader, loss=F.cross_entropy, strategy=DataParallel())
    # `parallelize` has already read two samples, to compare them with the samples of the other ranks.
    dataset.read.clear()
    return par, dataset


def seen(batch: Any) -> list[int]:
    return [int(row[0]) for row in batch.data[0][: batch.rows]]


def check_epoch_has_every_sample_once(ranks: Ranks) -> None:
    # Neither 23 samples nor a batch of 5 samples can be divided equally between the replicas. The last batch has 3 rows
    # for 2 replicas.
    par, dataset = numbered(23, 5, shuffle=True)
    own = [seen(batch) for batch in par.epoch(0)]
    for number, parts in enumerate(zip(*everyone(own), strict=True)):
        assert sum(map(len, parts)) == (5 if number < 4 else 3)
    every = [index for of_rank in everyone(own) for batch in of_rank for index in batch]
    assert sorted(every) == list(range(23))
    # The rank has read only its own rows.
    assert sorted(dataset.read) == sorted(index for batch in own for index in batch)
    again = [seen(batch) for batch in par.epoch(0)]
    other = [seen(batch) for batch in par.epoch(1)]
    assert again == own
    assert other != own


def check_drop_last_and_sample_order_of_the_loader_are_kept(ranks: Ranks) -> None:
    par, _ = numbered(11, 4, drop_last=True)
    own = [seen(batch) for batch in par.epoch(0)]
    assert len(par) == len(own) == 2
    batches_of_all = list(zip(*everyone(own), strict=True))
    assert [sorted(a + b) for a, b in batches_of_all] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def check_batch_with_fewer_rows_than_replicas_is_trained(ranks: Ranks) -> None:
    par, _ = numbered(5, 4)
    rows = []
    for batch in par.epoch(0):
        rows.append(batch.rows)
        par.step(batch)
    assert everyone(rows) == [[2, 1], [2, 0]]


def check_random_sampler_is_drawn_once_for_all_ranks(ranks: Ranks) -> None:
    # Give each rank another seed. If each rank drew its samples separately, the ranks would use different samples, and
    # the inputs and targets of a pipeline would not match.
    torch.manual_seed(ranks.rank)
    par, _ = numbered(10, 4, sampler=WeightedRandomSampler([1.0] * 10, 10))
    first = [batch.consumed for batch in par.epoch(0)]
    drawn = [
        index for of_rank in everyone([seen(batch) for batch in par.epoch(0)]) for batch in of_rank for index in batch
    ]
    again = [
        index for of_rank in everyone([seen(batch) for batch in par.epoch(0)]) for batch in of_rank for index in batch
    ]
    assert first == [4, 8, 10]
    assert drawn == again
    assert len(drawn) == 10


def check_loaded_state_resumes_the_epoch_at_the_next_sample(ranks: Ranks) -> None:
    par, _ = numbered(23, 5, shuffle=True)
    every = everyone([seen(batch) for batch in par.epoch(1)])
    for number, batch in enumerate(par.epoch(1)):
        par.step(batch)
        if number == 1:
            break
    state = copy.deepcopy(par.state())
    assert state["progress"] == {"steps": 2, "epoch": 1, "consumed": 10}
    later, _ = numbered(23, 5, shuffle=True)
    later.load_state(state)
    assert list(later.epoch(0)) == []
    rest = everyone([seen(batch) for batch in later.epoch(1)])
    assert rest == [of_rank[2:] for of_rank in every]
    assert len([seen(batch) for batch in later.epoch(2)]) == 5


def check_loader_with_worker_processes_gives_the_same_samples(ranks: Ranks) -> None:
    plain, _ = numbered(13, 4, shuffle=True)
    with_workers, _ = numbered(13, 4, shuffle=True, num_workers=1)
    assert [seen(batch) for batch in with_workers.epoch(0)] == [seen(batch) for batch in plain.epoch(0)]


def check_training_through_a_loader_equals_one_process(ranks: Ranks) -> None:
    case = CASES["cnn_batch"]
    x, y = batches(case, torch.float64, (22,))[0]
    for microbatches in (1, 2):
        model = made(case, torch.float64)
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        options = {"loss": case.loss, "strategy": DataParallel(), "microbatches": microbatches, "check": "off"}
        par = paceline.parallelize(model, adamw(model), loader, **options)
        many = Outcome(losses=[float(par.step(batch)) for batch in par.epoch(0)])
        read(par, many)
        model = made(case, torch.float64)
        given = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
        par = paceline.parallelize(model, adamw(model), given, **options)
        one = Outcome(losses=[float(par.step(batch)) for batch in par.epoch(0)])
        read(par, one)
        assert_equal(one, many, loss=1e-14, gradient=1e-14, parameter=1e-14, buffer=1e-14)


def check_evaluation_uses_every_sample_once(ranks: Ranks) -> None:
    case = CASES["cnn_batch"]
    x, y = batches(case, torch.float64, (11,))[0]

    def metric(output: Tensor, target: Tensor) -> dict[str, Any]:
        return {"accuracy": (output.argmax(1) == target).double().mean(), "loss": F.cross_entropy(output, target)}

    for strategy in BOTH:
        model = made(case, torch.float64)
        expected = metric(copy.deepcopy(model).eval()(x).detach(), y)
        par = paceline.parallelize(model, sgd(model), loss=case.loss, strategy=strategy)
        found = par.evaluate(DataLoader(TensorDataset(x, y), batch_size=4), metric)
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-12)
        assert par.evaluate([(x, y)], F.cross_entropy) == pytest.approx(float(expected["loss"]), abs=1e-12)
        assert all(part.training for part in par.module.modules())


def check_broadcast_copies_tensors_of_any_size_and_layout_from_rank_0(ranks: Ranks) -> None:
    """A large tensor is sent as it is in memory, maybe not contiguous, and small ones are sent together."""
    torch.manual_seed(ranks.rank)
    own = [torch.randn(3), torch.randn(600, 500), torch.randn(500, 600).t(), torch.randn(4, 2).t()]
    if ranks.rank:
        own[1] = own[1].t().contiguous().t()
    broadcast(own, torch.distributed.group.WORLD)
    torch.manual_seed(0)
    first = [torch.randn(3), torch.randn(600, 500), torch.randn(500, 600).t(), torch.randn(4, 2).t()]
    assert all(map(torch.equal, own, first))


def check_par_check_passes_and_leaves_the_model_unchanged(ranks: Ranks) -> None:
    for name in ("cnn_batch", "transformer_tied"):
        case = SHALLOW[name]
        x, y = batches(case, torch.float64, (7,))[0]
        for strategy in BOTH:
            model = made(case, torch.float64)
            before = {key: value.clone() for key, value in model.state_dict().items()}
            par = paceline.parallelize(
                model,
                adamw(model),
                DataLoader(TensorDataset(x, y), batch_size=5),
                loss=case.loss,
                loss_weight=case.loss_weight,
                strategy=strategy,
                microbatches=2,
            )
            assert par.check((x, y)).difference < 1e-12
            assert par.check(next(iter(par.epoch(0)))).difference < 1e-12
            after = par.full_state_dict()
            assert all(torch.equal(after[key], value) for key, value in before.items())


def check_par_check_names_a_wrong_gradient(ranks: Ranks) -> None:
    class Wrong(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if dist.get_rank() == 1:
                # Rank 1 computes a different output.
                return y + self.last.bias
            return y

    x, y = batches(CASES["mlp"], torch.float64, (6,))[0]
    model = Wrong().double()
    par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=DataParallel())
    with pytest.raises(ParallelError, match=r"last\.bias"):
        par.check((x, y))


def check_loss_with_sum_reduction_is_refused(ranks: Ranks) -> None:
    x, y = batches(CASES["mlp"], torch.float64, (6,))[0]
    for strategy, reduction in itertools.product((DataParallel(), PipelineParallel()), ("sum", "mean")):
        model = Mlp().double()
        par = paceline.parallelize(
            *(model, sgd(model), [(x, y)]),
            loss=lambda output, target, how=reduction: F.cross_entropy(output, target, reduction=how),
            strategy=strategy,
            microbatches=2,
        )
        with pytest.raises(ParallelError, match="it is a sum") if reduction == "sum" else contextlib.nullcontext():
            par.check((x, y))
    with pytest.raises(ParallelError, match=r"before the first step.* it is a sum.*\(check='off'\)"):
        spread_with(functools.partial(F.cross_entropy, reduction="sum")).step((x, y))


def spread_with(loss: Any) -> Any:
    model = Mlp().double()
    return paceline.parallelize(model, sgd(model), loss=loss, strategy=DataParallel(), microbatches=2)


def check_too_few_rows_for_batch_norm_raise_an_error_with_the_channels(ranks: Ranks) -> None:
    x, y = batches(CASES["cnn_batch"], torch.float64, (2,))[0]
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    with pytest.raises(ParallelError, match="gives BatchNorm1d one value for each of its 8 channels"):
        paceline.parallelize(
            *(model, sgd(model), [(x, y)]), loss=F.cross_entropy, strategy=PipelineParallel(), microbatches=2
        )


def check_calling_a_model_split_into_stages_raises(ranks: Ranks) -> None:
    x, y = batches(CASES["mlp"], torch.float64, (6,))[0]
    model = Mlp().double()
    par = paceline.parallelize(
        *(model, sgd(model), [(x, y)]), loss=F.cross_entropy, strategy=PipelineParallel(), microbatches=2
    )
    with pytest.raises(ParallelError, match=r"Mlp was called, but it is cut into stages"):
        model(x)
    par.step((x, y))


def check_dropout_differs_between_replicas_and_is_reproducible(ranks: Ranks) -> None:
    def run() -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(3)
        model = Transformer(tied=True, dropout=0.5)
        masks: list[Tensor] = []
        model.blocks[0].dropout.register_forward_hook(lambda _, args, output: masks.append((output == 0).detach()))
        # Switch the comparison in the first step off, because it would call the hook too.
        options: dict[str, Any] = {"strategy": DataParallel(), "loss_weight": count_tokens, "check": "off"}
        par = paceline.parallelize(model, adamw(model), loss=token_loss, **options)
        x, y = CASES["transformer_tied"].batch(2)
        return [float(par.step((x, y))) for _ in range(3)], masks

    before = torch.get_rng_state()
    losses, masks = run()
    again, _ = run()
    assert losses == again
    of_all = everyone(masks)
    assert not torch.equal(of_all[0][0], of_all[1][0])
    assert not torch.equal(masks[0], masks[2])
    assert before.shape == torch.get_rng_state().shape
    x, y = CASES["transformer_tied"].batch(4)
    model = Transformer(tied=True, dropout=0.5)
    par = paceline.parallelize(model, adamw(model), loss=token_loss, strategy=DataParallel(), loss_weight=count_tokens)
    assert par.check((x, y)).difference < 1e-4


def check_step_does_not_advance_the_callers_random_generator(ranks: Ranks) -> None:
    model = Transformer(tied=True, dropout=0.5)
    par = paceline.parallelize(model, adamw(model), loss=token_loss, strategy=DataParallel(), loss_weight=count_tokens)
    x, y = CASES["transformer_tied"].batch(4)
    before = torch.get_rng_state()
    par.step((x, y))
    assert torch.equal(before, torch.get_rng_state())


class Leaves(nn.Module):
    """`never` is not used; `sometimes` is used when the first input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(12, 5)
        self.never = nn.Linear(12, 5)
        self.sometimes = nn.Linear(12, 5)
        self.frozen = nn.Linear(12, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x) * self.scale + self.frozen(x)
        return y + self.sometimes(x) if float(x[0, 0]) > 0 else y


def leaves_batch(first: float, second: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(int(first) + 10)
    x = torch.randn(4, 12, dtype=torch.float64)
    x[:, 0] = -1.0
    # Row 0 is the first row of one replica, and row 2 is the first row of the other replica.
    x[0, 0], x[2, 0] = first, second
    return x, torch.tensor([0, 1, 2, 3])


def leaves_alone(given: list[tuple[Tensor, Tensor]], microbatches: int) -> dict[str, Tensor]:
    """Each replica's part of each microbatch through the model."""
    size = 4 // (2 * microbatches)
    torch.manual_seed(0)
    model = Leaves().double()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for x, y in given:
        opt.zero_grad()
        for start in range(0, 4, size):
            rows = slice(start, start + size)
            (F.cross_entropy(model(x[rows]), y[rows]) * size / 4).backward()
        opt.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def check_unused_parameters_are_updated_as_in_a_plain_loop(ranks: Ranks) -> None:
    # The optimizer's strong weight decay changes a parameter whose gradient is 0, but not a parameter whose gradient is
    # None.
    given = [leaves_batch(1.0, -1.0), leaves_batch(-1.0, -1.0), leaves_batch(1.0, 1.0), leaves_batch(-1.0, 1.0)]
    for strategy, microbatches in itertools.product(BOTH, (1, 2)):
        expected = leaves_alone(given, microbatches)
        torch.manual_seed(0)
        model = Leaves().double()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
        # The model's result depends on which rows are in one batch, so it never equals the plain model on the whole batch.
        options: dict[str, Any] = {"strategy": strategy, "microbatches": microbatches, "check": "off"}
        par = paceline.parallelize(model, opt, loss=F.cross_entropy, **options)
        for batch in given:
            par.step(batch)
        assert {"never.weight", "never.bias"} <= set(par.executor.unused)
        for name, param in par.executor.named_parameters().items():
            assert float((whole(param).detach() - expected[name]).abs().max()) < 1e-12, (strategy, name)


def check_parameters_may_be_frozen_and_unfrozen_between_steps(ranks: Ranks) -> None:
    # Regression: DDP reduces only parameters that were trainable when DDP was created. So replicas diverged after other
    # parameters were unfrozen.
    given = batches(CASES["mlp"], torch.float64, (6,) * 6)

    def freeze(model: nn.Module, step: int) -> None:
        for number, param in enumerate(model.parameters()):
            param.requires_grad_((number < 2, True, number >= 2)[step // 2])

    def fresh() -> nn.Module:
        model = made(CASES["mlp"], torch.float64)
        freeze(model, 0)
        return model

    plain = fresh()
    opt = sgd(plain)
    for step, (x, y) in enumerate(given):
        freeze(plain, step)
        opt.zero_grad()
        CASES["mlp"].loss(plain(x), y).backward()
        opt.step()
    # `make test` uses two of four combinations: replicas sum the gradients after the last microbatch, but shards sum
    # them after each microbatch.
    data, shard = BOTH
    for strategy, microbatches in ranks.cells([(data, 2), (shard, 1)], list(itertools.product(BOTH, (1, 2)))):
        model = fresh()
        par = paceline.parallelize(
            model, sgd(model), loss=CASES["mlp"].loss, strategy=strategy, microbatches=microbatches, check="off"
        )
        for step, batch in enumerate(given):
            freeze(par.module, step)
            par.step(batch)
            par.evaluate([batch], CASES["mlp"].loss)  # this gathers sharded parameters
        for of_rank in everyone(par.full_state_dict()):
            for name, value in plain.state_dict().items():
                assert float((of_rank[name] - value).abs().max()) < 1e-12, (strategy, microbatches, name)


def check_model_converted_to_another_dtype_after_parallelize_is_refused(ranks: Ranks) -> None:
    x, y = batches(CASES["mlp"], torch.float32, (6,))[0]
    for strategy in BOTH:
        model = Mlp()
        par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=strategy)
        par.step((x, y))
        model.double()
        with pytest.raises(ParallelError, match=r"was float32 on cpu when .* and is float64 on cpu now"):
            par.step((x, y))


def check_layer_replaced_after_parallelize_is_refused_by_name(ranks: Ranks) -> None:
    # Regression: if the user replaced the model's last layer, each replica trained the new layer separately, and a
    # pipeline did not train it.
    x, y = batches(CASES["mlp"], torch.float32, (6,))[0]
    for strategy in [*BOTH, PipelineParallel(stages=ranks.size)]:
        model = Mlp()
        par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=strategy, microbatches=2)
        par.step((x, y))
        name, old = next((name, child) for name, child in model.named_children() if isinstance(child, nn.Linear))
        setattr(model, name, nn.Linear(old.in_features, old.out_features))
        with pytest.raises(ParallelError, match=rf"{name} was put into the model after parallelize"):
            par.step((x, y))
        setattr(model, name, old)
        par.step((x, y))
        old.bias = nn.Parameter(torch.zeros(old.out_features))
        with pytest.raises(ParallelError, match=rf"{name}\.bias was put into the model"):
            par.step((x, y))


def check_layer_without_parameters_can_be_replaced_after_parallelize(ranks: Ranks) -> None:
    x, y = batches(CASES["mlp"], torch.float32, (6,))[0]
    model = nn.Sequential(Mlp(), nn.Dropout(0.5))
    par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=DataParallel())
    par.step((x, y))
    model[1] = nn.Identity()
    par.step((x, y))
    prune.identity(next(child for child in model[0].children() if isinstance(child, nn.Linear)), "weight")
    par.step((x, y))


def check_parameter_unused_in_a_later_step_is_named_in_the_error(ranks: Ranks) -> None:
    for strategy in BOTH:
        model = Leaves().double()
        del model.never
        par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=strategy)
        par.step(leaves_batch(1.0, 1.0))
        par.step(leaves_batch(1.0, 1.0))
        with pytest.raises(ParallelError, match=r"sometimes\.weight.*find_unused=True"):
            par.step(leaves_batch(-1.0, -1.0))


def check_parameter_groups_and_schedulers_equal_one_process(ranks: Ranks) -> None:
    case = SHALLOW["transformer_tied"]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        decayed = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)

    given = batches(case, torch.float64, (8,) * 4)
    model = made(case, torch.float64)
    opt = optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.1)
    for x, y in given:
        opt.zero_grad()
        case.loss(model(x), y).backward()
        opt.step()
        scheduler.step()
    expected = {name: param.detach() for name, param in model.named_parameters()}
    for strategy in BOTH:
        model = made(case, torch.float64)
        opt = optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.1)
        options = {"loss": case.loss, "loss_weight": case.loss_weight, "check": "off"}
        par = paceline.parallelize(model, opt, strategy=strategy, **options)
        for batch in given:
            par.step(batch)
            scheduler.step()
        assert [group["lr"] for group in opt.param_groups] == pytest.approx([1e-4, 3e-5])
        for name, param in par.executor.named_parameters().items():
            assert float((whole(param).detach() - expected[name]).abs().max()) < 1e-10, (strategy, name)


def check_optimizer_state_from_before_parallelize_is_kept(ranks: Ranks) -> None:
    case = CASES["mlp"]
    first, second = batches(case, torch.float64, (8, 8))
    model = made(case, torch.float64)
    opt = adamw(model)
    results = {}
    for strategy in (None, *BOTH):
        model = made(case, torch.float64)
        opt = adamw(model)
        case.loss(model(first[0]), first[1]).backward()
        opt.step()
        opt.zero_grad()
        if strategy is None:
            case.loss(model(second[0]), second[1]).backward()
            opt.step()
            results = {name: param.detach() for name, param in model.named_parameters()}
            continue
        par = paceline.parallelize(model, opt, loss=case.loss, strategy=strategy)
        par.step(second)
        for name, param in par.executor.named_parameters().items():
            assert float((whole(param).detach() - results[name]).abs().max()) < 1e-12, (strategy, name)


def check_bf16_data_parallel_training_stays_close_to_float32(ranks: Ranks) -> None:
    case = CASES["transformer_tied"]
    one = alone(case, dtype=torch.float32, rows=(8,), optimizer=sgd)
    for strategy in BOTH:
        many = together(case, strategy, dtype=torch.float32, rows=(8,), optimizer=sgd, precision="bf16")
        assert_equal(one, many, loss=5e-2, gradient=5e-2)
        assert all(param.dtype == torch.float32 for param in many.parameters.values())
    # The metric is computed in float32, like the loss. In bf16 it would be rounded.
    model = made(case, torch.float32)
    x, y = batches(case, torch.float32, (8,))[0]
    par = paceline.parallelize(
        model, sgd(model), loss=token_loss, loss_weight=count_tokens, precision="bf16", strategy=DataParallel()
    )
    found = par.evaluate([(x, y)], token_loss)
    assert found == pytest.approx(float(par.step((x, y))), rel=1e-5)


def check_local_batch_norm_statistics_are_averaged_before_evaluation(ranks: Ranks) -> None:
    case = CASES["cnn_batch"]
    model = made(case, torch.float64)
    par = paceline.parallelize(model, sgd(model), loss=case.loss, strategy=DataParallel(batch_norm="local"))
    for batch in batches(case, torch.float64, (8,) * 3):
        par.step(batch)
    name = "blocks.0.1.running_mean"
    apart = everyone(dict(par.module.named_buffers())[name].clone())
    assert not torch.equal(apart[0], apart[1])
    par.evaluate(batches(case, torch.float64, (8,)), F.cross_entropy)
    settled = everyone(dict(par.module.named_buffers())[name].clone())
    assert torch.equal(settled[0], settled[1])
    assert torch.equal(settled[0], apart[0])


def check_batch_norm_with_each_option_equals_one_process(ranks: Ranks) -> None:
    for options in ({"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5}):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(12, 6, bias=False), nn.BatchNorm1d(6, **options), nn.Linear(6, 5)).double()
        plain = copy.deepcopy(model)
        par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=DataParallel())
        opt = sgd(plain)
        assert isinstance(model[1], nn.BatchNorm1d)
        for x, y in batches(CASES["mlp"], torch.float64, (7, 5)):
            par.step((x, y))
            opt.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            opt.step()
        for name, value in plain.state_dict().items():
            assert float((model.state_dict()[name].double() - value.double()).abs().max()) < 1e-12, (options, name)
        x, y = batches(CASES["mlp"], torch.float64, (6,))[0]
        assert par.evaluate([(x, y)], F.cross_entropy) == pytest.approx(
            float(F.cross_entropy(plain.eval()(x), y).detach())
        )


def check_values_without_a_row_dimension_are_passed_whole(ranks: Ranks) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x: Tensor, *, mask: Tensor, names: list[str]) -> dict[str, Tensor]:
            assert len(names) == len(x)
            return {"logits": self.linear(x * mask)}

    x, y = batches(CASES["mlp"], torch.float64, (5,))[0]
    mask = torch.arange(12.0).double()
    torch.manual_seed(1)
    model = Masked().double()
    plain = copy.deepcopy(model)
    par = paceline.parallelize(
        model,
        sgd(model),
        loss=lambda output, target: F.cross_entropy(output["logits"], target),
        strategy=DataParallel(),
        split=lambda batch: Parts((batch["x"],), {"mask": Whole(mask), "names": batch["names"]}, batch["y"]),
    )
    loss = par.step({"x": x, "y": y, "names": list("abcde")})
    assert float(loss) == pytest.approx(
        float(F.cross_entropy(plain(x, mask=mask, names=list("abcde"))["logits"], y).detach())
    )


def check_training_continues_after_a_batch_refused_on_all_ranks(ranks: Ranks) -> None:
    model = Mlp()
    par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=DataParallel())
    x, y = CASES["mlp"].batch(4)
    with pytest.raises(ParallelError, match="has 4 rows, but"):
        par.step((x, y[:3]))
    assert float(par.step((x, y))) > 0


def check_batches_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    case = CASES["mlp"]
    x, y = case.batch(4)
    model = Mlp()
    par = paceline.parallelize(model, sgd(model), loss=F.cross_entropy, strategy=DataParallel())
    with pytest.raises(ParallelError, match=r"not given the same batch: rank 0: tensors of \[4, 12\], \[4\] \("):
        par.step((x + ranks.rank, y))
    with pytest.raises(ParallelError, match=r"rank 1: tensors of \[2, 12\]"):
        par.step((x[: 4 - 2 * ranks.rank], y[: 4 - 2 * ranks.rank]))
    assert float(par.step((x, y))) > 0


def check_a_loader_that_ends_early_on_one_rank_is_refused(ranks: Ranks) -> None:
    # Regression: if each rank had its own loader and one loader ended early, the other ranks waited forever.
    case = CASES["mlp"]
    given = [case.batch(4) for _ in range(3)]
    model = Mlp()
    par = paceline.parallelize(
        model, sgd(model), given[: 3 - ranks.rank], loss=F.cross_entropy, strategy=DataParallel()
    )

    def train() -> None:
        for batch in par.epoch(0):
            par.step(batch)

    with pytest.raises(ParallelError, match="rank 1: none any more"):
        train()
    assert par.progress.steps == 2


def check_default_device_set_by_the_script_does_not_change_training(ranks: Ranks) -> None:
    """Tensors made for this device by default, and not for a named device, would have no values."""
    case = SHALLOW["transformer_untied"]
    data = TensorDataset(*batches(case, torch.float64, (24,))[0])
    for strategy in (*BOTH, PipelineParallel(), TensorParallel(), ContextParallel()):
        losses = []
        for device in ("cpu", "meta"):
            model = made(case, torch.float64)
            torch.manual_seed(0)
            with torch.device(device):
                loader = DataLoader(data, batch_size=8, shuffle=True)
                par = paceline.parallelize(
                    model, sgd(model), loader, loss=case.loss, strategy=strategy, microbatches=2, check="first"
                )
                found = [float(par.step(batch)) for batch in par.epoch(0)]
                losses.append([*found, par.evaluate(DataLoader(data, batch_size=8), case.loss)])
                whole = par.full_state_dict()
        assert losses[0] == losses[1], strategy
        assert all(value.is_cpu for value in whole.values())


def check_different_dataset_on_one_rank_is_refused(ranks: Ranks) -> None:
    # Both datasets have the same length, so only their samples differ. Some samples would be used twice.
    x, y = CASES["mlp"].batch(12)
    own = torch.Generator().manual_seed(ranks.rank)
    model = Mlp()

    def spread(dataset: Dataset[Any], strategy: Any) -> Any:
        loader = DataLoader(dataset, batch_size=4)
        return paceline.parallelize(model, sgd(model), loader, loss=F.cross_entropy, strategy=strategy)

    for strategy in (*BOTH, PipelineParallel()):
        for dataset in (
            TensorDataset(torch.randn(12, 12, generator=own), y),
            random_split(TensorDataset(x, y), [6, 6], generator=own)[0],
            Subset(TensorDataset(x, y), range(6 * ranks.rank, 6 * ranks.rank + 6)),
        ):
            with pytest.raises(
                ParallelError, match=r"same dataset: sample [05] is \[1, 12\] .* on rank 0, .* on rank 1"
            ):
                spread(dataset, strategy)
    good = TensorDataset(x, y)
    par = spread(good, DataParallel())
    with pytest.raises(ParallelError, match="same dataset"):
        par.evaluate(DataLoader(TensorDataset(x + ranks.rank, y), batch_size=4), F.cross_entropy)
    assert par.evaluate(DataLoader(good, batch_size=4), F.cross_entropy) > 0


def check_random_augmentation_is_not_reported_as_a_different_dataset(ranks: Ranks) -> None:
    class Noisy(Numbered):
        def __init__(self, draw: Callable[[], Any]) -> None:
            super().__init__(8)
            self.draw = draw

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(index)
            return x + torch.as_tensor(self.draw(), dtype=x.dtype), y

    class Broken(Numbered):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if ranks.rank == 1:
                raise OSError("no such disk")
            return super().__getitem__(index)

    random.seed(ranks.rank)
    torch.manual_seed(ranks.rank)
    of_its_own = torch.Generator().manual_seed(ranks.rank)
    for draw in (lambda: torch.randn(12), random.random, lambda: torch.randn(12, generator=of_its_own)):
        model = Mlp()
        loader = DataLoader(Noisy(draw), batch_size=4)
        par = paceline.parallelize(model, sgd(model), loader, loss=F.cross_entropy, strategy=DataParallel())
        assert len([par.step(batch) for batch in par.epoch(0)]) == 2
    # An error while reading samples is raised later, in the epoch.
    paceline.parallelize(model, sgd(model), DataLoader(Broken(8)), loss=F.cross_entropy, strategy=DataParallel())


def check_loss_that_changes_the_output_in_place_equals_one_process(ranks: Ranks) -> None:
    # An in-place change of a view removes FSDP2's hook, so the parameters would stay sharded in the backward pass.
    class View(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 5)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        output /= 2.0
        return F.cross_entropy(output, target)

    case = CASES["mlp"]
    given = batches(case, torch.float64, (4, 4))
    torch.manual_seed(0)
    plain = View().double()
    opt = sgd(plain)
    for x, y in given:
        opt.zero_grad()
        loss(plain(x), y).backward()
        opt.step()
    expected = dict(plain.named_parameters())
    for strategy in BOTH:
        torch.manual_seed(0)
        model = View().double()
        par = paceline.parallelize(model, sgd(model), given, loss=loss, strategy=strategy)
        for batch in par.epoch(0):
            par.step(batch)
        for name, param in par.executor.named_parameters().items():
            assert float((whole(param) - expected[name]).detach().abs().max()) < 1e-12, (strategy, name)


def check_optimizer_step_outside_par_step_is_refused(ranks: Ranks) -> None:
    """Gradients of one rank alone would make the ranks go apart, and every loss would look well."""
    for strategy in BOTH:
        case = CASES["mlp"]
        model = made(case, torch.float64)
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        given = batches(case, torch.float64, (8, 8))
        par = paceline.parallelize(model, optimizer, given, loss=case.loss, strategy=strategy)
        par.step(given[0])
        scheduler.step()
        with pytest.raises(ParallelError, match=r"beside par\.step"):
            optimizer.step()
        par.step(given[1])


def check_evaluation_uses_the_loss_weight_of_training(ranks: Ranks) -> None:
    case = CASES["transformer_tied"]
    model = made(case, torch.float64)
    given = batches(case, torch.float64, (8, 5))
    par = paceline.parallelize(model, None, given, loss=token_loss, strategy=DataParallel(), loss_weight=count_tokens)
    assert par.evaluate(given, token_loss) == par.evaluate(given, token_loss, weight=count_tokens)
    assert par.evaluate(given, token_loss) != par.evaluate(given, token_loss, weight=len)
