"""A model cut into stages equals one that accumulates over the same microbatches in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import FullyShard, PipelineParallel
from tests.parallel.equality import alone, assert_equal, batches, made, sgd, together
from tests.parallel.models import CASES, RISKIEST, SHALLOW, Case, LongSkip, Mlp, on, token_loss, vectors
from tests.parallel.pipelines import (
    EXACT,
    assert_refused,
    combined,
    fits,
    parallel,
    pipelines,
)
from tests.parallel.world import Ranks

SIZES = (2, 4)


def check_pipeline_training_of_every_model_equals_one_process(ranks: Ranks) -> None:
    layouts = (*pipelines(ranks.size), *combined(ranks.size))
    if ranks.size == 2:
        options: dict[str, Any] = {}
        grid = ranks.grid(on(2, SHALLOW), layouts, with_all=("transformer_tied",))
    else:
        # 4 microbatches of 7 rows have 2, 2, 2 and 1 rows. A batch of 2 rows has 2 microbatches, fewer than there are stages.
        options = {"rows": (7, 2, 9), "clip_norm": 0.05}
        # `make test` leaves out the first two layouts: checks on two workers cover GPipe, the check below covers values
        # that skip stages, and the checkpoint checks cover four stages.
        _, _, interleaved, data, shard = layouts
        covering = [
            (CASES["cnn_batch"], [data]),
            (CASES["transformer_tied"], [interleaved]),
            (SHALLOW["transformer_tied"], [shard]),
        ]
        grid = ranks.cells(covering, [(case, list(layouts)) for case in on(4)])
    for case, several in grid:
        own = {"rows": (8,) * 5} | options if case.name in RISKIEST else options
        one = alone(case, microbatches=4, **own)
        check = "first" if ranks.size == 2 and case.name in RISKIEST else "off"
        for strategy in several:
            if fits(case, strategy, ranks.size):
                assert_equal(one, together(case, strategy, microbatches=4, check=check, **own), **EXACT)


def check_skip_connection_over_eight_stages_equals_one_process(ranks: Ranks, sizes: tuple[int, ...] = (4,)) -> None:
    # The models of `CASES` have too few blocks for eight stages.
    long_skip = Case(name="long_skip", make=lambda: LongSkip(depth=7), batch=vectors)
    whole = (Case(name="mlp", make=lambda: Mlp(depth=7), batch=vectors), long_skip)
    for case in ranks.cells((long_skip,), whole):
        many = together(case, PipelineParallel(schedule="interleaved"), microbatches=4)
        assert_equal(alone(case, microbatches=4), many, **EXACT)


def check_float32_pipeline_training_stays_close_to_one_process(ranks: Ranks) -> None:
    cases = on(ranks.size, SHALLOW)
    for case in ranks.cells([case for case in cases if case.name in RISKIEST], cases):
        one = alone(case, dtype=torch.float32, microbatches=4, rows=(8,), optimizer=sgd)
        # One model is enough for all schedules: the float64 checks show that the schedule does not change the numbers.
        all_schedules = case.name == "transformer_tied" and ranks.size == 2 and ranks.is_whole
        own = pipelines(2) if all_schedules else [PipelineParallel(ranks.size)]
        for strategy in (*own, *combined(ranks.size)):
            if fits(case, strategy, ranks.size):
                options = {"dtype": torch.float32, "microbatches": 4, "rows": (8,), "optimizer": sgd}
                many = together(case, strategy, check="first" if ranks.size == 2 else "off", **options)
                assert_equal(one, many, loss=5e-6, gradient=5e-6, parameter=5e-6, buffer=5e-6)


def check_batches_of_any_size_equal_one_process(ranks: Ranks) -> None:
    # 4 microbatches of 7 rows have 2, 2, 2 and 1 rows. A batch of 2 rows has only 2 microbatches.
    rows = (7, 2, 9)
    for name in ("cnn_batch", "transformer_tied"):
        one = alone(CASES[name], microbatches=4, rows=rows)
        # The tied transformer runs on few layouts here, because the code below trains it with the interleaved schedule.
        all_layouts = (PipelineParallel(ranks.size), *combined(ranks.size))
        for strategy in all_layouts if name == "cnn_batch" else ranks.cells((), all_layouts):
            assert_equal(one, together(CASES[name], strategy, microbatches=4, rows=rows), **EXACT)
    one = alone(CASES["transformer_tied"], microbatches=4, rows=rows)
    many = together(
        CASES["transformer_tied"], PipelineParallel(ranks.size, schedule="interleaved"), microbatches=4, rows=rows
    )
    assert_equal(one, many, **EXACT)


class Skips(nn.Module):
    """The tensor that crosses its cuts depends on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 12), nn.Linear(12, 5)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        skip = torch.sigmoid(h) if len(x) > 1 else None
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h if skip is None else h * skip)


def check_stages_may_pass_other_values_in_each_microbatch(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    # 4 microbatches of 7 rows have 2, 2, 2 and 1 rows.
    case = Case(name="skips", make=Skips, batch=vectors)
    one = alone(case, microbatches=4, rows=(8, 7))
    for schedule in ("1f1b", "interleaved"):
        assert_equal(one, together(case, PipelineParallel(schedule=schedule), microbatches=4, rows=(8, 7)), **EXACT)


def check_gradients_are_clipped_by_the_norm_of_all_stages(ranks: Ranks) -> None:
    for name in ranks.cells(("transformer_tied",), ("mlp", "transformer_tied")):
        one = alone(SHALLOW[name], microbatches=4, clip_norm=0.05)
        for strategy in (PipelineParallel(ranks.size), *combined(ranks.size)):
            assert_equal(one, together(SHALLOW[name], strategy, microbatches=4, clip_norm=0.05), **EXACT)


def check_batches_of_other_sequence_lengths_equal_one_process(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = SHALLOW["transformer_untied"]
    one, many = made(case, torch.float64), made(case, torch.float64)
    par = parallel(many, PipelineParallel(ranks.size), case)
    optimizer = sgd(one)
    for time in (8, 5, 8, 3):
        tokens, target = (part[:, :time] for part in batches(case, torch.float64, (8,), seed=time)[0])
        optimizer.zero_grad()
        whole = torch.zeros(())
        for x, y in zip(tokens.tensor_split(4), target.tensor_split(4), strict=True):
            loss = token_loss(one(x), y) / 4
            loss.backward()
            whole = whole + loss.detach()
        optimizer.step()
        assert abs(float(par.step((tokens, target))) - float(whole)) < 1e-11


class Looks(nn.Module):
    """A block that looks at values: it can't be traced on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > -1e9 else x


def check_block_that_reads_tensor_values_is_trained_with_one_shape(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = Case(
        name="looks", make=lambda: nn.Sequential(nn.Linear(12, 12), Looks(), Looks(), nn.Linear(12, 5)), batch=vectors
    )
    one = alone(case, microbatches=4, rows=(8, 8))
    assert_equal(one, together(case, PipelineParallel(), microbatches=4, rows=(8, 8)), **EXACT)
    par = parallel(made(case, torch.float64), PipelineParallel(), case)
    given = batches(case, torch.float64, (8, 4))
    par.step(given[0])
    par.evaluate(given[:1], F.cross_entropy)
    par.step(given[0])
    assert_refused(lambda: par.step(given[1]), "can't run on shapes alone", "drop_last=True")


class Many(nn.Module):
    """Two inputs and a keyword, values of all kinds that cross cuts, a dict as output, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.head, self.unused = nn.Linear(12, 5), nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(12.0), persistent=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, other: Tensor, *, keep: Tensor, times: int = 2) -> dict[str, Any]:
        h = torch.relu_(self.first(x))
        chosen = h.argmax(-1)
        # `skip` is not contiguous, and its first dimension is not the number of rows.
        skip = (self.second(other) * self.scale).t()
        early = h * 2
        for block in self.blocks:
            h = torch.tanh(block(h)) * keep + self.table / 12
        # `early` crosses the cut here, but no rank computes a gradient for it.
        h = h + skip.t() * (chosen > 3)[:, None] * times + early.detach()
        return {"logits": self.head(h) * self.scale, "aux": (h.square().mean(), chosen)}


def many_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], target) + 0.1 * output["aux"][0]


def check_inputs_and_outputs_of_any_type_equal_one_process(ranks: Ranks) -> None:
    torch.manual_seed(2)
    batch = {
        "x": torch.randn(8, 12).double(),
        "other": torch.randn(8, 12).double(),
        "keep": torch.rand(8, 1) > 0.3,
        "labels": torch.randint(0, 5, (8,)),
    }
    one = Many().double()
    many = copy.deepcopy(one)
    for index in range(4):
        part = {name: value[2 * index : 2 * index + 2] for name, value in batch.items()}
        (many_loss(one(**{k: v for k, v in part.items() if k != "labels"}), part["labels"]) / 4).backward()
    expected = {name: param.grad for name, param in one.named_parameters()}
    for strategy in (*pipelines(ranks.size), *combined(ranks.size)):
        if getattr(strategy, "schedule", "") == "interleaved" and ranks.size == 4:
            continue
        model = copy.deepcopy(many)
        par = paceline.parallelize(
            model, sgd(model), [batch], loss=many_loss, strategy=strategy, microbatches=4, sample=batch
        )
        par.step(batch)
        for name, param in par.executor.named_parameters().items():
            grad = getattr(param.grad, "full_tensor", lambda own=param.grad: own)()
            if expected[name] is None:
                assert grad is None or not grad.any(), name
            else:
                assert (grad - expected[name]).abs().max() < 1e-12, name
        held: list[Any] = [None] * ranks.size
        torch.distributed.all_gather_object(held, list(par.executor.named_parameters()))
        assert set().union(*held) == set(expected)


def check_pipeline_with_frozen_stages_equals_one_process(ranks: Ranks) -> None:
    case = CASES["mlp"]

    def freeze(model: nn.Module) -> nn.Module:
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(("blocks.3", "last")))
        return model

    def trained(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])

    one = alone(case, microbatches=4, model=freeze(made(case, torch.float64)), optimizer=trained)
    for strategy in (PipelineParallel(ranks.size), *combined(ranks.size)):
        model = freeze(made(case, torch.float64))
        assert_equal(one, together(case, strategy, microbatches=4, model=model, optimizer=trained), **EXACT)


class Idle(nn.Module):
    """One layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def check_module_that_is_never_called_gets_no_weight_decay(ranks: Ranks) -> None:
    case = Case(name="mlp", make=Idle, batch=vectors)

    def decaying(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)

    one = alone(case, microbatches=4, optimizer=decaying)
    for strategy in (*pipelines(ranks.size)[:2], *combined(ranks.size)):
        assert_equal(one, together(case, strategy, microbatches=4, optimizer=decaying), **EXACT)


def check_replica_with_one_row_for_batch_norm_equals_one_process(ranks: Ranks, sizes: tuple[int, ...] = (4,)) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(3)))

    case = Case(name="rows", make=make, batch=lambda rows: (torch.randn(rows, 12), torch.randint(0, 12, (rows,))))
    # A microbatch of 3 rows gives one of the two replicas a single row. A batch of 7 rows has such a microbatch too.
    one = alone(case, microbatches=2, rows=(6, 7), optimizer=sgd)
    for strategy in combined(ranks.size):
        many = together(case, strategy, microbatches=2, rows=(6, 7), optimizer=sgd)
        assert_equal(one, many, **EXACT)


def check_tensor_shared_by_two_sharded_stages_of_a_worker_is_refused(
    ranks: Ranks, sizes: tuple[int, ...] = (4,)
) -> None:
    def make() -> nn.Module:
        layers = [nn.Linear(12, 12) for _ in range(4)]
        layers[2].weight = layers[0].weight
        return nn.Sequential(*layers)

    case = Case(name="tied", make=make, batch=vectors)
    strategy = FullyShard(2) @ PipelineParallel(2, schedule="interleaved", cut=["1", "2", "3"])
    assert_refused(
        lambda: parallel(made(case, torch.float64), strategy, case), "0.weight is in the stages 0, 2", "1f1b"
    )
