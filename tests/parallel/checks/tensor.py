"""Layers cut over the ranks: equal to one process, ties kept, and what would be wrong without a word is seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, TensorParallel
from paceline.parallel.reduce import local
from paceline.parallel.tensor import cutting as tensor
from paceline.parallel.tensor.check import Reference
from tests.parallel.equality import adamw, alone, assert_equal, batches, made, sgd, together, whole
from tests.parallel.models import CASES, RISKIEST, SHALLOW, Case, dropping, on, plain_tokens, token_loss

SIZES = (2, 4)

# The largest allowed differences. FLOAT32 is twice the largest rounding difference that was measured (1e-7 to 2e-6).
# Checks with optimizer steps use float64.
FLOAT32, FLOAT64 = 5e-6, 1e-10


def layouts(ranks: Any) -> list[Any]:
    return (
        [TensorParallel(2)]
        if ranks.size == 2
        else [TensorParallel(4), DataParallel(2) @ TensorParallel(2), FullyShard(2) @ TensorParallel(2)]
    )


def check_tensor_parallel_loss_and_gradients_equal_one_process(ranks: Any) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "rows": (8,), "optimizer": sgd, "microbatches": 2}
    cases = on(ranks.size, SHALLOW)
    for case in ranks.cells([case for case in cases if case.name in RISKIEST], cases):
        one = alone(case, **options)
        for layout in layouts(ranks):
            many = together(case, layout, check="first" if ranks.size == 2 else "off", **options)
            assert_equal(one, many, loss=FLOAT32, gradient=FLOAT32)


def check_tensor_parallel_adamw_steps_equal_one_process(ranks: Any) -> None:
    # Don't split these batches into microbatches, because the check above covers microbatches.
    few: dict[str, Any] = {"rows": (8, 7, 5), "clip_norm": 0.05}
    whole = [(case, layouts(ranks)) for case in on(ranks.size, SHALLOW)]
    covering = whole
    if ranks.size == 4:
        alone_, data, shard = layouts(ranks)
        covering = [
            *((SHALLOW["transformer_tied"], [shard]), (SHALLOW["cnn_batch"], [data])),
            (SHALLOW["long_skip"], [alone_]),
        ]
    for case, several in ranks.cells(covering, whole):
        # Train five steps with the models in which rounding errors are most likely to grow. Two workers are enough,
        # because more workers compute the same.
        is_first = ranks.size == 2 and case.name in RISKIEST
        options = few | {"rows": (8, 8, 7, 8, 5)} if is_first or ranks.is_whole else few
        one = alone(case, **options)
        for layout in several:
            many = together(case, layout, check="first" if is_first else "off", **options)
            assert_equal(one, many, loss=FLOAT64, gradient=FLOAT64, parameter=FLOAT64, buffer=FLOAT64)


def check_each_rank_holds_only_its_tensor_shards(ranks: Any) -> None:
    par, _ = trained(SHALLOW["transformer_untied"], TensorParallel())
    sizes = {name: tensor.size for name, tensor in local_sizes(par).items()}
    assert sizes["blocks.0.up.weight"] * ranks.size == 16 * 64
    assert sizes["blocks.0.q.weight"] * ranks.size == 16 * 16
    for param in par.executor.named_parameters().values():
        # A shard that is a view would keep the whole parameter in memory.
        part = local(param.detach())
        assert part.untyped_storage().nbytes() == part.nbytes
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, sizes["tok.weight"])
    assert sum(everyone) == 17 * 16, "a vocabulary that the ranks don't divide is spread all the same"


def check_explain_lists_the_split_layers(ranks: Any) -> None:
    par, _ = trained(SHALLOW["transformer_untied"], TensorParallel())
    text = par.explain()
    assert "colwise: blocks.{0..1}.up" in text, text
    assert "rowwise: blocks.{0..1}.down" in text, text
    assert f"blocks.{{0..1}}.heads is divided by {ranks.size} on each rank" in text, text


class Size:
    def __init__(self, size: int) -> None:
        self.size = size


def local_sizes(par: Any) -> dict[str, Size]:
    named = par.executor.named_parameters().items()
    return {name: Size((p.to_local() if hasattr(p, "to_local") else p).numel()) for name, p in named}


def trained(case: Case, strategy: Any, steps: int = 1, **options: Any) -> tuple[Any, list[float]]:
    model = made(case, torch.float64)
    given = batches(case, torch.float64, (8,) * steps)
    options = {"check": "off"} | options
    par = paceline.parallelize(model, adamw(model), given, loss=case.loss, strategy=strategy, **options)
    return par, [float(par.step(batch)) for batch in given]


def check_dropout_is_the_same_on_all_tensor_ranks(ranks: Any) -> None:
    """Facts #11: ranks with streams of their own would go apart, and every loss would look well."""
    case = dropping(0.3)
    par, losses = trained(case, TensorParallel(), steps=2)
    with torch.no_grad():
        first = float(token_loss(made(case, torch.float64).eval()(plain(case)[0]), plain(case)[1]))
    assert abs(losses[0] - first) > 1e-4, "nothing was dropped"
    for name, param in par.executor.named_parameters().items():
        if hasattr(param, "to_local"):
            continue
        others = [torch.empty_like(param) for _ in range(ranks.size)]
        dist.all_gather(others, param.detach())
        assert all(torch.equal(others[0], other) for other in others), name


def plain(case: Case) -> tuple[Any, ...]:
    return batches(case, torch.float64, (8,))[0]


def check_broken_weight_tie_is_detected_before_training(ranks: Any) -> None:
    """Facts #10: parallelize_module breaks ties; losses stay right, gradients do not. The check says so before training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "tie_again", lambda model, ties: None)
        with pytest.raises(ParallelError, match=r"the gradient of 'tok\.weight'"):
            tensor.apply(*arguments(ranks))


def check_without_the_weight_tie_gradients_differ(ranks: Any) -> None:
    """The mutation of the equality above: were it not for the tie and the check, gradients would be off."""
    case, options = CASES["transformer_tied"], {"rows": (8,), "optimizer": sgd}
    one = alone(case, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "tie_again", lambda model, ties: None)
        patch.setattr(Reference, "verify", lambda *arguments: None)
        many = together(case, TensorParallel(), check="off", **options)
    assert abs(one.losses[0] - many.losses[0]) < 1e-9
    off = float((many.gradients["tok.weight"] - one.gradients["tok.weight"]).abs().max())
    assert off > 1e-3, "the tie had no part in it"


def arguments(ranks: Any, model: nn.Module | None = None, plan: Any = None) -> tuple[Any, ...]:
    """What `tensor.apply` is called with for a model of tokens."""
    from paceline.parallel import mesh, strategy, tied_parameters
    from paceline.parallel.batches.batch import Microbatch

    model = made(CASES["transformer_tied"], torch.float64) if model is None else model
    world = mesh.build(mesh.start(), strategy.resolve(TensorParallel(), ranks.size))
    x, y = plain(CASES["transformer_untied"])
    micro = Microbatch((x,), {}, y, len(x), torch.tensor(1.0, dtype=torch.float64), 0, len(x))
    return model, world, plan, tied_parameters.find(model), micro


class Careless(nn.Module):
    """The output of `up` depends on the number of features: with a part of them the result differs."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(17, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.up(self.tok(tokens))
        return self.down(x - x.mean(-1, keepdim=True))


def check_wrong_split_is_detected_and_its_module_named(ranks: Any) -> None:
    """Were a pair cut that can't be, the check before training would name the module behind it."""
    from paceline.parallel.tensor.groups import Group
    from paceline.parallel.tensor.plan import TensorPlan

    plan = TensorPlan(placements={"up": "colwise", "down": "rowwise"}, groups=(Group(columns=("up",), row="down"),))
    torch.manual_seed(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "find_plan", lambda *given: plan)
        with pytest.raises(ParallelError, match="the output of 'down' differs"):
            tensor.apply(*arguments(ranks, Careless().double()))
    # Without the patch, TensorParallel splits no pair of layers of this model.
    model = Careless().double()
    applied = tensor.apply(*arguments(ranks, model))
    assert not applied.plan.groups


def check_plan_table_training_equals_one_process(ranks: Any) -> None:
    """Also an odd table: a part of an attention, rows without columns, an embedding by its width."""
    case, options = SHALLOW["transformer_untied"], {"rows": (8, 8)}
    one = alone(case, **options)
    tables: list[dict[str, str]] = [
        {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
        {"blocks.0.[qv]": "colwise", "blocks.*.down": "rowwise", "tok": "colwise", "head": "rowwise"},
        {"blocks.1.q": "replicate", "blocks.*.[qkv]": "colwise", "blocks.*.o": "rowwise", "pos": "vocab"},
    ]
    for table in tables:
        assert_equal(
            one,
            together(case, TensorParallel(plan=table), **options),
            loss=FLOAT64,
            gradient=FLOAT64,
            parameter=FLOAT64,
        )


def check_tensor_parallel_evaluation_and_state_equal_one_process(ranks: Any) -> None:
    case = SHALLOW["transformer_tied"]
    par, _ = trained(case, TensorParallel(), steps=2, loss_weight=case.loss_weight)
    given = batches(case, torch.float64, (8, 3), seed=11)
    found = par.evaluate(given, token_loss, weight=case.loss_weight)
    model = made(case, torch.float64, seed=9)
    model.load_state_dict(par.full_state_dict())
    assert model.head.weight is model.tok.weight
    weights = [case.loss_weight(y) for _, y in given]
    with torch.no_grad():
        expected = sum(float(token_loss(model(x), y)) * w for (x, y), w in zip(given, weights, strict=True)) / sum(
            weights
        )
    assert abs(found - expected) < FLOAT64
    assert torch.equal(whole(par.executor.named_parameters()["tok.weight"]).detach(), model.tok.weight.detach())


def check_torch_transformer_encoder_is_split_and_equals_one_process(ranks: Any) -> None:
    """Its attention uses weights without calling their layers and stays whole; its linear layers are cut."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    case = Case(
        name="encoder",
        make=lambda: nn.Sequential(nn.Embedding(17, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 17)),
        batch=plain_tokens,
        loss=token_loss,
    )
    options: dict[str, Any] = {"rows": (8, 8), "optimizer": sgd}
    one, many = alone(case, **options), together(case, TensorParallel(), **options)
    assert_equal(one, many, loss=FLOAT64, gradient=FLOAT64, parameter=FLOAT64)


def check_in_place_activation_between_split_layers_equals_one_process(ranks: Any) -> None:
    case = Case(
        name="in place",
        make=lambda: nn.Sequential(
            nn.Embedding(17, 16), nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.ReLU(inplace=True)
        ),
        batch=plain_tokens,
        loss=lambda output, target: output.square().mean() + target.sum() * 0.0,
    )
    options: dict[str, Any] = {"rows": (8, 8), "optimizer": sgd}
    one, many = alone(case, **options), together(case, TensorParallel(), **options)
    assert_equal(one, many, loss=FLOAT64, gradient=FLOAT64, parameter=FLOAT64)


def check_only_rank_0_computes_the_plan(ranks: Any) -> None:
    """On another machine a trial may differ a little; with two plans the ranks would wait for ever."""

    def nothing(*arguments: Any) -> Any:
        raise AssertionError("only the first rank tries")

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank:
            patch.setattr(tensor, "find_plan", nothing)
        trained(CASES["mlp"], TensorParallel())
    with pytest.raises(ParallelError, match="is the name of no module"):
        trained(CASES["mlp"], TensorParallel(plan={"nowhere": "colwise"}))


class AtLeast(nn.Module):
    """Computes batches of four rows or more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SHALLOW["transformer_untied"].make()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert len(tokens) >= 4
        return self.inner(tokens)


def check_model_that_needs_many_rows_is_planned_with_the_whole_batch(ranks: Any) -> None:
    case = Case(name="at least", make=AtLeast, batch=plain_tokens, loss=token_loss)
    options: dict[str, Any] = {"rows": (8,), "optimizer": sgd}
    assert_equal(alone(case, **options), together(case, TensorParallel(), **options), loss=FLOAT64, gradient=FLOAT64)


class Auxiliary(nn.Module):
    """Has heads that only training sees, as GoogLeNet; dropout, a layer left out at random, and normalisation over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.norm, self.drop = nn.BatchNorm1d(12), nn.Dropout(0.5)
        self.head, self.other = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x + self.down(self.drop(torch.relu(self.up(x)))))
        if not self.training:
            return self.head(h)
        if torch.rand(()) > 0.9:
            h = h * 2
        return {"output": self.head(h), "auxiliary": self.other(h)}


def _with_auxiliary(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["output"], target) + 0.3 * F.cross_entropy(output["auxiliary"], target)


class Narrow(nn.Module):
    """Computes in bfloat16, or normalises over the batch by hand."""

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self.narrow = narrow
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(4))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            for block in self.blocks:
                x = x + block(x)
                if not self.narrow:
                    x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-12).sqrt()
        return self.head(x.to(self.head.weight.dtype))


class Wrong(Narrow):
    """Computes something else once it is cut: a part of what the columns give, as if it were the whole."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.3 * float(type(self.blocks[0][0].weight) is not nn.Parameter)


def _tensor_of(model: nn.Module, batch: Any, loss: Any = F.cross_entropy) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.parallelize(model, optimizer, [batch], loss=loss, strategy=TensorParallel())


def check_planning_runs_the_model_in_its_training_mode(ranks: Any, sizes: Any = (2,)) -> None:
    """Regression: planning ran the model in evaluation mode, in which this model returns another result, so the loss
    raised an AttributeError."""
    torch.manual_seed(3)
    model = Auxiliary().double()
    batch = torch.randn(8, 12, dtype=torch.float64), torch.randint(0, 5, (8,))
    for mode in (True, False):
        spread = copy.deepcopy(model).train(mode)
        before = copy.deepcopy(spread.state_dict())
        par = _tensor_of(spread, batch, _with_auxiliary if mode else F.cross_entropy)
        assert "colwise: up" in par.explain()
        # The trial run for the plan has changed neither statistics nor training modes.
        after = par.full_state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert all(part.training == mode for part in spread.modules())
        par.step(batch)
        assert "equal to the plain model" in par.compared, par.compared


def check_large_rounding_errors_of_a_model_are_accepted(ranks: Any, sizes: Any = (2,)) -> None:
    """Regression: models that use autocast in their forward, or normalise over the batch without a BatchNorm layer,
    were refused."""
    batch = torch.randn(8, 12), torch.randint(0, 5, (8,))
    for narrow in (True, False):
        torch.manual_seed(3)
        model = Narrow(narrow=narrow)
        model, own = (model, batch) if narrow else (model.double(), (batch[0].double(), batch[1]))
        par = _tensor_of(model, own)
        par.step(own)
        assert "equal to the plain model" in par.compared, par.compared
    for narrow in (True, False):
        torch.manual_seed(3)
        with pytest.raises(ParallelError, match=r"cut by TensorParallel\(\) is not the plain one: the output of"):
            _tensor_of(Wrong(narrow=narrow), batch)
