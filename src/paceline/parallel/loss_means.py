"""Find the number that a loss divides by (its count), and test whether a loss is a mean at all.

    F.cross_entropy(output, target)                 the targets that are not ignored, or the sum of their class weights
    (losses * mask).sum() / mask.sum()              the divisor
    losses[mask].mean()                             the numbers that the mask or an index has selected
    losses.mean(), F.mse_loss(output, target)       the rows

Autograd's graph of a loss contains this count, whatever Python code computes the loss. Without `loss_weight`, Paceline
weights the parts of a batch by this count. If the graph does not show the count, the loss of a few rows is compared
with the losses of two parts of these rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.batches.batch import LossFunction, WeightFunction
from paceline.parallel.batches.rows import Rows, can_join, join_rows
from paceline.parallel.errors import ParallelError
from paceline.parallel.loss_state import loss_kept
from paceline.parallel.pytree import map_tensors, tensors_in
from paceline.parallel.reduce import local
from paceline.torch_private import without_modes

#: The search of a loss's autograd graph visits at most this many nodes.
MOST_NODES = 64
#: The most rows, and the most numbers in the model's output, with which a loss is tested on two parts of a batch.
ROWS, NUMBERS = 8, 1 << 20
#: The losses of all rows and of two parts may differ by this fraction (per dtype), or by this many rounding errors (eps).
LIMITS, ROUNDINGS = {torch.float64: 1e-7, torch.float32: 1e-4}, 50
#: Names of autograd nodes whose function multiplies a single input by a constant, or leaves it unchanged.
_SCALED = {
    *("MulBackward", "NegBackward", "ToCopyBackward", "CloneBackward", "AliasBackward", "ViewBackward"),
    *("UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward"),
}
#: Names of autograd nodes that may take single rows or chosen numbers out of a batch.
_CHOOSING = {f"{name}Backward" for name in ("Select", "Unbind", "Slice", "Split", "Index", "MaskedSelect")}
#: An autograd node, whose saved values torch does not declare.
Node = Any
_REDUCED_BY_MEAN, _REDUCED_BY_SUM = 1, 2
#: The sums in `StepMeans.numbers`, in the order of its fields.
_SUMS = ("weight", "known", "unclear", "rows", "ratios", "squares", "widths", "wide_squares", "flat")
STEP_NUMBERS = len(_SUMS)


@dataclass(frozen=True)
class MeanOver:
    """The number that a loss divides by.

    Attributes:
        count: The divisor of the mean; None for a mean over rows.
        is_sole: False if the loss is a sum of several means with different divisors.
        is_hidden: Whether an operator may hide the divisor: a compiled loss, or arithmetic such as torch.exp(-s) * loss.
        most: The largest number of values that a mean in the loss averages. Only for losses with other terms or without a count.
        lengths: The sum of the lengths of dimensions that such a loss averages within a row.
        numbers: How many numbers the loss compares: all numbers of output and target.
    """

    count: float | None = None
    is_sole: bool = True
    is_hidden: bool = False
    #: Whether the loss is a sum that the script itself divides by the number of targets.
    is_divisor: bool = False
    most: float = 0.0
    lengths: float = 0.0
    numbers: float = 0.0
    #: The autograd node of the sum that `count` divides.
    summed: object = None

    def counts_nothing(self, loss: Tensor) -> bool:
        """Return whether the loss ignores all targets in this part of the batch.

        If the divisor is unknown and the loss is on a GPU, return False: reading the loss would stall the GPU.
        """
        # The script may clamp the number of targets, as with mask.sum().clamp(min=1). So 1 may mean no targets.
        is_looked_at = (self.is_divisor and self.count == 1) or (self.count is None and loss.device.type == "cpu")
        # Switch off torch modes: a recorder, for example, would record these reads of saved tensors as reads of the loss.
        with without_modes():
            is_zero = is_looked_at and not bool(loss.detach())
            return is_zero and (self.summed is None or any(map(_leaves_nothing, _near(self.summed, 16))))


def mean_over(loss: Tensor, given: object = None) -> MeanOver:
    """Find a loss's divisor in its autograd graph. `given`: The loss's output and target."""
    with without_modes():
        over = MeanOver() if loss.grad_fn is None else _read(loss.grad_fn, [MOST_NODES])
    return replace(over, numbers=float(sum(tensor.numel() for tensor in tensors_in(given))))


def _read(node: Node, left: list[int]) -> MeanOver:
    left[0] -= 1
    name, inputs = _name_of(node), _inputs_of(node)
    match name:
        case _ if left[0] < 0:
            return MeanOver()
        case "NllLossBackward" | "NllLoss2DBackward" if node._saved_reduction == _REDUCED_BY_MEAN:
            return MeanOver(float(node._saved_total_weight.detach()))
        case "DivBackward" if len(inputs) == 1 and node.next_functions[0][0] is not None:
            return _read_quotient(node._saved_other, inputs[0], left)
        case "MeanBackward" | "SumBackward" if inputs and getattr(node, "_saved_self_sym_sizes", None) == ():
            return _read(inputs[0], left)
        case _ if (size := _mean_size(node, name)) is not None and _is_of_chosen(inputs[0], [16]):
            return MeanOver(size)
        case _ if name in _SCALED and len(inputs) == 1:
            return _read(inputs[0], left)
        case "AddBackward" | "SubBackward":
            terms = [_read(other, left) for other in inputs]
            counts = [term.count for term in terms if term.count is not None]
            is_sole = not counts or all(term.is_sole and _close(counts[0], term.count) for term in terms)
            # Powers of pi are linearly independent over the rationals, so other counts give another sum.
            mixed = sum(count * math.pi**place for place, count in enumerate(counts))
            count = [*counts, None][0] if is_sole else mixed
            is_hidden, most = any(term.is_hidden for term in terms), max(term.most for term in terms)
            return MeanOver(count, is_sole, is_hidden, most=most, lengths=sum(term.lengths for term in terms))
        case _:
            # Custom autograd functions (C++ or Python), compiled graphs and custom operators may hide how many targets count.
            is_python, near = isinstance(node, torch.autograd.function.BackwardCFunction), _near(node, MOST_NODES)
            is_hidden = is_python or name.startswith("torch::autograd::Cpp") or any(map(_has_count, near))
            sizes, lengths = zip(*map(_averaged, near), strict=True)
            return MeanOver(is_hidden=is_hidden, most=max(sizes), lengths=sum(lengths))


def _read_quotient(other: Tensor | float, above: Node, left: list[int]) -> MeanOver:
    if isinstance(other, Tensor) and other.numel() != 1:
        return MeanOver()
    divisor = float(torch.as_tensor(other, dtype=torch.float64).detach())
    if _is_sum(above):
        return MeanOver(abs(divisor), is_divisor=True, summed=above)
    inner = _read(above, left)
    # In losses.sum() / tokens / rows the count is tokens * rows. A divisor that is not an integer only scales the loss.
    if inner.is_divisor and inner.count is not None and divisor.is_integer():
        return MeanOver(inner.count * divisor, is_divisor=True, summed=inner.summed)
    return inner


def _name_of(node: Node) -> str:
    name: str = node.name()
    return name.rstrip("0123456789")


def _inputs_of(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _is_sum(node: Node) -> bool:
    name, inputs = _name_of(node), _inputs_of(node)
    return (
        (name in ("MulBackward", "NegBackward", "ToCopyBackward") and len(inputs) == 1 and _is_sum(inputs[0]))
        or name in ("SumBackward", "NansumBackward", "DotBackward")
        or getattr(node, "_saved_reduction", None) == _REDUCED_BY_SUM
    )


def _near(node: Node, most: int) -> list[Node]:
    """Return a node and its ancestors, `most` nodes, the nearest first."""
    found = [node]
    for one in found:
        found += _inputs_of(one)[: max(most - len(found), 0)]
    return found


def _leaves_nothing(node: Node) -> bool:
    """Return whether a mask or ignored targets empty a sum at this node."""
    match _name_of(node):
        case "MulBackward" | "DotBackward" if len(_inputs_of(node)) == 1:
            # Autograd saves only the factor that has no gradient, which may be the mask.
            factors = [getattr(node, f"_saved_{name}", None) for name in ("self", "other", "tensor")]
        case "NllLossBackward" | "NllLoss2DBackward":
            # torch returns the signed number as an unsigned one.
            factors = [node._saved_target != (node._saved_ignore_index + (1 << 63)) % (1 << 64) - (1 << 63)]
        case "MaskedFillBackward" | "WhereBackward":
            mask = node._saved_mask if hasattr(node, "_saved_mask") else node._saved_condition
            factors = [mask, ~mask]
        case _:
            factors = [getattr(node, "_saved_weight", None)]
    known = [x.detach() for x in factors if isinstance(x, Tensor) and not x.requires_grad]
    # FullyShard frees the storage of a saved parameter until the backward pass.
    is_empty = any(not bool(x.any()) for x in known if x.untyped_storage().size())
    return is_empty or 0 in getattr(node, "_saved_self_sym_sizes", ())


def _has_count(node: Node) -> bool:
    """Return whether an autograd node computes one number that divides by a count."""
    name, inputs = _name_of(node), _inputs_of(node)
    match name:
        case "NllLossBackward" | "NllLoss2DBackward":
            return bool(node._saved_reduction == _REDUCED_BY_MEAN)
        case _ if len(inputs) != 1 or hasattr(node, "_saved_dim") or hasattr(inputs[0], "_saved_dim"):
            return False
        case "DivBackward":
            return _is_sum(inputs[0])
    return _mean_size(node, name) is not None and _is_of_chosen(inputs[0], [16])


def _averaged(node: Node) -> tuple[float, float]:
    """Return (values, 0) for a mean over all values, (0, length) within rows."""
    size, dims = _mean_size(node, _name_of(node)), getattr(node, "_saved_dim", ())
    shape = getattr(node, "_saved_self_sym_sizes", ())
    # Leave out means of a single row, as in a loop over the rows, and of chosen numbers: they may be without the padding.
    near = _near(node, 16 * bool(size))
    is_chosen = any(_name_of(x) in _CHOOSING and getattr(x, "_saved_dim", 0) == 0 for x in near)
    match size:
        case float() if not is_chosen and len(dims) in (0, len(shape)):
            return size, 0.0
        # A mean over the first dimension averages rows. torch returns -1 as an unsigned number.
        case float() if not is_chosen and 0 not in dims:
            return 0.0, float(math.prod(shape[dim - (dim >> 63 << 64)] for dim in dims))
    return 0.0, 0.0


def _mean_size(node: Node, name: str) -> float | None:
    """Return how many values an autograd node averages, None if it is no mean."""
    if name == "MeanBackward" and node.next_functions:
        size = getattr(node, "_saved_self_sym_numel", None)
        return size and float(size)
    # Read no saved tensor of another node: in a checkpointed block this would compute the block again.
    is_mean = getattr(node, "_saved_reduction", None) == _REDUCED_BY_MEAN and not name.startswith("NllLoss")
    own = is_mean and getattr(node, "_saved_self", None)
    return float(own.numel()) if isinstance(own, Tensor) else None


def _is_of_chosen(node: Node, left: list[int]) -> bool:
    """Return whether values selected by an index feed an autograd node, within `left[0]` nodes."""
    left[0] -= 1
    is_chosen = _name_of(node) in ("IndexBackward", "MaskedSelectBackward")
    return left[0] >= 0 and (is_chosen or any(_is_of_chosen(other, left) for other in _inputs_of(node)))


def _close(one: float, other: float | None) -> bool:
    return other is not None and abs(one - other) <= 1e-6 * max(abs(one), abs(other))


@dataclass
class StepMeans:
    """Sums over a step's microbatches, to combine their losses into one mean.

    Attributes:
        weight: The sum over microbatches of (share of the batch) * (`MeanOver.count` per row).
        known, unclear, rows: How many losses have one known count, have several counts, or are means over rows.
        ratios, squares: The sums of the count per row and of its square over all losses. Lengths that a loss averages are added.
        widths, wide_squares: The sums of the numbers per row, which depend on the padding, and of their squares.
        flat: How many losses average more values than there are rows, so that the values may include padding.
        sample: The (output, target) of a few rows, or None.
        checks: Whether the next microbatch should fill `sample`.
        keeps_state: Whether the loss has state that changes its next value, as a counter does.
        has_hidden: Whether a loss of this step hid its count (`MeanOver.is_hidden`).
    """

    weight: float = 0.0
    known: float = 0.0
    unclear: float = 0.0
    rows: float = 0.0
    ratios: float = 0.0
    squares: float = 0.0
    widths: float = 0.0
    wide_squares: float = 0.0
    flat: float = 0.0
    checks: bool = False
    sample: tuple[object, object] | None = None
    keeps_state: bool = False
    has_hidden: bool = False

    def begin(self, *, checks: bool = False) -> None:
        """Reset all sums for a new step. `checks`: Keep rows to test the loss."""
        self.fill([0.0] * STEP_NUMBERS)
        self.checks, self.sample, self.has_hidden = checks, None, False

    def numbers(self) -> list[float]:
        """Return the sums that determine `factor`, to add up over the ranks."""
        return [getattr(self, name) for name in _SUMS]

    def fill(self, numbers: list[float]) -> None:
        """Set the sums of `numbers`, usually to their totals over the ranks."""
        vars(self).update(zip(_SUMS, numbers, strict=True))

    def add(self, over: MeanOver, weight: float, rows: int) -> float:
        """Add a microbatch's loss to the sums. Return the loss's weight.

        `weight` is the microbatch's share of the rows. The weights of a step must still be multiplied by `factor`.
        """
        self.has_hidden |= over.is_hidden
        ratio = (over.count or 0.0) / rows
        self.ratios += ratio + over.lengths
        self.squares += (ratio + over.lengths) ** 2
        self.widths += over.numbers / rows
        self.wide_squares += (over.numbers / rows) ** 2
        self.flat += over.most > rows
        if over.count is None:
            self.rows += 1
            return weight
        if not over.is_sole:
            self.unclear += 1
            return weight
        self.known += 1
        self.weight += weight * ratio
        return weight * ratio

    def factor(self) -> float:
        """Return the factor that turns summed losses and gradients into means.

        Raises:
            ParallelError: The parts cannot be weighted. For example, some losses are means over targets, others over rows.
        """
        count = self.known + self.unclear + self.rows
        varies = count * self.squares - self.ratios**2 > 1e-9 * self.ratios**2
        varies |= self.flat > 0 and count * self.wide_squares - self.widths**2 > 1e-9 * self.widths**2
        if self.unclear and varies:
            raise ParallelError(
                "the loss is a sum of a mean over the targets that count (ignore_index, a mask, class weights) and of another "
                "term, and the parts of this batch have different numbers of such targets, or other padding. Make all terms "
                "means over the same targets; or compute each batch in one part (microbatches=1 and accumulate=1 on one "
                "replica, or under TensorParallel()); or say what a part counts for, with loss_weight= and check='off'."
            )
        if self.rows == count and varies:
            raise ParallelError(
                "the loss is a mean that includes padding, and the loader's collate_fn pads the rows of each replica to another "
                "length. Pad all batches to one length, average over the numbers that count ((losses * mask).sum() / mask.sum()) "
                "or give whole batches: a list or another iterable in place of the DataLoader."
            )
        if self.known and not self.unclear and self.rows:
            raise ParallelError(
                "the loss is a mean over the targets that count (ignore_index, a mask, class weights) for some "
                "parts of this batch, and over rows for others. Compute it in the same way for each batch, or "
                "give the count: loss_weight=lambda target: (target != -100).sum()."
            )
        if self.known and not self.unclear and not self.weight > 0:
            raise ParallelError("no target of this batch counts for the loss. Leave out such batches.")
        # Return exactly 1.0 if all targets count, so that the results equal those of a plain training loop bit for bit.
        return 1.0 if self.unclear or not self.known or abs(self.weight - 1.0) < 1e-12 else 1.0 / self.weight


def is_due(steps: int) -> bool:
    """Return whether to check the loss after `steps` earlier steps.

    The check is due in steps 1, 2, 4 and 8, and in every 16th step.
    """
    return (steps < 16 and (steps + 1) & steps == 0) or steps % 16 == 15


def scale_gradients(params: dict[str, nn.Parameter], factor: float) -> None:
    """Multiply all gradients by `factor`, in place."""
    if factor != 1.0:
        with torch.no_grad():
            for grad in [param.grad for param in params.values() if param.grad is not None]:
                local(grad).mul_(factor)


def few_rows(output: object, target: object) -> tuple[object, object] | None:
    """Copy a few rows of output and target, or return None.

    Choose rows with the smallest and the largest targets, because ignored targets, such as -100, are mostly extremes.
    Return None if output and target have no rows, or different numbers of rows.
    """
    try:
        outputs, targets = Rows(output), Rows(target)
        of_row = sum(tensor.numel() for tensor in tensors_in(output)) // outputs.count
        count = min(outputs.count, ROWS, max(NUMBERS // max(of_row, 1), 2))
        if outputs.count != targets.count:
            return None
        chosen = _chosen(target, targets.count, count)
        # Copy the rows, because the loss may change its arguments in place.
        first, second = (map_tensors(rows.pick(chosen), lambda x: x.detach().clone()) for rows in (outputs, targets))
        return first, second
    except ParallelError:
        return None


def wider_sample(
    known: tuple[object, object] | None, found: tuple[object, object] | None
) -> tuple[object, object] | None:
    """Merge two samples from `few_rows` into one.

    If one sample is None, return the other sample. If the shapes do not fit together, return `known`.
    """
    if known is None or found is None or not can_join((known, found)):
        return known or found
    return few_rows(*join_rows((known, found)))


def _chosen(target: object, rows: int, count: int) -> list[int]:
    keys = [
        x for x in tensors_in(target) if x.dim() and len(x) == rows and not x.is_floating_point() and not x.is_complex()
    ]
    if not keys:
        return list(range(count))
    numbers = torch.cat([key.reshape(rows, -1).double() for key in keys], 1)
    order = numbers.mean(1).argsort(stable=True)
    sorted_rows: list[int] = order[numbers.amin(1)[order].argsort(stable=True)].tolist()
    low = sorted_rows[: count // 2]
    high = sorted_rows[rows - (count - count // 2) :]
    return [high[-1], *low, *high[:-1]]


def no_mean(
    loss: LossFunction, model: nn.Module, sample: tuple[object, object] | None, loss_weight: WeightFunction | None
) -> str:
    """Return why a batch's loss is not the mean of its parts' losses, or "".

    `sample` has a few rows from `few_rows`. The state of the loss is restored. "" may also mean that the test has no result.
    """
    if sample is None:
        return ""
    outputs, targets = map(Rows, sample)
    if outputs.count < 2:
        return ""
    drawn = torch.get_rng_state()

    def part(start: int, stop: int, *, is_wide: bool) -> tuple[float, float, torch.dtype, MeanOver | None]:
        target = targets.take(start, stop)

        def copied(x: Tensor) -> Tensor:
            return x.double() if is_wide and x.is_floating_point() and x.dtype != torch.float64 else x.clone()

        def learning(x: Tensor) -> Tensor:
            return copied(x).requires_grad_(x.is_floating_point() or x.is_complex())

        with loss_kept(loss, model), torch.enable_grad():
            value = loss(map_tensors(outputs.take(start, stop), learning), map_tensors(target, copied))
            over = mean_over(value)
        weight = float(stop - start)
        if loss_weight is not None:
            weight = float(loss_weight(target))
        elif over.count is not None and over.is_sole:
            weight = over.count
        return float(value.detach()), weight, value.dtype, None if over.counts_nothing(value) else over

    count = outputs.count
    largest = max(
        (float(x.abs().max()) for x in tensors_in(sample[0]) if x.numel() and x.is_floating_point()), default=1.0
    )
    # Use two parts of different sizes, because some errors cancel out if the parts have equal sizes.
    first = max(3 * count // 8, 1)
    spans = ((0, count), (0, first), (first, count))
    # Compute in float64 if possible, because late in training a loss may be as small as the rounding errors of float32.
    for is_wide in (True, False):
        try:
            (whole, of_whole, dtype, _), *parts = (part(start, stop, is_wide=is_wide) for start, stop in spans)
            break
        except Exception:
            continue
    else:
        return ""  # no result: the loss fails with so few rows or with equal targets
    # Give no result if the loss draws random numbers, which differ in each call.
    if not torch.equal(drawn, torch.get_rng_state()) or not of_whole > 0:
        return ""
    if loss_weight is None and any(over is not None and over.count is not None for *_, over in parts):
        parts = [one for one in parts if one[-1] is not None]
    total = sum(weight for _, weight, *_ in parts)
    together = sum(value * weight for value, weight, *_ in parts if weight > 0) / total if total > 0 else math.nan
    # A part's loss is nan if all its targets are ignored. If the number of targets is known, such a part is left out.
    is_only_part = any(over is not None and over.is_hidden for *_, over in parts) and math.isfinite(whole)
    if not math.isfinite(whole + together) and not (is_only_part and loss_weight is None):
        return ""
    rounding = ROUNDINGS * torch.finfo(dtype).eps * max(largest, 1.0) ** 2
    if abs(together - whole) <= max(LIMITS.get(dtype, 5e-2) * abs(whole), rounding):
        return ""
    return (
        f"loss(output, target) is {whole:.6g} for {count} rows together, and {together:.6g} for them in two parts, weighted by "
        f"{'loss_weight' if loss_weight is not None else 'what counts in each'}: it is not a mean over rows, and a batch is "
        "computed in parts (microbatches, accumulate, replicas). If it is a mean over something else, say over what: "
        "loss_weight=lambda target: (target != -100).sum(). If it compares rows with one another or is a root or a quotient of "
        "means (contrastive, RMSE, Dice), compute each batch in one part: microbatches=1 and accumulate=1 on one replica, or "
        "under TensorParallel(). To train each part by itself: check='off'."
    )
