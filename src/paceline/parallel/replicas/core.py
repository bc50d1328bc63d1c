"""The executor of the layouts in which every rank computes the whole model.

    layout                     gradients are summed over the replicas by
    one process                no sum is needed
    data                       DistributedDataParallel (DDP) during the backward pass; in the first step `reduce.sum_gradients`
    shard, data x shard        FSDP2
    data x tensor, context     `reduce.sum_gradients`, after the backward pass

DDP must know the unused parameters beforehand. So the first step runs without DDP, to find these parameters.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.batches.batch import Microbatch, with_rows
from paceline.parallel.errors import ParallelError
from paceline.parallel.failure import at_microbatch
from paceline.parallel.loss_state import LossReads
from paceline.parallel.mesh import World
from paceline.parallel.reduce import sum_gradients
from paceline.parallel.replicas import normalization, shard
from paceline.parallel.replicas.shard import Written, size_of
from paceline.parallel.task import Task
from paceline.parallel.tracing.source import shown

_log = logging.getLogger(__name__)


class Plain:
    """An object that computes the whole model in each step on this rank.

    Attributes:
        find_unused: Whether steps may skip different parameters. None: all steps skip the same parameters.
        notes: Lines for `explain` about cut layers.
        summed: Parameters whose gradients must be summed over the expert group.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        find_unused: bool | None = None,
        notes: Sequence[str] = (),
        summed: Sequence[nn.Parameter] = (),
    ) -> None:
        self._summed = tuple(summed)
        self.notes = tuple(notes)
        self._task = task
        self._world = world
        self._module = task.model
        self.program = 0
        self.written: dict[str, float] = {}
        self._units_written: list[Written] = []
        self._is_sharded = world.layout.shard > 1
        self._used: Any = None
        self._loss_is_known = False
        if self._is_sharded:
            from paceline.parallel.replicas.shard_used import Used

            self._units_written = shard.shard_stage(self._module, world)
            self._used = Used(self._module, world, find_unused)
        # DDP can't be used with tensor, context or expert parallelism, because these sum gradients over other groups of ranks.
        is_plain = max(world.layout.tensor, world.layout.context, world.layout.expert) == 1
        uses_ddp = not self._is_sharded and world.layout.data > 1 and is_plain
        learns = any(param.requires_grad for param in self._module.parameters())
        self._ddp = _Replicated(self._module, world, find_unused) if uses_ddp and learns else None

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def unused(self) -> tuple[str, ...]:
        """The names of the parameters without a gradient in the first step."""
        watched = self._ddp or self._used
        return () if watched is None else watched.unused

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters())

    def train_step(self, micros: Sequence[Microbatch]) -> Tensor:
        losses = []
        if (watched := self._ddp or self._used) is not None:
            watched.follow()
        micros = with_rows(micros)
        versions = {name: param._version for name, param in self._plain_parameters()}
        for micro in micros:
            is_last = micro is micros[-1]
            if self._used is not None:
                self._used.settle()
            with at_microbatch(micro.index), self._synchronised(is_last) as model:
                with self._task.autocast(self._world.device), normalization.counting(micro):
                    loss = self._loss(model(*micro.args, **micro.kwargs), micro)
                if self._used is not None:
                    self._used.watch()
                # If the loss has no gradient, skip the backward pass: all parameters are frozen, or this replica has no rows.
                if loss.requires_grad:
                    # Divide by the number of context workers: each of them has the whole loss, and their gradients are summed.
                    share = loss / self._world.layout.context if self._world.layout.context > 1 else loss
                    share.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.written = self._sizes_written(versions)
        return functools.reduce(torch.add, losses)

    def _plain_parameters(self) -> list[tuple[str, nn.Parameter]]:
        own = {id(param) for param in shard.left_whole(self._module)} if self._is_sharded else None
        return [(name, param) for name, param in self._module.named_parameters() if own is None or id(param) in own]

    def _sizes_written(self, versions: Mapping[str, int]) -> dict[str, float]:
        sizes = {name: size_of(param) for name, param in self._plain_parameters() if param._version != versions[name]}
        for written in self._units_written:
            sizes |= written.sizes
            written.sizes = {}
        return sizes

    def _loss(self, output: object, micro: Microbatch) -> Tensor:
        if not self._is_sharded or self._loss_is_known:
            return self._task.weighted_loss(output, micro)
        with LossReads(self._module) as reads:
            reads.may_read(output, micro.target, micro.weight)
            try:
                loss = self._task.weighted_loss(output, micro)
            except Exception as error:
                self._refuse_parts(reads, error)
                raise
        self._refuse_parts(reads, None)
        self._loss_is_known = micro.rows > 0
        return loss

    def _refuse_parts(self, reads: LossReads, error: Exception | None) -> None:
        for name, line in reads.parts.items():
            raise ParallelError(
                f"the loss reads {name} of the model itself at {shown(line)}, of which each worker has a part under "
                "FullyShard(). Compute that in the model's forward and return it beside the output, or use DataParallel()."
            ) from error

    def finish_gradients(self) -> None:
        group = self._world.replica_group
        if self._is_sharded:
            # Sum only the whole parameters: FSDP2 has summed the gradients of its shards in the backward pass.
            self._used.finish()
            sum_gradients(shard.left_whole(self._module), group)
            sum_gradients(self._module.parameters(), self._world.group("context"))
        elif self._ddp is not None:
            self._ddp.finish()
        else:
            sum_gradients(self._module.parameters(), self._world.gradient_group)
            sum_gradients(self._summed, self._world.group("expert"))

    def predict(self, micros: Sequence[Microbatch], consume: Callable[[object, Microbatch], Tensor]) -> Tensor:
        parts = []
        # Return only this replica's sum. The caller adds the replicas' sums.
        for micro in with_rows(micros):
            with self._task.autocast(self._world.device), normalization.counting(micro):
                output = self._module(*micro.args, **micro.kwargs)
            parts.append(consume(output, micro))
        if self._is_sharded:
            shard.part_again(self._module)
        return functools.reduce(torch.add, parts)

    def train(self, mode: bool = True) -> None:
        self._module.train(mode)

    def begin_anew(self) -> None:
        for watched in (self._ddp, self._used):
            if watched is not None:
                watched.begin_anew()

    def leave_group(self) -> None:
        """Drop objects that use the process group, in which an operation has failed."""
        if self._ddp is not None:
            self._ddp.drop()

    def join_group(self) -> None:
        """Use the new process group. The next step looks for unused parameters again."""
        normalization.regroup(self._module, self._world.replica_group)

    @contextlib.contextmanager
    def _synchronised(self, is_last: bool) -> Iterator[nn.Module]:
        if self._ddp is not None:
            with self._ddp.reducing(is_last) as model:
                yield model
            return
        if self._is_sharded:
            shard.reduce_over_replicas(self._module, is_last)
        yield self._module


class _Replicated:
    """Data parallelism by DDP, which takes over after the first step."""

    def __init__(self, model: nn.Module, world: World, find_unused: bool | None) -> None:
        self._model = model
        self._world = world
        self._asked_for_unused = find_unused
        self._all = dict(model.named_parameters())
        self._reduced = 0
        # Names of parameters that got no gradient in the last microbatch of the first step. DDP sums gradients in the backward
        # pass of each step's last microbatch, and must not wait there for these parameters.
        self._idle: set[str] = set()
        self._begin()

    def follow(self) -> None:
        """Look for unused parameters again if parameters were frozen or unfrozen."""
        if any(param.requires_grad != (name in self._params) for name, param in self._all.items()):
            self._begin()

    def begin_anew(self) -> None:
        """Look for unused parameters again in the next step, unless DDP runs."""
        if self._ddp is None:
            self._begin()

    def drop(self) -> None:
        """Drop DDP, whose hooks on the parameters would wait for the former process group."""
        dropped = None if self._ddp is None else weakref.ref(self._ddp)
        self._begin()
        if dropped is not None and dropped() is not None:
            gc.collect()

    def _begin(self) -> None:
        self._params = {name: param for name, param in self._all.items() if param.requires_grad}
        self._ddp: Any = None
        self._find_unused = self._asked_for_unused
        self._is_first = True
        self.unused: tuple[str, ...] = ()

    @contextlib.contextmanager
    def reducing(self, is_last: bool) -> Iterator[nn.Module]:
        """Yield the module to call for a microbatch.

        If it is the last microbatch of a step (`is_last`), its backward pass sums the gradients.
        """
        if self._is_first:
            with self._watched(is_last):
                yield self._model
            return
        if self._ddp is None:
            self._ddp = self._wrap()
        if not is_last:
            with self._ddp.no_sync():
                yield self._ddp
            return
        self._reduced = 0
        yield self._ddp
        # DDP counts gradients, and sends a bucket once all of its gradients exist. If one is missing, the bucket stays
        # unsent, the ranks keep different gradients, and DDP raises only in the next forward pass.
        if not self._find_unused and self._reduced != sum(param.numel() for param in self._params.values()):
            raise self._unfinished()

    def finish(self) -> None:
        if not self._is_first:
            return
        sum_gradients(self._params.values(), self._world.replica_group)
        names = list(self._params)
        idle = torch.tensor([name in self._idle for name in names], dtype=torch.int32, device=self._world.device)
        dist.all_reduce(idle, op=dist.ReduceOp.MAX, group=self._world.replica_group)
        self.unused = tuple(name for name, flag in zip(names, idle.tolist(), strict=True) if flag)
        if self._find_unused is None:
            self._find_unused = bool(self.unused)
            if self.unused:
                _log.info("without a gradient in the first step: %s", ", ".join(self.unused))
        self._is_first = False

    @contextlib.contextmanager
    def _watched(self, is_last: bool) -> Iterator[None]:
        if not is_last:
            yield
            return
        self._idle = set(self._params)
        handles = [
            param.register_post_accumulate_grad_hook(lambda _, name=name: self._idle.discard(name))  # type: ignore[no-untyped-call]
            for name, param in self._params.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _wrap(self) -> object:
        from torch.nn.parallel import DistributedDataParallel

        device = self._world.device
        # torch 2.13 has renamed this argument, and warns about the former name. So use the name that this torch has.
        parameters = inspect.signature(DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
        no_buffers: dict[str, Any] = {name: False}
        ddp = DistributedDataParallel(
            self._model,
            device_ids=[device.index] if device.type == "cuda" and device.index is not None else None,
            process_group=self._world.replica_group,
            # The initial broadcast made parameters and buffers equal on all ranks, and every step keeps them equal.
            init_sync=False,
            **no_buffers,
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(self._find_unused),
        )
        group = self._world.replica_group

        # Don't annotate this hook: torch requires torch's classes as annotations, but in this module all annotations are strings.
        def add(_, bucket):  # type: ignore[no-untyped-def]
            flat = bucket.buffer()
            self._reduced += flat.numel()
            # Sum instead of DDP's default mean: the microbatches' weights are in the loss already.
            work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])

        ddp.register_comm_hook(None, add)
        return ddp

    def _unfinished(self) -> ParallelError:
        without = [name for name, param in self._params.items() if param.grad is None]
        what = ", ".join(without) if without else "parameters that were used in earlier microbatches alone"
        return ParallelError(
            f"no gradient in this step for {what}, which had one in the first step. Give parallelize(find_unused=True) "
            "if the model's forward pass leaves out parts of it now and then."
        )
