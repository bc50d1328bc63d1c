"""Evaluation: a metric over all samples of a loader, each counted once in every layout."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.batches.batch import LossFunction, MetricFunction, Microbatch, WeightFunction
from paceline.parallel.batches.loader import feed
from paceline.parallel.batches.microbatches import cut, weigh
from paceline.parallel.deterministic_rng import generators, generators_kept
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import gather
from paceline.parallel.executor import Executor
from paceline.parallel.loss_means import STEP_NUMBERS, StepMeans, few_rows, mean_over, no_mean
from paceline.parallel.loss_state import loss_kept
from paceline.parallel.mesh import World
from paceline.parallel.pytree import map_tensors
from paceline.parallel.task import Task, own_loss, refuse_ignored
from paceline.parallel.tracing.fake_model import modes_kept


def evaluate(
    executor: Executor, loader: object, metric: MetricFunction, weight: WeightFunction | None, task: Task, world: World
) -> float | dict[str, float]:
    """Return the metric's mean over all samples.

    Every rank must call this. The model computes in evaluation mode. If the metric returns a dict, so does this function.

    Args:
        executor: The executor that computes the model's outputs.
        loader: Global batches, or a DataLoader as for `parallelize`.
        metric: (output, target) -> the mean over these rows, or a dict of means.
        weight: target -> the number by which the metric's mean divides. None: the number of rows, or the number that the loss
            shows in its graph if the metric is the training's loss.
        task: The training's task. Its `split` divides a batch into arguments and target.
        world: This rank, with the process groups of its layout.

    Raises:
        ParallelError: The metric is not a number, or the loader is empty.
    """
    # Drop `loss_weight`, which is for the training loss. Without it, `cut` gives each row the weight 1, and padding the weight 0.
    counted = dataclasses.replace(task, loss_weight=None)
    is_loss = metric is task.loss and weight is None
    means = _Means(metric, weight, lambda: task.autocast(world.device), executor.module, is_loss=is_loss)
    # To find the number by which the model's own loss divides, the loss needs the graph of its forward pass.
    predict = (torch.enable_grad() if metric is own_loss and weight is None else torch.no_grad())(executor.predict)
    with evaluating(executor):
        parts = (predict(cut(batch, counted, world), means) for batch in feed(loader, counted, world).epoch(0))
        if (first := next(parts, None)) is None:
            raise ParallelError("the loader to evaluate on gave no batch.")
        of_batches = torch.stack([first, *parts]).to(world.device)
    group = world.replica_group
    if group is not None:
        dist.all_reduce(of_batches, group=group)
    if is_loss and (why := max(gather(means.why))):
        raise ParallelError(why.replace("loss_weight=", "weight="))
    values = of_batches[:, :-STEP_NUMBERS].sum(0).tolist()
    for step in (StepMeans(*numbers) for numbers in of_batches[:, -STEP_NUMBERS:].tolist()):
        # Unlike a step, an evaluation may have batches in which no target counts.
        if step.weight > 0 or step.unclear or step.rows:
            step.factor()
    if not values[-1] > 0:
        raise ParallelError(f"the weights of all rows sum to {values[-1]:g}, so there is no mean.")
    results = [value / values[-1] for value in values[:-1]]
    names = means.names_of(world, len(results))
    return results[0] if names is None else dict(zip(names, results, strict=True))


@contextlib.contextmanager
def evaluating(executor: Executor) -> Iterator[None]:
    """Within the block, set the model to evaluation mode."""
    was_training = executor.module.training
    with modes_kept(executor.module):
        executor.train(False)
        try:
            yield
        finally:
            executor.train(was_training)


class _Means:
    """A callable for `Executor.predict` that returns weighted metrics.

    The result is [weight * metric, ..., weight, *StepMeans.numbers()]. To get the means, sum these lists, then divide by the
    weight.
    """

    def __init__(
        self,
        metric: MetricFunction,
        weight: WeightFunction | None,
        autocast: Callable[[], AbstractContextManager[object]],
        model: nn.Module,
        *,
        is_loss: bool,
    ) -> None:
        self._metric = metric
        self._weight = weight
        self._autocast = autocast
        self._model = model
        self._is_loss = is_loss
        self._names: list[str] | None = None
        self._called, self.why = False, ""

    def __call__(self, output: object, micro: Microbatch) -> Tensor:
        # Call the metric under autocast, as training calls the loss, so that losses of bf16 outputs are computed in float32.
        weight, step = weigh(self._weight, micro.target, micro.rows), StepMeans()
        # Call the metric even for padding, to learn how many numbers the metric returns. Restore the metric's state afterwards.
        kept = contextlib.nullcontext() if weight else loss_kept(self._metric, self._model)
        with self._autocast(), kept, torch.set_grad_enabled(self._is_loss):
            if self._is_loss and self._metric is not own_loss:
                output = map_tensors(output, lambda x: x.detach().requires_grad_(x.is_floating_point()))
            result = self._metric(output, micro.target)
        if self._is_loss and weight and isinstance(result, Tensor):
            over = mean_over(result, (output, micro.target))
            if over.is_hidden and self._metric is not own_loss and micro.weight < 1.0:
                with generators(0, result.device), generators_kept(), self._autocast():
                    sample = few_rows(output, micro.target)
                    self.why = self.why or no_mean(cast(LossFunction, self._metric), self._model, sample, None)
            if self._metric is own_loss and micro.weight < 1.0 and (over.is_hidden or not result.requires_grad):
                refuse_ignored(micro, "weight")
            # A loss of 0 with an unknown divisor may be a mean over rows, so weight it by its rows.
            nothing = 0.0 if over.count is not None else weight
            weight = nothing if over.counts_nothing(result) else step.add(over, weight, micro.rows)
        self._called = True
        if isinstance(result, Mapping):
            self._names = [str(name) for name in result]
            values = [_number(name, value) for name, value in result.items()]
        else:
            values = [_number("metric", result)]
        shares = [weight * value if weight else 0.0 for value in values]
        return torch.tensor([*shares, weight, *step.numbers()], dtype=torch.float64, device="cpu")

    def names_of(self, world: World, count: int) -> list[str] | None:
        """Return the metric's dict keys on every rank, None for a plain number.

        The last pipeline stage alone calls the metric, so it sends the names to all stages. `count`: The number of names.
        """
        group = world.group("pipe")
        if group is None:
            return self._names
        # Only the worker of the last stage sees outputs and calls the metric. So get the metric's names from this worker.
        everyone = gather(self._names if self._called else None, group)
        names = next((names for names in everyone if names is not None), None)
        assert names is None or len(names) == count
        return names


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ParallelError(
            f"metric(output, target) gave a tensor of shape {list(value.shape)} for {name!r}; it has to give the mean over the "
            "rows as one number, or a dict of such."
        )
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError) as error:
        raise ParallelError(
            f"metric(output, target) gave {type(value).__name__} for {name!r}; it has to give one number, or a dict of numbers."
        ) from error
