"""What the stages of a pipeline hold, keep, run and refuse; and what the comparison sees when something is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline.parallel import FullyShard, PipelineParallel
from paceline.parallel.pipeline.stages import Stage
from paceline.parallel.pipeline.timeline import in_flight, order
from paceline.parallel.task import Task
from paceline.parallel.tied_parameters import StageTies
from tests.parallel.equality import alone, assert_equal, batches, made, together
from tests.parallel.models import CASES, SHALLOW, Case, Transformer, dropping, plain_tokens, token_loss, vectors
from tests.parallel.pipelines import (
    EXACT,
    assert_different,
    assert_refused,
    parallel,
    replaced,
)
from tests.parallel.world import Ranks

SIZES = (2, 4)


def check_unfreezing_parameters_of_a_pipeline_is_refused(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = CASES["mlp"]
    model = made(case, torch.float64)
    model.first.requires_grad_(False)
    par = parallel(model, PipelineParallel(ranks.size), case)
    for param in par.module.parameters():
        # Rank 0 unfreezes the frozen layer and rank 1 freezes its layers, so both refuse the step and none waits for the other.
        param.requires_grad_(ranks.rank == 0)
    assert_refused(lambda: par.executor.train_step([]), "requires_grad is", "call parallelize")


def check_pipeline_evaluation_uses_no_dropout_and_keeps_buffers(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = dropping(0.5)
    one = made(case, torch.float64).eval()
    given = batches(case, torch.float64, (8, 7, 1))
    rows = sum(len(y) for _, y in given)
    expected = sum(float(token_loss(one(x), y).detach()) * len(y) for x, y in given) / rows
    for schedule in ("1f1b", "interleaved"):
        par = parallel(made(case, torch.float64), PipelineParallel(ranks.size, schedule=schedule), case, given)
        assert abs(par.evaluate(given, token_loss) - expected) < 1e-11
        assert par.module.training

    norm = CASES["cnn_batch"]
    par = parallel(made(norm, torch.float64), PipelineParallel(ranks.size), norm)
    par.step(batches(norm, torch.float64, (8,))[0])
    before = {name: buffer.clone() for name, buffer in par.module.named_buffers()}
    par.evaluate(batches(norm, torch.float64, (8, 3)), F.cross_entropy)
    assert all(torch.equal(buffer, before[name]) for name, buffer in par.module.named_buffers())


class Doubtful(nn.Module):
    """Its own forward asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.extra = (nn.Linear(12, 12) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.5, self.training)
        h = self.c(self.b(h))
        if not self.training:
            h = self.extra(h)
        return self.d(h)


def check_forward_that_reads_the_training_mode_equals_one_process(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = Case(name="mode", make=Doubtful, batch=vectors)
    one = made(case, torch.float64).eval()
    par = parallel(made(case, torch.float64), PipelineParallel(ranks.size), case)
    given = batches(case, torch.float64, (8,))
    losses = {float(par.step(given[0])) for _ in range(2)}
    assert len(losses) == 2
    one.load_state_dict(par.full_state_dict())
    found = par.evaluate(given, F.cross_entropy)
    assert abs(found - float(F.cross_entropy(one(given[0][0]), given[0][1]).detach())) < 1e-11


def check_model_given_in_evaluation_mode_stays_in_evaluation_mode(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    """Regression: Paceline joins a worker's stages in a module of its own. This module was in training mode although
    the model was not, and the model's forward read its mode."""
    case = Case(name="mode", make=Doubtful, batch=vectors)
    one = made(case, torch.float64).eval()
    strategy = PipelineParallel(ranks.size, schedule="interleaved")
    par = parallel(made(case, torch.float64).eval(), strategy, case)
    x, y = batches(case, torch.float64, (8,))[0]
    assert not par.module.training
    assert abs(float(par.step((x, y))) - float(F.cross_entropy(one(x), y).detach())) < 1e-11


def check_dropout_is_reproducible_and_differs_between_stages(ranks: Ranks) -> None:
    case = dropping(0.5, depth=ranks.size)
    given = batches(case, torch.float64, (8, 8))

    # Cut by hand: a cut by measured times can differ between trainings, and can give a stage a layer without dropout.
    begins = tuple(f"blocks.{stage}" for stage in range(1, ranks.size))

    def losses(seed: int) -> list[float]:
        strategy = PipelineParallel(cut=begins)
        par = parallel(made(case, torch.float64), strategy, case, given, seed=seed, check="off")
        return [float(par.step(batch)) for batch in given]

    torch.manual_seed(ranks.rank)
    first = losses(3)
    torch.manual_seed(100 + ranks.rank)
    assert losses(3) == first
    assert losses(4) != first

    drawn: list[Any] = [None] * ranks.size
    par = parallel(made(case, torch.float64), PipelineParallel(cut=begins), case, given, check="off")
    own: list[float] = []
    for module in par.module.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_: own.append(float(torch.rand(()))))
    par.step(given[0])
    torch.distributed.all_gather_object(drawn, own)
    assert all(drawn)
    assert len({tuple(numbers) for numbers in drawn}) == ranks.size


def check_bf16_pipeline_training_equals_one_process(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = CASES["transformer_untied"]
    one = made(case, torch.float32)
    x, y = batches(case, torch.float32, (8,))[0]
    whole = torch.zeros(())
    for x_part, y_part in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss(one(x_part), y_part)
        (loss * 0.25).backward()
        whole = whole + 0.25 * loss.detach()
    par = parallel(made(case, torch.float32), PipelineParallel(ranks.size), case, precision="bf16")
    assert abs(float(par.step((x, y))) - float(whole)) < 1e-6
    expected = dict(one.named_parameters())
    for name, param in par.executor.named_parameters().items():
        assert param.dtype == torch.float32
        assert torch.allclose(param.grad, expected[name].grad, rtol=1e-2, atol=1e-4), name


def check_executed_schedule_equals_the_drawn_schedule(ranks: Ranks) -> None:
    # The interleaved schedule has twice as many stages as workers, so more than two workers need the deep model.
    case = (SHALLOW if ranks.size == 2 else CASES)["transformer_tied"]
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        par = parallel(
            made(case, torch.float64), PipelineParallel(schedule=schedule), case, microbatches=8, check="off"
        )
        seen: list[tuple[str, int, int]] = []

        def noting(kind: str, run: Any, to: Any = seen) -> Any:
            def note(self: Stage, micro: int, given: Any) -> Any:
                to.append((kind, self.index, micro))
                return run(self, micro, given)

            return note

        forwards = replaced(Stage, "forward", noting("F", Stage.forward))
        with forwards, replaced(Stage, "backward", noting("B", Stage.backward)):
            par.step(batches(case, torch.float64, (8,))[0])
            assert seen == [tuple(call) for call in order(schedule, ranks.rank, ranks.size, 8, chunks)]
            seen.clear()
            par.evaluate(batches(case, torch.float64, (8,)), token_loss)
        assert seen == [tuple(call) for call in order("forward", ranks.rank, ranks.size, 8, chunks)]


class _Kept:
    """A tensor that is saved for the backward pass; counts while it lives."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        _Kept.now += self.size
        _Kept.most = max(_Kept.most, _Kept.now)

    def __del__(self) -> None:
        _Kept.now -= self.size


def check_1f1b_stage_keeps_activations_of_one_microbatch_per_remaining_stage(ranks: Ranks) -> None:
    case = CASES["transformer_untied"]
    cut = [f"blocks.{index * 4 // ranks.size}" for index in range(1, ranks.size)]
    most = {}
    for schedule in ("gpipe", "1f1b"):
        par = parallel(
            made(case, torch.float64), PipelineParallel(schedule=schedule, cut=cut), case, microbatches=8, check="off"
        )
        batch = batches(case, torch.float64, (8,))[0]
        par.step(batch)
        _Kept.now = _Kept.most = 0
        with torch.autograd.graph.saved_tensors_hooks(_Kept, lambda kept: kept.tensor):
            par.step(batch)
        most[schedule] = _Kept.most
        assert _Kept.now == 0
    left = in_flight("1f1b", ranks.rank, ranks.size, ranks.size, 8)
    assert left == ranks.size - ranks.rank
    assert abs(most["1f1b"] / most["gpipe"] - left / 8) < 0.01, most


def check_each_worker_holds_only_its_stages(ranks: Ranks) -> None:
    case = Case(name="deep", make=lambda: Transformer(tied=False, depth=8), batch=plain_tokens, loss=token_loss)
    whole = made(case, torch.float64)
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        model = made(case, torch.float64)
        # Cut by hand: a cut by measured times may give one stage much more than another.
        stages = ranks.size * chunks
        cut = [f"blocks.{stage * 8 // stages}" for stage in range(1, stages)]
        par = parallel(model, PipelineParallel(schedule=schedule, cut=cut), case, check="off")
        par.step(batches(case, torch.float64, (8,))[0])
        held = sum(param.numel() for param in par.module.parameters())
        total = torch.tensor(held)
        torch.distributed.all_reduce(total)
        assert int(total) == sum(param.numel() for param in whole.parameters())
        assert held <= 1.5 * int(total) / ranks.size
        # In the user's own model, the parameters of other stages keep only their shapes.
        in_memory = sum(param.numel() for param in model.parameters() if not param.is_meta)
        assert in_memory == held
        # No message is left after the step.
        assert not par.executor._messages._expected
        assert not par.executor._messages._sent
        assert not any(stage._kept for stage in par.executor._stages)


def check_sharded_stages_hold_a_quarter_of_the_parameters(ranks: Ranks, sizes: tuple[int, ...] = (4,)) -> None:
    case = Case(name="deep", make=lambda: Transformer(tied=False, depth=4), batch=plain_tokens, loss=token_loss)
    model = made(case, torch.float64)
    total = sum(param.numel() for param in model.parameters())
    par = parallel(model, FullyShard(2) @ PipelineParallel(2, cut=["blocks.2"]), case, check="off")
    par.step(batches(case, torch.float64, (8,))[0])
    held = sum(param.to_local().numel() for param in par.module.parameters())
    assert held <= 1.3 * total / 4


def check_stage_boundaries_given_by_name_are_used(ranks: Ranks) -> None:
    case = CASES["transformer_tied"]
    names = [f"blocks.{index}" for index in range(1, ranks.size)]
    model = made(case, torch.float64)
    par = parallel(model, PipelineParallel(cut=names), case)
    assert [str(mark) for mark in par.executor.plan.marks] == names
    blocks = {name.split(".")[1] for name in par.executor.named_parameters() if name.startswith("blocks")}
    last = {str(index) for index in range(ranks.size - 1, 4)}
    assert blocks == (last if ranks.rank == ranks.size - 1 else {str(ranks.rank)})
    # The pipeline usually keeps a block whole. This cut lies inside a block, so the pipeline has to trace the block's
    # forward.
    inside = [*names[:-1], f"blocks.{ranks.size - 1}.up"]
    one = alone(case, microbatches=4, rows=(8,))
    assert_equal(one, together(case, PipelineParallel(cut=inside), microbatches=4, rows=(8,)), **EXACT)


def check_invalid_stage_boundaries_are_refused_on_every_rank(ranks: Ranks) -> None:
    case = CASES["transformer_tied"]
    mlp = CASES["mlp"]

    def cut(*names: str) -> Callable[[], object]:
        return lambda: parallel(made(case, torch.float64), PipelineParallel(cut=names), case)

    rest = [f"blocks.{index}" for index in range(1, ranks.size - 1)]
    assert_refused(cut("blocks.9", *rest), "cut='blocks.9'", "calls no module of that name", "'blocks.3'")
    assert_refused(cut(*rest), f"has {ranks.size}", f"Name {ranks.size - 1}") if rest else None
    assert_refused(cut("blocks.1", "blocks.2", "blocks.3", "head", *rest), "makes")
    assert_refused(cut("tok", *rest), "cut='tok'", "the stage before would be empty")
    if ranks.size == 4:
        assert_refused(cut("blocks.2", "blocks.1", "blocks.3"), "'blocks.1' is not called after")
    assert_refused(
        lambda: parallel(
            made(mlp, torch.float64), PipelineParallel(schedule="interleaved", chunks=8), mlp, microbatches=8
        ),
        "can be cut into",
        f"{8 * ranks.size} stages",
    )
    assert_refused(
        lambda: parallel(made(mlp, torch.float64), PipelineParallel(), mlp, microbatches=ranks.size - 1),
        f"microbatches={ranks.size - 1}",
        f"at least microbatches={ranks.size}",
    )
    assert_refused(
        lambda: parallel(
            made(mlp, torch.float64), PipelineParallel(schedule="interleaved"), mlp, microbatches=2 * ranks.size + 1
        ),
        "equal groups",
        str(2 * ranks.size),
    )
    assert_refused(
        lambda: parallel(made(mlp, torch.float64), PipelineParallel(), mlp, memory_bytes=1000),
        "memory_bytes=1000",
        "no cut",
    )


def check_explain_shows_stage_boundaries_and_costs(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = CASES["transformer_tied"]
    par = parallel(made(case, torch.float64), PipelineParallel(), case)
    text = par.explain()
    lines = text.splitlines()
    assert lines[0] == f"Transformer on {ranks.size} workers: pipe {ranks.size}"
    rows = [line for line in lines if line.split()[:2] in [[str(stage)] * 2 for stage in range(ranks.size)]]
    assert len(rows) == ranks.size
    assert f"tied: tok.weight is in stages 0, {ranks.size - 1}" in text
    assert f"bubble: {100 * (ranks.size - 1) / (4 + ranks.size - 1):.0f} %" in text
    drawn = [line for line in lines if line.startswith("  worker ") and " F0 " in line]
    assert len(drawn) == ranks.size


# Mutation tests: each check removes one part of a strategy, and the comparison must detect it.


def check_without_the_gradient_sum_over_tied_weights_gradients_differ(
    ranks: Ranks, sizes: tuple[int, ...] = (2,)
) -> None:
    case = CASES["transformer_tied"]
    one = alone(case, microbatches=4, rows=(8,))
    with replaced(StageTies, "sum_gradients", lambda self, params: None):
        many = together(case, PipelineParallel(), microbatches=4, rows=(8,), check="off")
    # The missing sum changes gradients only, so the loss is right.
    assert_equal(one, many, loss=1e-11)
    assert_different(ranks, lambda: assert_equal(one, many, loss=1e-11, gradient=1e-4))


def check_without_microbatch_weights_the_loss_differs(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    case = CASES["transformer_tied"]
    one = alone(case, microbatches=4, rows=(8,))

    def mean_of_means(self: Task, output: Any, micro: Any) -> Tensor:
        return self.loss(output, micro.target) / self.microbatches

    with replaced(Task, "weighted_loss", mean_of_means):
        many = together(case, PipelineParallel(), microbatches=4, rows=(8,), check="off")
    assert_different(ranks, lambda: assert_equal(one, many, loss=1e-4))


def check_with_tied_weights_counted_twice_in_the_norm_gradients_differ(
    ranks: Ranks, sizes: tuple[int, ...] = (2,)
) -> None:
    from paceline.parallel import reduce

    case = CASES["transformer_tied"]
    one = alone(case, microbatches=4, rows=(8,), clip_norm=0.05)
    with replaced(reduce, "_owned", lambda params, world: set(params)):
        many = together(case, PipelineParallel(), microbatches=4, rows=(8,), clip_norm=0.05)
    assert_different(ranks, lambda: assert_equal(one, many, loss=1e-11, gradient=1e-6))


def check_with_each_stage_clipped_by_its_own_norm_gradients_differ(ranks: Ranks, sizes: tuple[int, ...] = (2,)) -> None:
    from paceline.parallel.reduce import Clipper

    def own_norm(self: Clipper) -> Tensor:
        return torch.nn.utils.get_total_norm([param.grad for param in self._params.values()])

    case = CASES["mlp"]
    one = alone(case, microbatches=4, rows=(8,), clip_norm=0.05)
    with replaced(Clipper, "norm", own_norm):
        many = together(case, PipelineParallel(), microbatches=4, rows=(8,), clip_norm=0.05)
    assert_different(ranks, lambda: assert_equal(one, many, loss=1e-11, gradient=1e-4))
