"""`Parallel`, the result of `parallelize`: one training loop for every layout."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel import optimizers
from paceline.parallel.batches.batch import MetricFunction, Microbatch, WeightFunction
from paceline.parallel.batches.loader import Feed, feed
from paceline.parallel.batches.microbatches import GlobalBatch, OwnBatch, agree_on_place, agree_on_written, cut, tags
from paceline.parallel.compared import Comparison
from paceline.parallel.deterministic_rng import Streams, generators, generators_kept
from paceline.parallel.errors import ParallelError
from paceline.parallel.evaluate import evaluate
from paceline.parallel.exchange import gather
from paceline.parallel.executor import Executor, Progress, TrainingState
from paceline.parallel.failure import FailureWatch
from paceline.parallel.gradient_hooks import Hooks
from paceline.parallel.guards import KeptTensors, Layers
from paceline.parallel.loss_means import is_due, no_mean, scale_gradients
from paceline.parallel.mesh import World
from paceline.parallel.reduce import Clipper, broadcast
from paceline.parallel.rejoin import HandedOver, Rejoining, SaveArguments
from paceline.parallel.task import Task, own_loss
from paceline.system import step_clock

if TYPE_CHECKING:
    from paceline.parallel.auto import LayoutChoice
    from paceline.parallel.average import Average, Decay, Twin
    from paceline.parallel.check import Checked
    from paceline.parallel.checkpoint.state import Resumable
    from paceline.parallel.memory_plan import MemoryPlan
    from paceline.parallel.meta_model import Skeleton


class Parallel:
    """A model that is trained by all workers together; see `parallelize`.

    Every rank must call every method in the same order, and gets the same result. Tools may use the attributes `executor`,
    `world`, `task` and `optimizer`.
    """

    def __init__(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer | None,
        batches: Feed | None,
        world: World,
        *,
        build: Callable[[Callable[[], object]], Executor],
        clip_norm: float | None,
        original: optimizers.OriginalParameters,
        skeleton: Skeleton,
        choice: LayoutChoice | None = None,
        check_first: bool = True,
        comparison: Comparison,
    ) -> None:
        self.task = task
        self.optimizer = optimizer
        self.world = world
        self.clip_norm = clip_norm
        self.reason = None if choice is None else choice.reason
        #: The measurements behind the forecasts of `explain`. "auto" makes them; otherwise the first use makes them.
        self.measured = None if choice is None else choice.measured
        #: The memory that this worker may use, in bytes, or None if unknown.
        self.limit_bytes = None if choice is None else choice.limit_bytes
        #: A microbatch of the first step, for the measurements of `explain`.
        self.micro: Microbatch | None = None
        #: The argument `recompute` of the call of `parallelize`.
        self.recompute: str | Sequence[str] | None = None
        self.skeleton = skeleton
        #: The norm of the last step's gradients before clipping. None without clip_norm.
        self.gradient_norm: Tensor | None = None
        self._feed = batches
        self._build = build
        self._original = original
        self._executor: Executor | None = None
        self._kept = KeptTensors({})
        self._layers: Layers | None = None
        self._clipper: Clipper | None = None
        self._progress = Progress()
        self._resume: Progress | None = None
        self._streams = Streams(
            seed=task.seed,
            replica=world.replica,
            stage=world.coordinate("pipe"),
            device=world.device,
            active=world.size > 1,
        )
        self.watch = FailureWatch(world)
        self._is_stepping = False
        #: `memory_bytes`: one worker's memory, as passed to `parallelize`. `memory`: the plan for it, None without an executor.
        self.memory_bytes: int | None = None
        self.memory: MemoryPlan | None = None
        #: The result of the comparison with the plain model before the first step, as a text for `explain`.
        self.compared = "" if check_first else "not compared with the plain model: check='off'"
        #: A text that says where the parameters' values come from, or "" if the model already had values.
        self.source = ""
        self._check_first = check_first and (world.size > 1 or (task.microbatches > 1 and task.loss is own_loss))
        self._check_loss = check_first and (world.replicas > 1 or task.microbatches > 1) and task.loss is not own_loss
        self._hides_count = False
        self._comparison = comparison
        #: Averages of the weights, and `Twin`s (frozen submodules that follow another submodule), in the order of their creation.
        self.averages: list[Average | Twin] = []
        self._hooks = {name: Hooks(param) for name, param in task.model.named_parameters()}
        #: This rank's part in the replacement of lost ranks, or None in a run that replaces none.
        self.rejoining = Rejoining.of_run(self)
        if optimizer is not None and world.size > 1:
            own = weakref.ref(self)
            # Use a weak reference: this training must not live as long as the optimizer, which a second `parallelize` may use.
            optimizers.guard(optimizer, lambda: (par := own()) is None or par._is_stepping)

    def step(self, batch: object) -> Tensor:
        """Train on one batch. Return the mean loss over all ranks, 0-dim.

        `batch` comes from `epoch`, or is a whole global batch that is the same on every rank.

        Raises:
            ParallelError: The batch or the loss cannot be used.
            WorkerError: Another rank has failed. The message has its traceback.
        """
        with self.watch.guard("step()"):
            loss = self._step(batch) if self.rejoining is None else self.rejoining.step(lambda: self._step(batch))
        self._comparison.stepped(self, loss)
        return loss

    def _step(self, batch: object) -> Tensor:
        optimizer = self.optimizer
        if optimizer is None:
            raise ParallelError("step() needs an optimizer: parallelize(model, optimizer, ...).")
        self._refuse_averaged("step()")
        micros = cut(batch, self.task, self.world)
        executor = self.executor_for(batch)
        self.micro = self.micro or micros[0]
        if self._layers is not None:
            self._layers.refuse_changed()
        if self._check_first:
            from paceline.parallel.first_check import first_check

            self._check_first = False
            self.compared = first_check(self, batch, micros)
        optimizer.zero_grad(set_to_none=True)
        nn.Module.zero_grad(executor.module)
        means = self.task.means
        means.begin(checks=self._check_loss and (self._hides_count or is_due(self._progress.steps)))
        with self._streams.use("step", self._progress.steps), self._kept.explained(), self._comparison.watching():
            loss = executor.train_step(micros)
        work, group = None, self.world.replica_group
        # With one replica all ranks know the loss already, and the message only checks that they are at the same position in
        # the data. On a GPU skip the message, because the host would have to wait for the result.
        if group is not None or (self.world.size > 1 and loss.device.type == "cpu"):
            # One message sums the loss and a hash of the data position. All ranks use float64: dtypes of losses may differ.
            wide = loss.double()
            size = sum(executor.written.values())
            numbers = *tags((*self._place(batch), executor.program)), size, size * size, *means.numbers()
            sums = torch.stack([wide, *map(wide.new_tensor, numbers)])
            work = dist.all_reduce(sums, group=group, async_op=True)
        # Sum the gradients while the message with the loss is in transfer.
        executor.finish_gradients()
        if work is not None:
            work.wait()
            if group is not None:
                loss = sums[0].to(loss.dtype)
                # On a GPU read the sums for means over rows only in steps that check, because the host has to wait for the sums.
                if loss.device.type == "cpu" or not means.rows or means.checks:
                    means.fill(sums[5:].tolist())
            agree_on_place(sums[1:3], self._place(batch), executor.program, self.world)
            # On a GPU compare parameters that forward has changed only in the first step, because the host has to wait.
            if group is not None and (sums.device.type == "cpu" or self._progress.steps == 0):
                agree_on_written(sums[3:5], [*executor.written], self.world)
        if (factor := means.factor()) != 1.0:
            loss = loss * factor
            scale_gradients(executor.named_parameters(), factor)
        if means.checks:
            # Restore the script's random generators afterwards.
            with generators(0, self.device), generators_kept(), self.task.autocast(self.device):
                why = no_mean(self.task.loss, self.task.model, means.sample, self.task.loss_weight)
            # Gather the results of the check, so that all ranks raise an error. Otherwise some ranks would continue.
            everyone = gather((why, means.has_hidden))
            # If a loss hides how many targets count, check each later step: only a later batch may have ignored targets.
            self._hides_count = any(hides for _, hides in everyone)
            if why := next((why for why, _ in everyone if why), ""):
                raise ParallelError(why)
        if self.clip_norm is not None:
            self.gradient_norm = self.clipper.clip(self.clip_norm)
        self._is_stepping = True
        try:
            with self._comparison.learning():
                optimizer.step()
        finally:
            self._is_stepping = False
        for average in self.averages:
            average.stepped()
        epoch, consumed, steps = self._place(batch)
        self._progress = Progress(steps=steps + 1, epoch=epoch, consumed=consumed)
        return loss

    def epoch(self, epoch: int) -> Iterator[OwnBatch | GlobalBatch]:
        """Yield this rank's part of each batch of an epoch.

        `epoch` counts from 0, and seeds the order of the samples. After `load`, an epoch that was finished yields nothing, and
        the epoch that was interrupted yields its remaining batches.

        Raises:
            ParallelError: There is no loader, or the epoch is negative.
        """
        if epoch < 0:
            raise ParallelError(f"epoch({epoch}): epochs are numbered from 0.")
        if self._feed is None:
            raise ParallelError("epoch() needs a loader: parallelize(model, optimizer, loader, ...).")
        resume = self._resume or Progress(epoch=-1)
        if epoch < resume.epoch:
            if self.rejoining is not None:
                self.rejoining.epoch_ended(epoch, is_skipped=True)
            return
        self._resume = None
        batches = self._feed.epoch(epoch, resume.consumed if epoch == resume.epoch else 0)
        while (batch := self._next(batches)) is not None:
            yield batch
        if self._progress.epoch == epoch:
            # The epoch is over: a checkpoint that is saved now continues with the next epoch.
            self._progress = dataclasses.replace(self._progress, epoch=epoch + 1, consumed=0)
        if self.rejoining is not None:
            self.rejoining.epoch_ended(epoch)

    def _next(self, batches: Iterator[OwnBatch | GlobalBatch]) -> OwnBatch | GlobalBatch | None:
        with self.watch.guard("epoch()"):
            return next(batches, None)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        if self._feed is None:
            raise ParallelError("without a loader there is no number of batches.")
        return len(self._feed)

    @overload
    def evaluate(
        self, loader: object, metric: Callable[..., Mapping[str, object]], *, weight: WeightFunction | None = None
    ) -> dict[str, float]: ...

    @overload
    def evaluate(
        self,
        loader: object,
        metric: Callable[..., Tensor | float] | None = None,
        *,
        weight: WeightFunction | None = None,
    ) -> float: ...

    def evaluate(
        self, loader: object, metric: MetricFunction | None = None, *, weight: WeightFunction | None = None
    ) -> float | dict[str, float]:
        """Return the mean of metric(output, target) over all samples; see `evaluate.evaluate`.

        Each sample counts once. Without a metric, return the training loss, weighted by the training's `loss_weight`.
        """
        metric = metric or self.task.loss
        if weight is None and metric is self.task.loss:
            weight = self.task.loss_weight
        if self.rejoining is not None and (known := self.rejoining.known("evaluate()")) is not None:
            before: float | dict[str, float] = known[0]
            return before
        with self.watch.guard("evaluate()"):
            executor = self.executor_for_sample(lambda: feed(loader, self.task, self.world).sample())
            self.settle_buffers()
            with step_clock.counted(step_clock.EVAL):
                result = evaluate(executor, loader, metric, weight, self.task, self.world)
        if self.rejoining is not None:
            self.rejoining.note("evaluate()", result)
        return result

    def check(self, batch: object, limit: float | None = None) -> Checked:
        """Compare a training step's results with the unparallelized model's; see `check.check`."""
        with self.watch.guard("check()"):
            from paceline.parallel.check import check

            return check(self, batch, limit)

    def train(self, mode: bool = True) -> Parallel:
        """Set training or evaluation mode, as `nn.Module.train` does."""
        self.executor.train(mode)
        return self

    def eval(self) -> Parallel:
        """Set evaluation mode, as `nn.Module.eval` does."""
        return self.train(False)

    def average(
        self, decay: Decay = None, *, every: int = 1, of: str | None = None, into: str | None = None
    ) -> Average | Twin:
        """Average the weights after each step from now on.

        The average starts with the current weights. Each update sets it to decay * average + (1 - decay) * weights.

        Args:
            decay: From 0 (copies the weights) to 1, or a function of the number of earlier updates. None: the mean of
                the weights at all updates.
            every: Update after this many steps.
            of: The name of a submodule that a second submodule, `into`, follows. The second submodule is frozen (a
                target network, a momentum encoder). If both names are None, a copy of the whole model is averaged.
            into: The name of the second submodule, see `of`.

        Returns:
            The average, with `applied()` and `full_state_dict()`. With `into`: a `Twin` with its number of updates.

        Raises:
            ParallelError: The submodules differ in shape, or the second is trained.
        """
        with self.watch.guard("average()"):
            from paceline.parallel.average import Average, Twin

            self._refuse_averaged("average()")
            if (of is None) != (into is None):
                raise ParallelError(f"average(of={of!r}, into={into!r}): give both, or neither for the whole model.")
            follower = Average(self, decay, every) if of is None or into is None else Twin(self, decay, every, of, into)
            self.averages.append(follower)
            return follower

    def _refuse_averaged(self, call: str) -> None:
        if any(average.is_applied for average in self.averages):
            raise ParallelError(
                f"{call} was called while the average is in the model's place. Leave the block of average.applied() first."
            )

    def save(
        self,
        path: str | Path | None = None,
        *,
        asynchronous: bool | None = None,
        schedulers: Sequence[Resumable] = (),
        every: int | None = None,
    ) -> Path | None:
        """Save a checkpoint. Return its path, or None if `every` skips it; see `checkpoint.save`."""
        if self.rejoining is not None and (known := self.rejoining.known("save()")) is not None:
            return None if known[0] is None else Path(known[0])
        with self.watch.guard("save()"), step_clock.counted(step_clock.SAVE):
            self._refuse_averaged("save()")
            from paceline.parallel.checkpoint import store

            def save() -> Path | None:
                return store.save(self, path, asynchronous=asynchronous, schedulers=schedulers, every=every)

            if self.rejoining is None:
                return save()
            given = SaveArguments(None if path is None else str(path), asynchronous, every)
            return self.rejoining.save(save, given, schedulers)

    def wait(self) -> None:
        """Wait until the writes of `save(asynchronous=True)` are complete; see `checkpoint.wait`."""
        with self.watch.guard("wait()"), step_clock.counted(step_clock.SAVE):
            from paceline.parallel.checkpoint import store

            store.wait(self)

    def load(self, path: str | Path | None = None, *, schedulers: Sequence[Resumable] = ()) -> bool:
        """Resume from a checkpoint. Return False if none exists; see `checkpoint.load`."""
        with self.watch.guard("load()"):
            self._refuse_averaged("load()")
            from paceline.parallel.checkpoint import store

            if self.rejoining is not None and self.rejoining.is_new:
                self.rejoining.join(schedulers)
                return True
            found = store.load(self, path, schedulers=schedulers)
            if self.rejoining is not None:
                self.rejoining.loaded(path, schedulers)
            return found

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model on the CPU, on every rank.

        The names are the plain model's, so the plain model's `load_state_dict` accepts the result.
        """
        with self.watch.guard("full_state_dict()"):
            from paceline.parallel.checkpoint import store

            self.settle_buffers()
            return store.full_state_dict(self)

    def save_safetensors(self, path: str | Path) -> Path:
        """Write the model in Hugging Face's layout, and return the folder; see `large.saved`."""
        with self.watch.guard("save_safetensors()"):
            from paceline.parallel.large.saved import save_safetensors

            return save_safetensors(self, path)

    @property
    def progress(self) -> Progress:
        """The position of training: finished steps, epoch and consumed samples."""
        return self._progress

    def state(self) -> TrainingState:
        """Return the training's progress and random state, for a checkpoint."""
        order = None if self._feed is None else self._feed.order
        return {"progress": dataclasses.asdict(self._progress), "random": self._streams.state_dict(), "order": order}

    def load_state(self, state: TrainingState) -> None:
        """Restore the result of the method `state`, even of another layout."""
        self._progress = self._resume = Progress(**state["progress"])
        self._streams.load_state_dict(state["random"])
        if self._feed is not None:
            self._feed.adopt(state["random"]["seed"], state.get("order"))

    @property
    def unfit(self) -> str:
        """Why lost workers can't be replaced without a restart, or ""."""
        if self.reason is not None:
            return "strategy='auto' measures with all ranks; name the strategy that par.explain() shows"
        if type(self._comparison) is not Comparison:
            return "paceline check compares its steps"
        if self._feed is not None and not self._feed.is_local:
            return "the ranks compare the loader's batches, or rank 0 draws their order"
        return ""

    def handed_over(self) -> HandedOver:
        """Return values that checkpoints lack, for a rank that replaces a lost rank."""
        return {"compared": self.compared, "hides_count": self._hides_count, "gradient_norm": self.gradient_norm}

    def take_over(self, values: HandedOver, progress: Progress) -> None:
        """Continue at another rank's position, with its values that checkpoints lack."""
        self.compared, self._hides_count = values["compared"], values["hides_count"]
        self.gradient_norm = values["gradient_norm"]
        self._check_first = False
        self._progress = progress

    @property
    def rank(self) -> int:
        """The worker's number, from 0."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """The worker's device."""
        return self.world.device

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model, under the names of the user's model.

        Use it for inspection only: calling it trains on this rank's rows alone.
        """
        return self.executor.module

    @property
    def executor(self) -> Executor:
        """The object that computes a step in this layout, made on first access."""
        return self.executor_for_sample(lambda: None)

    @property
    def clipper(self) -> Clipper:
        """The object that clips gradients by their norm over all workers."""
        if self._clipper is None:
            self._clipper = Clipper(self.executor.named_parameters(), self.world)
        return self._clipper

    def explain(self) -> str:
        """Describe the layout, its cost, and the reason for choosing it."""
        from paceline.parallel.explain import explain

        return explain(self)

    def __repr__(self) -> str:
        return f"Parallel({self.skeleton.name}, {self.world.layout}, rank {self.rank} of {self.world_size})"

    def executor_for(self, batch: object) -> Executor:
        """Return the object that computes steps. Make it with this batch on first use."""
        return self.executor_for_sample(lambda: batch)

    def executor_for_sample(self, sample: Callable[[], object]) -> Executor:
        """Return the object that computes steps. Make it with the batch `sample()` on first use."""
        if self._executor is None:
            self.skeleton.follow()
            executor = self._build(sample)
            self.skeleton.begin()
            if self.optimizer is not None:
                self._original.hand_over(self.optimizer, executor.named_parameters())
            self._original.forget()
            for name, param in executor.named_parameters().items():
                self._hooks.setdefault(name, Hooks()).also(param)
            self._kept = KeptTensors(executor.named_parameters())
            self._layers = Layers(self.task.model, executor.module)
            self._executor = executor
            # Plan the memory only if there is an optimizer, because the plan is for training.
            if self.optimizer is not None:
                from paceline.parallel import memory_plan

                self.memory = memory_plan.check(self, self.memory_bytes)
        return self._executor

    @property
    def gradient_hooks(self) -> dict[str, Hooks]:
        """Parameter's name -> hooks that the user has registered on its gradient."""
        return {name: hooks for name, hooks in self._hooks.items() if hooks}

    def settle_buffers(self) -> None:
        """Make the replicas' buffers equal, if batch_norm="local" lets them differ."""
        if self.world.layout.batch_norm == "local":
            broadcast(list(self.executor.module.buffers()), self.world.replica_group)

    def _place(self, batch: object) -> tuple[int, int, int]:
        """Return (epoch, consumed samples including this batch, finished steps)."""
        known = batch if isinstance(batch, (OwnBatch, GlobalBatch)) else self._progress
        return known.epoch, known.consumed, self._progress.steps
