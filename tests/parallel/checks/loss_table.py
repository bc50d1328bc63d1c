"""Every loss of torch.nn.functional with each reduction under every layout: equal to one process, or refused by name."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, PipelineParallel, TensorParallel
from tests.parallel.world import ROOT, Ranks

SIZES = (2,)
WIDTH = 24
_TENSOR = TensorParallel(plan={"0": "colwise", "2": "rowwise"})
#: Strategies, each with the options of its column in the table.
LAYOUTS: tuple[tuple[Any, dict[str, int]], ...] = (
    (DataParallel(), {}),
    (FullyShard(), {}),
    (_TENSOR, {}),
    (PipelineParallel(cut=["2"]), {"microbatches": 2}),
    (_TENSOR, {"microbatches": 2, "accumulate": 2}),
)
CLASS_WEIGHTS = torch.linspace(0.2, 3.0, WIDTH, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """call: output, target, options -> the loss; target: rows -> the target to compare with."""

    call: Callable[..., Tensor]
    target: Callable[[int], Any]
    options: dict[str, Any] = field(default_factory=dict)
    reductions: tuple[str, ...] = ("mean", "sum", "none")
    #: Whether the loss does not tell how many targets its mean counts. Then a batch in parts is refused if some targets
    #: do not count.
    hides_count: bool = False


def _numbers(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64)


def _parts(rows: int) -> Tensor:
    return torch.rand(rows, WIDTH, dtype=torch.float64)


def _shares(rows: int) -> Tensor:
    return _numbers(rows).softmax(1)


def _signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


def _classes(rows: int) -> Tensor:
    return torch.randint(0, WIDTH, (rows,))


def _some_classes(rows: int) -> Tensor:
    """Of seven rows, which is not the first batch, some do not count."""
    found = _classes(rows)
    return found.masked_fill(torch.arange(rows) < 2, -100) if rows == 7 else found


def _pixels(rows: int) -> Tensor:
    """Four classes of six places, of which some do not count."""
    return torch.randint(0, 4, (rows, 6)).masked_fill(torch.rand(rows, 6) < 0.3, -100)


def _labels(rows: int) -> Tensor:
    found = torch.full((rows, WIDTH), -1)
    found[:, :3] = torch.rand(rows, WIDTH).argsort(1)[:, :3]
    return found


def _weighted(rows: int) -> tuple[Tensor, Tensor]:
    return _numbers(rows), _parts(rows)


def _spoken(rows: int) -> tuple[Tensor, Tensor]:
    """Texts of one to three letters, and their lengths."""
    return torch.randint(1, 4, (rows, 3)), torch.arange(rows) % 3 + 1


def _ctc(output: Tensor, target: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    logits = output.unflatten(1, (6, 4)).transpose(0, 1)
    lengths = torch.full((len(output),), 6)
    return F.ctc_loss(logits.log_softmax(2), target[0], lengths, target[1], **options)


def _of_two(function: Any) -> Any:
    def call(output: Tensor, sign: Tensor, **options: Any) -> Tensor:
        return function(*output.chunk(2, 1), sign, **options)  # type: ignore[no-any-return]

    return call


def _of_three(function: Any) -> Any:
    def call(output: Tensor, _: Tensor, **options: Any) -> Tensor:
        return function(*output.chunk(3, 1), **options)  # type: ignore[no-any-return]

    return call


def _of_weighted(function: Any) -> Any:
    def call(output: Tensor, target: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        return function(output, target[0], weight=target[1], **options)  # type: ignore[no-any-return]

    return call


def _linear(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Eight classes of a fixed matrix."""
    matrix = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).cos().view(8, WIDTH)
    return F.linear_cross_entropy(output, matrix, target.remainder(8).where(target >= 0, target), **options)


def _linear_in_chunks(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    """As `_linear`, by torch's operator that computes the gradients in the forward pass."""
    return _linear(output, target, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2), **options)


#: Name of a loss in the table -> the loss. The name has the function and the options that change the result.
LOSSES: dict[str, _Loss] = {
    "binary_cross_entropy": _Loss(
        call=lambda x, y, **options: F.binary_cross_entropy(x.sigmoid(), y, **options), target=_parts
    ),
    "binary_cross_entropy weight=": _Loss(
        call=lambda x, y, **options: F.binary_cross_entropy(x.sigmoid(), y[0].sigmoid(), y[1], **options),
        target=_weighted,
    ),
    "binary_cross_entropy_with_logits": _Loss(call=F.binary_cross_entropy_with_logits, target=_parts),
    "binary_cross_entropy_with_logits pos_weight=": _Loss(
        call=F.binary_cross_entropy_with_logits, target=_parts, options={"pos_weight": CLASS_WEIGHTS}
    ),
    "cosine_embedding_loss": _Loss(call=_of_two(F.cosine_embedding_loss), target=_signs),
    "cross_entropy": _Loss(call=F.cross_entropy, target=_classes),
    "cross_entropy ignore_index=": _Loss(call=F.cross_entropy, target=_some_classes, options={"ignore_index": -100}),
    "cross_entropy weight=": _Loss(call=F.cross_entropy, target=_some_classes, options={"weight": CLASS_WEIGHTS}),
    "cross_entropy label_smoothing=": _Loss(
        call=F.cross_entropy, target=_some_classes, options={"label_smoothing": 0.1, "weight": CLASS_WEIGHTS}
    ),
    "cross_entropy of probabilities": _Loss(call=F.cross_entropy, target=_shares, options={"weight": CLASS_WEIGHTS}),
    "cross_entropy of pixels": _Loss(
        call=lambda x, y, **options: F.cross_entropy(x.unflatten(1, (4, 6)), y, **options), target=_pixels
    ),
    "ctc_loss": _Loss(call=_ctc, target=_spoken),
    "gaussian_nll_loss": _Loss(
        call=lambda x, y, **options: F.gaussian_nll_loss(x, y, x.exp(), **options), target=_numbers
    ),
    "hinge_embedding_loss": _Loss(call=F.hinge_embedding_loss, target=lambda rows: _signs(rows, WIDTH)),
    "huber_loss": _Loss(call=F.huber_loss, target=_numbers),
    "huber_loss weight=": _Loss(call=_of_weighted(F.huber_loss), target=_weighted),
    "kl_div": _Loss(
        call=lambda x, y, **options: F.kl_div(x.log_softmax(1), y, **options),
        target=_shares,
        reductions=("mean", "sum", "none", "batchmean"),
    ),
    "l1_loss": _Loss(call=F.l1_loss, target=_numbers),
    "l1_loss weight=": _Loss(call=_of_weighted(F.l1_loss), target=_weighted),
    "linear_cross_entropy": _Loss(call=_linear, target=_classes),
    "linear_cross_entropy ignore_index=": _Loss(call=_linear, target=_some_classes, options={"ignore_index": -100}),
    "linear_cross_entropy ignore_index= options=": _Loss(
        call=_linear_in_chunks, target=_some_classes, options={"ignore_index": -100}, hides_count=True
    ),
    "margin_ranking_loss": _Loss(call=_of_two(F.margin_ranking_loss), target=lambda rows: _signs(rows, WIDTH // 2)),
    "mse_loss": _Loss(call=F.mse_loss, target=_numbers),
    "mse_loss weight=": _Loss(call=_of_weighted(F.mse_loss), target=_weighted),
    "multi_margin_loss": _Loss(call=F.multi_margin_loss, target=_classes),
    "multi_margin_loss weight=": _Loss(call=F.multi_margin_loss, target=_classes, options={"weight": CLASS_WEIGHTS}),
    "multilabel_margin_loss": _Loss(call=F.multilabel_margin_loss, target=_labels),
    "multilabel_soft_margin_loss": _Loss(call=F.multilabel_soft_margin_loss, target=_parts),
    "multilabel_soft_margin_loss weight=": _Loss(
        call=F.multilabel_soft_margin_loss, target=_parts, options={"weight": CLASS_WEIGHTS}
    ),
    "nll_loss": _Loss(call=lambda x, y, **options: F.nll_loss(x.log_softmax(1), y, **options), target=_classes),
    "nll_loss ignore_index=": _Loss(
        call=lambda x, y, **options: F.nll_loss(x.log_softmax(1), y, **options),
        target=_some_classes,
        options={"ignore_index": -100},
    ),
    "nll_loss weight=": _Loss(
        call=lambda x, y, **options: F.nll_loss(x.log_softmax(1), y, **options),
        target=_classes,
        options={"weight": CLASS_WEIGHTS},
    ),
    "poisson_nll_loss": _Loss(call=F.poisson_nll_loss, target=_parts),
    "smooth_l1_loss": _Loss(call=F.smooth_l1_loss, target=_numbers),
    "soft_margin_loss": _Loss(call=F.soft_margin_loss, target=lambda rows: _signs(rows, WIDTH)),
    "triplet_margin_loss": _Loss(call=_of_three(F.triplet_margin_loss), target=_classes),
    "triplet_margin_with_distance_loss": _Loss(call=_of_three(F.triplet_margin_with_distance_loss), target=_classes),
}


def _batches(loss: _Loss) -> list[tuple[Tensor, Any]]:
    torch.manual_seed(4)
    return [(torch.randn(rows, 12, dtype=torch.float64), loss.target(rows)) for rows in (10, 7, 10)]


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, WIDTH)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def _alone(loss: _Loss, call: Callable[..., Tensor]) -> nn.Module:
    model, optimizer = _made()
    for x, y in _batches(loss):
        optimizer.zero_grad()
        call(model(x), y).backward()
        optimizer.step()
    return model


def _outcome(loss: _Loss, call: Callable[..., Tensor], one: nn.Module | None, strategy: Any, options: Any) -> str:
    """Return the result of three steps: "equal", or the refusal's sentence, or the difference."""
    try:
        par = paceline.parallelize(*_made(), _batches(loss), loss=call, strategy=strategy, **options)
        for batch in _batches(loss):
            par.step(batch)
        many = par.full_state_dict()
    except ParallelError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if one is None:
        return "trained, which one process can't"
    apart = max(float((value - many[name]).abs().max()) for name, value in one.state_dict().items())
    return "equal" if apart < 1e-9 else f"differs by {apart:.1e}"


def _has(name: str) -> bool:
    """Say if this torch has the function and the option."""
    function, *options = name.split()
    found = getattr(F, function, None)
    return found is not None and all(
        option.strip("=") in inspect.signature(found).parameters for option in options if option.endswith("=")
    )


def check_every_loss_equals_one_process_or_is_refused(ranks: Ranks) -> None:
    """The table of losses in docs/microbatches.md has these results."""
    losses = {name: loss for name, loss in LOSSES.items() if _has(name)}
    with_reduction = {
        name
        for name, function in vars(F).items()
        if inspect.isfunction(function) and name[0] != "_" and "reduction" in inspect.signature(function).parameters
    }
    assert {name.split()[0] for name in losses} == with_reduction, "one entry at least for each loss of torch"
    text = (ROOT / "docs" / "microbatches.md").read_text().split("## Losses of torch")[1].split("## ")[0]
    for option in {word for name in LOSSES for word in name.split() if word.endswith("=")}:
        assert f"`{option}`" in text, f"the docs do not name {option}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `red" in line]
    table = {
        reduction: [
            "equal" if layout == (_TENSOR, {}) else cell.removeprefix("equal under `TensorParallel`; else ")
            for layout in LAYOUTS
        ]
        for first, cell in rows
        for reduction in re.findall(r'reduction="(\w+)"', first)
    }
    table["none"] = [cell for first, cell in rows if '"none"' in first] * len(LAYOUTS)
    places = range(len(LAYOUTS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="reduction: 'mean' divides")
        for case, columns in ranks.grid(list(losses.items()), places):
            name, loss = case
            for reduction in ranks.cells(("mean",), loss.reductions):
                call = partial(loss.call, **loss.options, reduction=reduction)
                one = None if reduction == "none" else _alone(loss, call)
                for place in columns:
                    cell, found = table[reduction][place], _outcome(loss, call, one, *LAYOUTS[place])
                    if loss.hides_count and reduction == "mean" and LAYOUTS[place] != (_TENSOR, {}):
                        cell = "refused: it is not a mean over rows"
                    kind, _, why = cell.partition(": ")
                    is_so = kind in ("equal", "refused") and found.startswith(kind) and why in found
                    assert is_so, f"{name}, {reduction}, {LAYOUTS[place]}: {found}; the table: {cell}"
