"""`paceline.parallelize`: lay out a plain model and its optimizer over all workers.

The function takes these steps. Each line names the module that implements the step:

    1  join the process group             mesh.start, or a world of one process
    2  choose the layout                  strategy.resolve, or auto.choose
    3  make the model equal on all ranks  initial_broadcast
    4  adapt batch normalisation          normalization
    5  cut the model                      pipeline or tensor (stages, layers), context, experts
    6  replicate or shard the model       core.Plain (DDP, FSDP2)
    7  replace the optimizer's parameters optimizers.adopt, after the first executor is made

Importing this module does not need torch. Calling `parallelize` does.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline import torch_private
from paceline.parallel.errors import ParallelError, check_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.parallel.batches.batch import LossFunction, Microbatch, SplitFunction, WeightFunction
    from paceline.parallel.executor import Executor
    from paceline.parallel.mesh import World
    from paceline.parallel.strategy import Joinable
    from paceline.parallel.task import Task
    from paceline.parallel.training import Parallel


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Iterable[object] | None = None,
    *,
    loss: LossFunction | None = None,
    strategy: Joinable | Literal["auto"] = "auto",
    microbatches: int = 1,
    clip_norm: float | None = None,
    loss_weight: WeightFunction | None = None,
    split: SplitFunction | None = None,
    precision: Literal["bf16"] | None = None,
    seed: int = 0,
    find_unused: bool | None = None,
    memory_bytes: int | None = None,
    device: torch.device | str | None = None,
    sample: object = None,
    check: Literal["first", "off"] = "first",
    weights: str | os.PathLike[str] | None = None,
    recompute: str | Sequence[str] | None = None,
    accumulate: int = 1,
) -> Parallel:
    """Lay out the model over all workers.

    Call this on every rank with the same arguments. The optimizer stays the same object, so schedulers keep working.
    Train only by the result's `step(batch)`: do not call the model, or the optimizer's `step` and `zero_grad`.

    Args:
        model: The plain model, with the same structure on every rank. Rank 0's values are used.
        optimizer: The model's optimizer, or None to evaluate only.
        loader: A DataLoader or another iterable, whose batches have the samples of all workers together.
        loss: (output, target) -> the mean over the rows, or over the targets that are not ignored. None takes the
            model's own loss: the model gets the whole batch with its labels, and returns the loss (0-dim), a dict or an
            object with `loss`, or a tuple that starts with the loss.
        strategy: DataParallel(), FullyShard(), PipelineParallel(), TensorParallel(), ContextParallel(), ExpertParallel(),
            several joined by @, or "auto".
        microbatches: Compute each batch in this many parts and sum their gradients.
        clip_norm: The largest allowed norm of all gradients together. None does not clip.
        loss_weight: target -> the number that the loss divides by, such as the number of tokens that are not padding.
            None finds it in the loss's graph (ignore_index, class weights, a mask), or else takes the number of rows.
        split: batch -> Parts(args, kwargs, target). None accepts (x, ..., y), or a dict with "labels", "target" or "y".
        precision: "bf16" computes under autocast. Parameters keep their dtype.
        seed: The seed of the sample order and of dropout, the same on all ranks.
        find_unused: Whether the model may skip parameters in some steps. None decides from the first step.
        memory_bytes: The memory of one worker, which limits the layouts that "auto" chooses and the cuts of a pipeline. With
            None "auto" uses the machine's free memory, and a pipeline's cuts have no limit.
        device: This rank's device. None takes this rank's GPU, or the CPU if there is no GPU.
        sample: A small global batch for a trial of the model before the model is cut. None takes one from the loader.
        check: "first" compares loss and gradients of a few rows with the plain model before the first step, and raises an
            error if they differ. `explain` reports the result. "off" skips the comparison.
        weights: A folder of safetensors in Hugging Face's layout, or one such file, for parameters and buffers. Each worker
            reads its own part. None keeps the model's values. For a model built under `paceline.parallel.empty()`, None
            gives it the constructor's values, and each worker makes its own part.
        recompute: "blocks" keeps only each block's input and computes all other activations again in the backward pass
            (activation checkpointing): less memory for about a third more time. A list of `fnmatch` patterns names the blocks.
        accumulate: Cut each batch into this many parts, and each part into `microbatches`. Compute one part after the other,
            and sum the gradients for one optimizer step. A pipeline holds the microbatches of one part at a time.

    Raises:
        ParallelError: (also a ValueError) An argument or the model cannot be used. The message says what to change.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 3
        >>> par = pl.parallelize(model, optimizer, batches, loss=torch.nn.functional.mse_loss, strategy=pl.DataParallel())
        >>> for batch in par.epoch(0):
        ...     loss = par.step(batch)
    """
    # Only search for torch: if importing it fails, torch's own error is better than the error below.
    if find_spec("torch") is None:
        raise ParallelError(
            "parallelize needs torch, which this Python doesn't have; pip install 'paceline[torch]', "
            "or name torch in the job's environment."
        )
    if too_old := torch_private.too_old("parallelize"):
        raise ParallelError(too_old)
    torch_private.warn_if_untried("parallelize")
    from paceline.parallel import guards, initial_broadcast, mesh, regroup
    from paceline.parallel import strategy as strategies
    from paceline.parallel.batches.batch import default_split
    from paceline.parallel.batches.loader import feed
    from paceline.parallel.compared import Comparison
    from paceline.parallel.exchange import journal
    from paceline.parallel.failure import FailureWatch
    from paceline.parallel.guards import check_fits
    from paceline.parallel.large import meta_parameters
    from paceline.parallel.large.values import TensorValues
    from paceline.parallel.meta_model import Skeleton
    from paceline.parallel.optimizers import OriginalParameters
    from paceline.parallel.task import Task, own_loss, own_split
    from paceline.parallel.training import Parallel

    comparison = Comparison.begin()
    place = mesh.start(device)
    journal.is_kept = regroup.first_generation() is not None and not journal.results
    # From here on report an error on one rank to the other ranks, which would otherwise wait for it.
    with FailureWatch(mesh.joined(place)).guard("parallelize()"):
        _check_model(model, optimizer)
        _check_loss(loss)
        check_count(f"microbatches={microbatches!r}", microbatches)
        check_count(f"accumulate={accumulate!r}", accumulate)
        check_count(f"seed={seed!r}", seed, "a whole number", least=float("-inf"))
        _check_options(clip_norm, precision, check, weights, recompute)
        comparison.prepare(model)
        strategy = comparison.strategy(strategy)
        guards.refuse_shared(model)
        meta_parameters.move(model, place.device)
        if meta_parameters.is_empty(model) and place.device.type == "cpu":
            meta_parameters.return_memory()
        values = TensorValues(model, seed, None if weights is None else Path(weights))
        values.fill_buffers(place.device)
        task = Task(
            model=model,
            loss=loss or own_loss,
            loss_weight=loss_weight,
            split=comparison.split(split or (own_split(model) if loss is None else default_split)),
            microbatches=microbatches * accumulate,
            precision=precision,
            seed=seed,
            accumulate=accumulate,
        )
        original = OriginalParameters(model, optimizer)
        skeleton = Skeleton(model)
        settings = {
            "strategy": strategy,
            "clip_norm": clip_norm,
            "find_unused": find_unused,
            "check": check,
            "loss": "the model's own" if loss is None else "a function",
            "loss_weight": loss_weight is not None,
            "loader": type(loader).__qualname__,
            "recompute": recompute,
            "accumulate": accumulate,
            "weights": weights is not None,
        }
        # Compare the ranks' models before rank 0 sends its weights: other shapes would let the broadcast fail or hang.
        initial_broadcast.check(task, optimizer, place, settings)
        if optimizer is not None and strategy != "auto" and not values.empty:
            from paceline.parallel import memory_plan

            memory_plan.refuse_too_large(
                model, optimizer, strategies.resolve(strategy, place.size), place, memory_bytes
            )
        initial_broadcast.share(model)
        choice = None
        if strategy == "auto":
            from paceline.parallel import auto

            batch = sample
            if batch is None and loader is not None:
                # Use any layout to take a sample batch, because the global batch is the same with every layout.
                batch = feed(loader, task, mesh.build(place, strategies.Layout(data=place.size))).sample()
            choice = auto.choose(task, optimizer, batch, place, memory_bytes)
            strategy = choice.strategy
        world = mesh.build(place, strategies.resolve(strategy, place.size))
        check_fits(task.model, optimizer, world.layout, task.microbatches)
        guards.refuse_shared(task.model, world.layout)
        if values.empty:
            from paceline.parallel.memory_plan import refuse_no_room

            refuse_no_room(task.model, optimizer, world, memory_bytes)

        def build(batch: Callable[[], object]) -> Executor:
            def first() -> object:
                if sample is not None:
                    return sample
                own = batch()
                return own if own is not None or feed_of_loader is None else feed_of_loader.sample()

            guards.refuse_shared(task.model, world.layout)
            executor = _build(task, world, first, find_unused, memory_bytes, recompute)
            guards.take(task.model, world.layout)
            values.fill(executor.named_parameters())
            return executor

        feed_of_loader = feed(loader, task, world) if loader is not None else None
        par = Parallel(
            task,
            optimizer,
            feed_of_loader,
            world,
            build=build,
            clip_norm=clip_norm,
            original=original,
            skeleton=skeleton,
            choice=choice,
            check_first=check == "first",
            comparison=comparison,
        )
        par.source, par.memory_bytes, par.recompute = values.source, memory_bytes, recompute
        par.limit_bytes = par.limit_bytes or memory_bytes
        # Take no sample batch from a loader that is an iterator: training would miss that batch.
        can_sample = sample is not None or (feed_of_loader is not None and not hasattr(loader, "__next__"))
        needs_sample = world.layout.pipe > 1 or (world.layout.tensor > 1 and world.layout.plan is None)
        if can_sample or not needs_sample:
            par.executor_for_sample(lambda: None)
        journal.is_kept = False
        comparison.start()
        if par.rejoining is not None:
            par.rejoining.returned()
        return par


def _build(
    task: Task,
    world: World,
    sample: Callable[[], object],
    find_unused: bool | None,
    memory_bytes: int | None,
    again: str | Sequence[str] | None,
) -> Executor:
    """Lay out the task's model over the workers, and return the executor.

    `sample` returns a global batch, or None. `again` names the blocks to recompute, if any.
    """
    from paceline.parallel import tied_parameters
    from paceline.parallel.large.meta_parameters import give_memory
    from paceline.parallel.recompute import recompute
    from paceline.parallel.replicas import normalization

    layout = world.layout
    if layout.replicas > 1 and layout.batch_norm == "sync":
        normalization.synchronise(task.model, world.replica_group)
    elif layout.pipe > 1 or layout.replicas > 1:
        normalization.synchronise(task.model, None)
    if layout.pipe > 1:
        from paceline.parallel.pipeline import executor as pipeline

        if again is not None:
            recompute(task.model, again)
        return pipeline.build(task, world, _first_micro(task, world, sample()), memory_bytes=memory_bytes)
    from paceline.parallel.tensor.plan import fold

    notes: list[str] = []
    summed: list[nn.Parameter] = []
    if layout.tensor > 1:
        from paceline.parallel.batches.microbatches import first_rows
        from paceline.parallel.tensor import cutting

        batch = sample()
        micro = None if batch is None and layout.plan is not None else _first_micro(task, world, batch)
        few = None if micro is None else first_rows(batch, task, world, cutting.few_rows(task.model))
        tied = tied_parameters.find(task.model)
        notes = cutting.apply(task.model, world, layout.plan, tied, micro, task.weighted_loss, few).lines
    if layout.context > 1:
        from paceline.parallel import context

        notes += context.apply(task.model, world)
    if layout.expert > 1:
        from paceline.parallel import experts

        lines, summed = experts.apply(task.model, world)
        notes += lines
    from paceline.parallel.replicas.core import Plain

    if again is not None:
        # Mark recomputed blocks only after the search for layers to cut, which recognises layers by their class.
        notes = [*notes, f"computed again in the backward pass: {', '.join(fold(recompute(task.model, again)))}"]
    if layout.shard == 1:
        give_memory(world.device, task.model)
    return Plain(task, world, find_unused=find_unused, notes=notes, summed=summed)


def _first_micro(task: Task, world: World, batch: object) -> Microbatch:
    from paceline.parallel.batches.microbatches import cut

    if batch is None:
        raise ParallelError(
            f"{world.layout} needs a batch to cut the model, but has no batch yet: the loader is missing, or can "
            "be iterated only once. Give parallelize(..., sample=batch), or call step() first."
        )
    return cut(batch, task, world)[0]


def _check_model(model: object, optimizer: object) -> None:
    import torch
    from torch import nn

    from paceline.parallel.gradient_hooks import Hooks

    if not isinstance(model, nn.Module):
        raise ParallelError(f"model={type(model).__name__}: give a torch.nn.Module.")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ParallelError(
            "model is wrapped in DistributedDataParallel already. Give the plain model; parallelize spreads it."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ParallelError(
            f"optimizer={type(optimizer).__name__}: give a torch.optim.Optimizer, or None to evaluate alone."
        )
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise ParallelError(f"{name} has no shape yet (a lazy module). Call the model once before parallelize.")
        if param.is_meta and Hooks(param):
            raise ParallelError(
                f"{name} has a hook on its gradient, and no memory yet. Register hooks on par.module's parameters, after "
                "parallelize."
            )


def _check_options(clip_norm: object, precision: object, check: object, weights: object, recompute: object) -> None:
    are_names = isinstance(recompute, (list, tuple)) and recompute and all(isinstance(x, str) and x for x in recompute)
    for is_right, message in (
        (
            clip_norm is None or (isinstance(clip_norm, (int, float)) and clip_norm > 0),
            f"clip_norm={clip_norm!r}: a number above 0, or None not to clip.",
        ),
        (precision in (None, "bf16"), f"precision={precision!r}: None or 'bf16'."),
        (check in ("first", "off"), f"check={check!r}: 'first' or 'off'."),
        (
            weights is None or isinstance(weights, (str, os.PathLike)),
            f"weights={type(weights).__name__}: the path of a folder of safetensors, or None.",
        ),
        (
            are_names or recompute in (None, "blocks"),
            f"recompute={recompute!r}: 'blocks', a list of modules' names such as ['layers.*'], or None.",
        ),
    ):
        if not is_right:
            raise ParallelError(message)


#: Parameter names by which to recognise a loss that calls the model itself, or that takes the whole batch.
_MODELS, _BATCHES = ("model", "net", "network", "module"), ("batch", "batch_data")


def _check_loss(loss: object) -> None:
    """Raise ParallelError if the loss takes other parameters than (output, target).

    A function of (model, batch) would fail with "'Tensor' object is not callable", or silently train on single rows.
    """
    if loss is None:
        return
    if isinstance(loss, type):
        raise ParallelError(f"loss={loss.__name__}: that is the class; write {loss.__name__}().")
    if not callable(loss):
        raise ParallelError(
            f"loss={loss!r}: give a function of (output, target), such as torch.nn.functional.cross_entropy, or None for a model "
            "that returns its own."
        )
    try:
        parameters = [*inspect.signature(loss).parameters.values()]
    except (TypeError, ValueError):
        # The signature is unknown, for example that of a function written in C. So skip this check of the loss.
        return
    names = [param.name for param in parameters if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)]
    if len(names) < 2 or (names[0] not in _MODELS and names[1] not in _BATCHES):
        return
    called = getattr(loss, "__name__", type(loss).__name__)
    raise ParallelError(
        f"loss={called}({names[0]}, {names[1]}): a loss gets (output, target): what the model has returned, and the second "
        "part of the batch. Paceline calls the model itself. Write it as "
        f"def {called if called.isidentifier() else 'loss'}(output, target), and call no model in it."
    )
