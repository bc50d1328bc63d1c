"""One process without a launcher equals a plain loop to the last bit; and refusals before anything starts."""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel
from tests.late import late
from tests.parallel.world import CASES

if TYPE_CHECKING:
    from torch import Tensor

torch, nn, F = late("torch"), late("torch.nn"), late("torch.nn.functional")
data, models, equality = late("torch.utils.data"), late("tests.parallel.models"), late("tests.parallel.equality")


@pytest.mark.promise("one-worker-plain-pytorch-last")
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(
    "strategy", [DataParallel(), FullyShard(), PipelineParallel(), "auto"], ids=["data", "shard", "pipe", "auto"]
)
def test_single_process_equals_plain_torch_bitwise(name: str, strategy: Any) -> None:
    one = equality.alone(models.CASES[name], dtype=torch.float32, clip_norm=0.1)
    many = equality.together(models.CASES[name], strategy, dtype=torch.float32, clip_norm=0.1)
    assert one.losses == many.losses
    for what in ("gradients", "parameters", "buffers"):
        left, right = getattr(one, what), getattr(many, what)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), what


def test_dropout_on_one_process_uses_the_callers_generator() -> None:
    model = models.Transformer(tied=True, dropout=0.5)
    plain = copy.deepcopy(model)
    x, y = models.CASES["transformer_untied"].batch(4)
    torch.manual_seed(11)
    expected = models.token_loss(plain(x), y).detach()
    par = paceline.parallelize(model, equality.adamw(model), loss=models.token_loss, strategy=DataParallel())
    torch.manual_seed(11)
    assert torch.equal(par.step((x, y)), expected)


def test_microbatches_on_one_process_equal_gradient_accumulation() -> None:
    one = equality.alone(models.CASES["cnn_batch"], microbatches=3, rows=(8, 2, 8))
    many = equality.together(models.CASES["cnn_batch"], DataParallel(), microbatches=3, rows=(8, 2, 8))
    assert one.losses == pytest.approx(many.losses, abs=1e-14)
    for key, value in one.buffers.items():
        assert torch.allclose(many.buffers[key].double(), value.double(), atol=1e-14), key


def test_training_with_recomputed_blocks_is_unchanged_if_the_model_extends_their_input_list() -> None:
    """As DenseNet's blocks hand on one list of features."""

    class Dense(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, count: int) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(3 * count), nn.Linear(3 * count, 3)

        def forward(self, features: list[Any]) -> Any:
            return self.linear(self.norm(torch.cat(features, 1)))

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Dense(count) for count in (1, 2, 3))

        def forward(self, x: Any) -> Any:
            features = [x]
            for layer in self.layers:
                features.append(layer(features))
            return features[-1]

    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    ends = []
    for again in (None, "blocks"):
        torch.manual_seed(0)
        model = Model()
        par = paceline.parallelize(model, equality.adamw(model), loss=F.cross_entropy, recompute=again)
        for _ in range(2):
            par.step((x, y))
        ends.append(par.full_state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=0)


def test_recomputed_block_may_have_any_argument_names() -> None:
    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Any, *, kind: float, block: float) -> Any:
            return self.linear(x) * kind + block

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x, kind=2.0, block=1.0)
            return x

    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    losses = []
    for again in (None, "blocks"):
        torch.manual_seed(0)
        model = Model()
        par = paceline.parallelize(model, equality.adamw(model), loss=F.cross_entropy, recompute=again)
        losses.append([float(par.step((x, y))) for _ in range(2)])
    assert losses[0] == losses[1]


def test_parallelize_keeps_the_optimizer_object_and_its_parameters() -> None:
    model = models.Mlp()
    opt = equality.adamw(model)
    params = opt.param_groups[0]["params"]
    par = paceline.parallelize(model, opt, loss=F.cross_entropy, strategy=DataParallel())
    assert par.optimizer is opt
    assert [id(param) for param in opt.param_groups[0]["params"]] == [id(param) for param in params]


def test_batch_with_total_loss_weight_zero_raises() -> None:
    model = models.Transformer(tied=True)
    par = paceline.parallelize(
        model,
        equality.sgd(model),
        loss=models.token_loss,
        loss_weight=lambda target: (target >= 0).sum(),
        strategy=DataParallel(),
    )
    with pytest.raises(ParallelError, match="sum to 0 over all replicas"):
        par.step((torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), -100)))


def test_microbatch_with_loss_weight_zero_changes_nothing() -> None:
    torch.manual_seed(0)
    x, y = models.CASES["transformer_untied"].batch(4)
    y[2:] = -100
    model = models.Transformer(tied=True)
    plain = copy.deepcopy(model)
    par = paceline.parallelize(
        model,
        equality.sgd(model),
        loss=models.token_loss,
        loss_weight=lambda target: (target >= 0).sum(),
        strategy=DataParallel(),
        microbatches=2,
    )
    loss = par.step((x, y))
    expected = models.token_loss(plain(x), y)
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    for (name, param), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert param.grad is not None
        assert own.grad is not None
        assert torch.allclose(own.grad, param.grad, atol=1e-6), name


def refused(words: str, **changed: Any) -> None:
    model = changed.pop("model", None) or models.Mlp()
    given: dict[str, Any] = {
        "model": model,
        "optimizer": equality.sgd(model),
        "loss": F.cross_entropy,
        "strategy": DataParallel(),
    }
    with pytest.raises(ParallelError, match=words):
        paceline.parallelize(**(given | changed))


def test_invalid_parallelize_arguments_are_refused() -> None:
    class Bare(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    refused("microbatches=0", microbatches=0)
    refused("clip_norm=-1", clip_norm=-1)
    refused("precision='fp8'", precision="fp8")
    refused("seed=1.5", seed=1.5)
    refused("loss='mse'", loss="mse")
    refused(r"that is the class; write CrossEntropyLoss\(\)", loss=nn.CrossEntropyLoss)

    def loss_of(model, batch):
        return model(batch[0]).mean()

    refused(r"loss=loss_of\(model, batch\): a loss gets \(output, target\): what the model has returned", loss=loss_of)
    refused(r"loss=<lambda>\(output, batch\): a loss gets .* def loss\(output, target\)", loss=lambda output, batch: 0)
    refused("optimizer=str", optimizer="adam")
    refused("can't be iterated", loader=3)
    refused("no shape yet", model=nn.Sequential(nn.LazyLinear(3)), optimizer=None)
    refused("weight has no values, and Bare does not say", model=Bare(), optimizer=None)
    refused("accumulate=0", accumulate=0)
    refused("recompute='all'", recompute="all")
    refused("no list of modules", model=nn.Linear(3, 2), optimizer=None, recompute="blocks")
    refused(r"'layers\.\*' matches no module", recompute=["layers.*"])
    refused("weights=int", weights=3)
    refused("there is neither model.safetensors.index.json", weights="/nowhere")
    refused("LBFGS", optimizer=torch.optim.LBFGS(models.Mlp().parameters()))
    refused("is not one of the model's", optimizer=equality.sgd(models.Mlp()))


def test_loader_with_a_distributed_sampler_is_refused() -> None:
    rows = data.TensorDataset(*models.CASES["mlp"].batch(8))
    refused("has a DistributedSampler", loader=data.DataLoader(rows, sampler=data.DistributedSampler(rows, 2, 0)))


def test_loss_that_is_no_tensor_is_refused() -> None:
    model = models.Mlp()
    par = paceline.parallelize(
        model,
        equality.sgd(model),
        loss=lambda output, target: F.cross_entropy(output, target, reduction="none"),
        strategy=DataParallel(),
    )
    with pytest.raises(ParallelError, match=r"a tensor of shape \[4\].*mean over the rows"):
        par.step(models.CASES["mlp"].batch(4))
    model = models.Mlp()
    par = paceline.parallelize(model, equality.sgd(model), loss=lambda output, target: 3.0, strategy=DataParallel())
    with pytest.raises(ParallelError, match="returned float"):
        par.step(models.CASES["mlp"].batch(4))


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (lambda target: target != 0, r"a tensor of shape \[4\]"),
        (lambda target: None, "NoneType"),
        (lambda target: -1, "-1"),
    ],
)
def test_invalid_loss_weight_is_refused(weight: Any, said: str) -> None:
    model = models.Mlp()
    par = paceline.parallelize(
        model, equality.sgd(model), loss=F.cross_entropy, loss_weight=weight, strategy=DataParallel()
    )
    with pytest.raises(ParallelError, match=f"the weight of a target .* is {said}; it has to be"):
        par.step(models.CASES["mlp"].batch(4))


def test_invalid_split_function_is_refused() -> None:
    model = models.Mlp()
    par = paceline.parallelize(
        model, equality.sgd(model), loss=F.cross_entropy, strategy=DataParallel(), split=lambda batch: batch
    )
    with pytest.raises(ParallelError, match=r"Parts\(args, kwargs, target\)"):
        par.step(models.CASES["mlp"].batch(4))


def test_step_without_an_optimizer_and_epoch_without_a_loader_are_refused() -> None:
    model = models.Mlp()
    par = paceline.parallelize(model, loss=F.cross_entropy, strategy=DataParallel())
    with pytest.raises(ParallelError, match="needs an optimizer"):
        par.step(models.CASES["mlp"].batch(4))
    with pytest.raises(ParallelError, match="needs a loader"):
        next(par.epoch(0))
    with pytest.raises(ParallelError, match=r"epoch\(-1\): epochs are numbered from 0"):
        next(par.epoch(-1))


def test_epoch_calls_set_epoch_of_an_iterable_dataset() -> None:
    class Stream(data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            for index in range(7):
                yield torch.full((12,), float(index + 100 * self.epoch)), torch.tensor(0)

    model = models.Mlp()
    par = paceline.parallelize(
        model,
        equality.sgd(model),
        data.DataLoader(Stream(), batch_size=3),
        loss=F.cross_entropy,
        strategy=DataParallel(),
    )
    seen = [(batch.consumed, float(batch.data[0][0, 0])) for batch in par.epoch(2)]
    assert seen == [(3, 200.0), (6, 203.0), (7, 206.0)]


def test_exhausted_iterator_as_loader_raises_in_the_second_epoch() -> None:
    model = models.Mlp()
    given = equality.batches(models.CASES["mlp"], torch.float32, (4, 4))
    par = paceline.parallelize(model, equality.sgd(model), iter(given), loss=F.cross_entropy, strategy=DataParallel())
    assert len(list(par.epoch(0))) == 2
    with pytest.raises(ParallelError, match="can be gone through once"):
        list(par.epoch(1))


def test_sample_order_depends_on_the_seed_and_not_on_the_loader_workers() -> None:
    rows = data.TensorDataset(torch.arange(9.0), torch.zeros(9))

    def order(seed: int, **options: Any) -> list[float]:
        model = models.Mlp()
        loader = data.DataLoader(rows, batch_size=4, shuffle=True, **options)
        par = paceline.parallelize(
            model, equality.sgd(model), loader, loss=F.cross_entropy, strategy=DataParallel(), seed=seed
        )
        return [float(value) for batch in par.epoch(0) for value in batch.data[0]]

    torch.manual_seed(1)
    first = order(0)
    torch.manual_seed(2)
    assert order(0) == first
    assert order(1) != first
    # This order must never change, because checkpoints hold positions in it.
    assert sorted(first) == list(range(9))
    seeded = order(0, generator=torch.Generator().manual_seed(4))
    assert seeded == order(0, generator=torch.Generator().manual_seed(4))
    assert seeded != order(0, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("clamped", [False, True])
def test_part_with_one_unmasked_target_of_loss_zero_counts(clamped: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        mask = target != -100
        losses = F.cross_entropy(output, target.clamp(min=0), reduction="none") * mask
        return losses.sum() / (mask.sum().clamp(min=1) if clamped else mask.sum())

    x = torch.tensor([40.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5])[:, None]
    for first in (1, -100)[: 1 + clamped]:
        model, target = nn.Linear(1, 2, bias=False), torch.tensor([first, -100, -100, -100, 1, 1, 1, 1])
        model.weight.data = torch.tensor([[-0.5], [0.5]])
        expected = float(loss(model(x), target).detach())
        par = paceline.parallelize(
            model, equality.sgd(model), [(x, target)], loss=loss, strategy=DataParallel(), microbatches=2
        )
        assert par.evaluate([(x, target)]) == pytest.approx(expected)
        assert float(par.step((x, target))) == pytest.approx(expected)


def test_loaded_checkpoint_resumes_its_own_order_of_samples_or_is_refused(tmp_path: Path) -> None:
    def started(length: int = 8, seed: int = 0, **options: Any) -> Any:
        model, rows = models.Mlp(), data.TensorDataset(torch.arange(float(length)), torch.zeros(length))
        loader = data.DataLoader(rows, batch_size=2, **(options or {"shuffle": True}))
        return paceline.parallelize(
            model, equality.sgd(model), loader, loss=F.cross_entropy, strategy=DataParallel(), seed=seed
        )

    def seen(batches: Any) -> list[float]:
        return [float(value) for batch in batches for value in batch.data[0]]

    whole, following = seen(started().epoch(0)), seen(started().epoch(1))
    par = started()
    par._progress = dataclasses.replace(par.progress, steps=2, consumed=4)
    par.save(tmp_path / "half")
    for options in ({"seed": 1}, {"shuffle": True, "generator": torch.Generator().manual_seed(4)}):
        other = started(**options)
        assert seen(other.epoch(0)) != whole
        other.load(tmp_path / "half")
        assert seen(other.epoch(0)) == whole[4:]
        assert seen(other.epoch(1)) == following
    for options, message in (
        (
            {"length": 10},
            "its position is of length=8, but this loader has length=10: positions of one order mean nothing",
        ),
        (
            {"shuffle": False},
            "its position is of sampler='RandomSampler', but this loader has sampler='SequentialSampler'",
        ),
    ):
        with pytest.raises(ParallelError, match=message):
            started(**options).load(tmp_path / "half")
    # A position between two epochs fits any dataset, and older checkpoints lack the order.
    par._progress = dataclasses.replace(par.progress, epoch=1, consumed=0)
    par.save(tmp_path / "whole")
    assert started(length=10).load(tmp_path / "whole")
    record = torch.load(tmp_path / "half" / "paceline.pt")
    del record["state"]["order"]
    torch.save(record, tmp_path / "half" / "paceline.pt")
    assert started(length=10).load(tmp_path / "half")


@pytest.mark.parametrize("drop_last", [False, True])
def test_users_batch_sampler_determines_the_batches(drop_last: bool) -> None:
    rows = data.TensorDataset(torch.arange(9.0), torch.zeros(9))
    loader = data.DataLoader(rows, batch_sampler=data.BatchSampler([8, 6, 4, 2, 0], 2, drop_last))
    model = models.Mlp()
    par = paceline.parallelize(model, equality.sgd(model), loader, loss=F.cross_entropy, strategy=DataParallel())
    seen = [batch.data[0].tolist() for batch in par.epoch(0)]
    assert seen == [[8, 6], [4, 2], [0]][: len(par)]
    assert len(par) == (2 if drop_last else 3)


def test_a_loss_without_a_gradient_is_refused() -> None:
    model = models.Mlp()
    par = paceline.parallelize(
        model,
        equality.sgd(model),
        loss=lambda output, target: F.cross_entropy(output, target).detach(),
        strategy=DataParallel(),
    )
    with pytest.raises(ParallelError, match="without a gradient"):
        par.step(models.CASES["mlp"].batch(4))


def test_evaluation_restores_the_mode_of_each_module() -> None:
    model = nn.Sequential(nn.Linear(12, 5), nn.Dropout(0.5), nn.BatchNorm1d(5))
    model[2].eval()
    par = paceline.parallelize(model, equality.sgd(model), loss=F.cross_entropy, strategy=DataParallel())
    seen: list[bool] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(module.training))
    par.evaluate([models.CASES["mlp"].batch(4)], F.cross_entropy)
    assert seen == [False]
    assert [part.training for part in (model, model[1], model[2])] == [True, True, False]


def test_metric_that_is_no_number_is_refused() -> None:
    par = paceline.parallelize(models.Mlp(), loss=F.cross_entropy, strategy=DataParallel())
    given = [models.CASES["mlp"].batch(4)]
    with pytest.raises(ParallelError, match=r"shape \[4\]"):
        par.evaluate(given, lambda output, target: output.argmax(1) == target)
    with pytest.raises(ParallelError, match="gave str for 'metric'"):
        par.evaluate(given, lambda output, target: "good")
    with pytest.raises(ParallelError, match="no batch"):
        par.evaluate([], F.cross_entropy)


def test_weighted_evaluation_equals_the_loss_over_all_rows() -> None:
    x, y = models.CASES["transformer_tied"].batch(7)
    model = models.Transformer(tied=True)
    par = paceline.parallelize(model, loss=models.token_loss, strategy=DataParallel())
    given = [(x[:3], y[:3]), (x[3:], y[3:])]
    found = par.evaluate(given, models.token_loss, weight=lambda target: (target != -100).sum())
    assert found == pytest.approx(float(models.token_loss(model.eval()(x), y).detach()), rel=1e-5)


def test_training_step_accepts_a_batch_of_nested_dicts_if_a_split_function_is_given() -> None:
    model = models.Mlp()
    par = paceline.parallelize(
        model,
        equality.sgd(model),
        loss=F.cross_entropy,
        strategy=DataParallel(),
        split=lambda batch: paceline.parallel.Parts((batch["data"]["x"],), {}, batch["data"]["c"]),
    )
    x, y = models.CASES["mlp"].batch(4)
    assert float(par.step({"data": {"x": x, "c": y}})) > 0


def test_auto_strategy_on_one_worker_is_data_parallel() -> None:
    model = models.Mlp()
    par = paceline.parallelize(model, equality.sgd(model), loss=F.cross_entropy)
    assert par.reason == "DataParallel(): there is one worker."
    assert repr(par) == "Parallel(Mlp, one worker, rank 0 of 1)"


def test_check_method_restores_model_weights_gradients_and_random_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    par = paceline.parallelize(
        model, equality.adamw(model), loss=F.cross_entropy, strategy=DataParallel(), microbatches=2
    )
    batch = models.CASES["mlp"].batch(5)
    state = torch.get_rng_state()
    checked = par.check(batch)
    assert "equal to the plain model" in str(checked)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert model.training


def test_check_method_refuses_a_model_that_draws_random_numbers_from_pythons_random_module() -> None:
    class Noisy(models.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            # Paceline makes torch's random numbers equal on all ranks, but can't do that for Python's.
            return super().forward(x) * (torch.rand(1) + random.random())

    model = Noisy()
    par = paceline.parallelize(model, equality.sgd(model), loss=F.cross_entropy, strategy=DataParallel())
    with pytest.raises(ParallelError, match="random numbers other than dropout's"):
        par.check(models.CASES["mlp"].batch(4))


def _trained_in_parts(loss: Any, batches: Any, *, parts: int, **options: Any) -> Any:
    model = _tanh_net()
    par = paceline.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        strategy=DataParallel(),
        accumulate=parts,
        **options,
    )
    for batch in batches:
        par.step(batch)
    return par


def _tanh_net() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _rows(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 4, (8,))) for _ in range(count)]


def test_accumulation_with_unequal_numbers_of_ignored_targets_equals_the_whole_batch() -> None:
    batches = _rows()
    batches[1][1][:3] = -100
    batches[2][1][:4] = -100
    ends = [_trained_in_parts(F.cross_entropy, batches, parts=parts).full_state_dict() for parts in (1, 2, 4)]
    for end in ends[1:]:
        for name, value in ends[0].items():
            assert float((value - end[name]).abs().max()) < 1e-12, name


def _root(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, F.one_hot(target, 4).double()).sqrt()


def _in_batch(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


def _dice(output: Tensor, target: Tensor) -> Tensor:
    found, wanted = output.softmax(-1), F.one_hot(target, 4)
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum() + (found.square()).sum())


def _focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


@pytest.mark.promise("loss-over-targets-count-weighted")
@pytest.mark.parametrize("name", ["root", "in_batch", "dice"])
def test_non_mean_loss_is_refused_with_accumulation(name: str) -> None:
    loss = {"root": _root, "in_batch": _in_batch, "dice": _dice}[name]
    with pytest.raises(ParallelError, match=r"is not a mean over rows.*accumulate=1.*check='off'"):
        _trained_in_parts(loss, _rows(1), parts=2)
    _trained_in_parts(loss, _rows(1), parts=2, check="off")
    _trained_in_parts(loss, _rows(1), parts=1)


#: Losses of an output `o`, of classes `c` (some are masked), and of numbers `t` between 0 and 1.
MEANS: dict[str, Any] = {
    "focal": lambda o, c, t: _focal(o, c.clamp(min=0)),
    "focal by positives": lambda o, c, t: (F.cross_entropy(o, c, reduction="none") * (c > 0)).sum() / (c > 0).sum(),
    "two terms with one mask": lambda o, c, t: (
        F.cross_entropy(o, c) + 0.5 * F.cross_entropy(-o, c, label_smoothing=0.1)
    ),
    "sum by its count": lambda o, c, t: F.cross_entropy(o, c, reduction="sum") / (c >= 0).sum(),
    "chosen": lambda o, c, t: -o.log_softmax(-1).gather(1, c.clamp(min=0)[:, None])[c >= 0].mean(),
    "weighted": lambda o, c, t: (F.mse_loss(o, t, reduction="none") * t).sum() / t.sum(),
    "chosen numbers": lambda o, c, t: F.huber_loss(o[t > 0.5], t[t > 0.5]),
    "likelihood and divergence": lambda o, c, t: F.mse_loss(o, t, reduction="sum") / len(o) + 0.1 * o.square().mean(),
    "sum by numbers and rows": lambda o, c, t: F.mse_loss(o, t, reduction="sum") / 4 / len(o),
    "soft targets": lambda o, c, t: F.kl_div(o.log_softmax(-1), t.softmax(-1), reduction="batchmean") * 4,
    "dice of each row": lambda o, c, t: (1 - 2 * (o.sigmoid() * t).sum(-1) / (o.sigmoid() + t).sum(-1)).mean(),
    "critic": lambda o, c, t: o.mean() - t.mean(),
    "margin": lambda o, c, t: F.triplet_margin_loss(o, t, t.flip(1)),
}


@pytest.mark.parametrize("name", list(MEANS))
def test_mean_losses_over_uneven_microbatches_equal_the_whole_batch(name: str) -> None:
    torch.manual_seed(4)
    x, classes, numbers = torch.randn(8, 6).double(), torch.randint(0, 4, (8,)), torch.rand(8, 4).double()
    classes[:2] = -100

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return MEANS[name](output, *target)  # type: ignore[no-any-return]

    ends = [
        _trained_in_parts(
            loss, [(x, classes, numbers)] * 2, parts=parts, split=lambda b: paceline.parallel.Parts(b[:1], {}, b[1:])
        ).full_state_dict()
        for parts in (1, 3)
    ]
    assert all(float((value - ends[1][key]).abs().max()) < 1e-12 for key, value in ends[0].items())


@pytest.mark.promise("loss-over-targets-count-weighted")
def test_loss_that_stops_being_a_mean_after_the_first_step_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return _root(output, target.clamp(min=0)) if (target < 0).any() else F.cross_entropy(output, target)

    batches = _rows(2)
    batches[1][1][::4] = -100
    with pytest.raises(ParallelError, match="is not a mean over rows"):
        _trained_in_parts(loss, batches, parts=2)


def test_verifying_a_mean_loss_adds_no_calls_of_the_loss_function() -> None:
    seen: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(output))
        return F.cross_entropy(output, target) / len(seen)

    _trained_in_parts(loss, _rows(3), parts=2)
    assert seen == [4] * 6


def _two_heads(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of two heads. All targets of the first head count."""
    return F.cross_entropy(output, target.clamp(min=0)), F.cross_entropy(-output, target)


def _learned() -> Tensor:
    return torch.exp(-torch.full((), 0.3, dtype=torch.float64, requires_grad=True))


#: Losses of an output and classes (some are masked) that combine numbers, so that the graph shows no single count.
COMBINED: dict[str, Any] = {
    "sum": lambda o, c: sum(_two_heads(o, c)),
    "stack": lambda o, c: torch.stack(_two_heads(o, c)).mean(),
    "learned factor": lambda o, c: _learned() * F.cross_entropy(o, c),
    "learned factor of a chosen mean": lambda o, c: _learned() * o[c >= 0].square().mean(),
    "learned factor and sum": lambda o, c: _two_heads(o, c)[0] + _learned() * F.cross_entropy(o, c),
}


@pytest.mark.parametrize("name", list(COMBINED))
def test_combined_losses_are_refused_in_the_first_batch_with_masked_targets(name: str) -> None:
    """Not only in the steps in which all losses are checked: the third step is none."""
    batches = _rows(4)
    _trained_in_parts(COMBINED[name], batches, parts=2)
    batches[2][1][:3] = -100
    with pytest.raises(ParallelError, match=r"terms means over the same targets|is not a mean over rows"):
        _trained_in_parts(COMBINED[name], batches, parts=2)


#: Losses of an output `o` and classes `c` that are means over rows or targets, though a graph shows it in a roundabout way.
ROUNDABOUT: dict[str, Any] = {
    "mean of a number": lambda o, c: F.cross_entropy(o, c).mean().sum(),
    "mean over chosen numbers": lambda o, c: o[c >= 0].square().mean().mean(),
    "stack of rows": lambda o, c: torch.stack([F.cross_entropy(o[i], c[i].clamp(min=0)) for i in range(len(o))]).mean(),
    "mean over rows and a small parameter": lambda o, c: (
        o.square().sum(1).mean() + torch.ones(3, dtype=torch.float64, requires_grad=True).square().mean()
    ),
    "two means of the same targets": lambda o, c: F.cross_entropy(o, c) + 0.5 * F.cross_entropy(-o, c),
}


@pytest.mark.parametrize("name", list(ROUNDABOUT))
def test_roundabout_means_over_uneven_microbatches_equal_the_whole_batch(name: str) -> None:
    batches = _rows(3)
    batches[2][1][:3] = -100
    ends = [_trained_in_parts(ROUNDABOUT[name], batches, parts=parts) for parts in (1, 3)]
    one, many = (end.full_state_dict() for end in ends)
    assert all(float((value - many[key]).abs().max()) < 1e-12 for key, value in one.items())
    if name == "mean of a number":
        x, y = (torch.cat(values) for values in zip(*batches, strict=True))
        assert ends[1].evaluate(batches) == pytest.approx(float(F.cross_entropy(ends[1].module(x), y).detach()))


def test_evaluation_refuses_a_loss_that_hides_unequal_numbers_of_targets() -> None:
    batches = _rows(1)
    par = _trained_in_parts(COMBINED["stack"], batches, parts=2)
    batches[0][1][:3] = -100
    with pytest.raises(ParallelError, match=r"is not a mean over rows.*: weight=lambda"):
        par.evaluate(batches)


def _hinge(output: Tensor, target: Tensor) -> Tensor:
    return F.relu(1 - output[:, :1] * target).sum() / len(target)


def _margins(output: Tensor, target: Tensor) -> Tensor:
    return F.relu(1 - output * target).sum() / len(target)


def _left_out(kind: str) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        mask = target[:, 0] > 0
        losses = F.relu(1 + output[:, 0])
        ignored = torch.where(mask, 0, -100)
        kept = {
            "fill": lambda: losses.masked_fill(~mask, 0.0).sum(),
            "where": lambda: torch.where(mask, losses, 0.0).sum(),
            "index": losses[mask].sum,
            "select": lambda: losses.masked_select(mask).sum(),
            "factor": (losses * mask).sum,
            "dot": lambda: losses.dot(mask.double()),
            "ignored": lambda: F.cross_entropy(output, ignored, reduction="none").sum(),
            "ignored sum": lambda: F.cross_entropy(output, ignored, reduction="sum"),
            "weight": lambda: F.binary_cross_entropy_with_logits(
                output[:, 0], losses.detach().sigmoid(), mask.double(), reduction="sum"
            ),
        }[kind]()
        return kept / mask.sum().clamp(min=1)

    return loss


@pytest.mark.parametrize(
    "name",
    ["hinge", "margins", "fill", "where", "index", "select", "factor", "dot", "ignored", "ignored sum", "weight"],
)
def test_part_of_one_row_with_loss_zero_counts_unless_a_mask_leaves_it_out(name: str) -> None:
    loss = {"hinge": _hinge, "margins": _margins}.get(name) or _left_out(name)
    x = torch.tensor([[5.0], [0.2]], dtype=torch.float64)
    target = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    ends, losses = [], []
    for parts in (1, 2):
        model = nn.Linear(1, 2).double()
        model.weight.data, model.bias.data = torch.tensor([[-1.0], [-1.0]]).double(), torch.zeros(2).double()
        par = paceline.parallelize(
            model, equality.sgd(model), [(x, target)], loss=loss, strategy=DataParallel(), accumulate=parts
        )
        losses.append([par.evaluate([(x, target)]), float(par.step((x, target)))])
        ends.append(par.full_state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert all(torch.allclose(value, ends[1][key], atol=1e-12) for key, value in ends[0].items())


@pytest.mark.parametrize("kind", ["map", "iterable", "list"])
def test_resumed_epoch_of_one_process_draws_the_numbers_of_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    class Rows(data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            return ((x + torch.randn(12), y) for x, y in zip(*rows.tensors, strict=True))

    torch.manual_seed(2)
    rows = data.TensorDataset(torch.randn(16, 12), torch.randint(0, 5, (16,)))

    def started() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 5))
        whole = [(x[None], y[None]) for x, y in zip(*rows.tensors, strict=True)]
        loader = {
            "map": lambda: data.DataLoader(rows, batch_size=4, shuffle=True),
            "iterable": lambda: data.DataLoader(Rows(), batch_size=4),
            "list": lambda: whole,
        }[kind]()
        return paceline.parallelize(model, equality.sgd(model), loader, loss=F.cross_entropy, strategy=DataParallel())

    par, losses = started(), []
    for number, batch in enumerate(par.epoch(0)):
        losses.append(float(par.step(batch)))
        if number == 1:
            par.save(tmp_path / "half")
    other = started()
    other.load(tmp_path / "half")
    assert [float(other.step(batch)) for batch in other.epoch(0)] == losses[2:]


def test_embedding_with_scale_grad_by_freq_is_refused_with_accumulation() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ParallelError, match=r"0 divides gradients by how often .*scale_grad_by_freq=True"):
        paceline.parallelize(model, optimizer, loss=F.cross_entropy, strategy=DataParallel(), accumulate=2)
    paceline.parallelize(model, optimizer, loss=F.cross_entropy, strategy=DataParallel())


def test_accumulation_warns_if_the_users_loss_compares_rows_of_a_batch_with_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Contrastive(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, compares: bool) -> None:
            super().__init__()
            self.net, self.norm, self.compares = _tanh_net(), nn.BatchNorm1d(6).double(), compares

        def forward(self, x: Tensor, y: Tensor) -> Any:
            output = self.net(self.norm(x))
            return (_in_batch(output, y) if self.compares else F.cross_entropy(output, y), output)

    for compares in (False, True):
        model = Contrastive(compares)
        par = paceline.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2, strategy=DataParallel()
        )
        par.step(_rows(1)[0])
        lines = [line for line in caplog.messages if "each microbatch is trained by itself" in line]
        assert len(lines) == compares
