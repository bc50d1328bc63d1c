"""Cut a model's layers over the ranks of a tensor group, by torch's DTensor.

The model is changed in place and keeps its names. Parameters of cut layers become DTensors on the mesh's axis `tensor`. All
other parameters stay plain, and equal on all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from paceline.parallel.batches.batch import Microbatch
from paceline.parallel.errors import ParallelError
from paceline.parallel.gradient_hooks import Hooks
from paceline.parallel.large.meta_parameters import give_memory, region_of, slices, stand_in, stand_ins
from paceline.parallel.mesh import World, decide
from paceline.parallel.reduce import local
from paceline.parallel.tensor.check import reference
from paceline.parallel.tensor.groups import Group
from paceline.parallel.tensor.layers import cut_turned, deal, is_turned
from paceline.parallel.tensor.plan import TensorPlan, find_plan, fold, plan_from_table
from paceline.parallel.tied_parameters import tie_again
from paceline.torch_private import BatchNorm, keep_lookups_apart, keep_own_parts

#: How many rows of a microbatch are used to try cuts and to compare results: 2 for most models, 4 for models with batch
#: normalisation. A model that cannot compute so few rows computes all rows.
ROWS, ROWS_NORMALISED = 2, 4
#: If the model's parameters have no values yet, compare only gradients of parameters with at most this many numbers.
SMALL = 2**16


@dataclass(frozen=True, kw_only=True)
class Applied:
    """How `apply` has divided the layers of a model between ranks."""

    plan: TensorPlan
    parts: int

    @property
    def lines(self) -> list[str]:
        """Lines for `explain` that say how each layer is divided between the ranks."""
        plan = self.plan
        shown = [
            f"{placement}: {name}"
            for placement in dict.fromkeys(plan.placements.values())
            for name in fold(name for name, own in plan.placements.items() if own == placement)
        ]
        shown += [
            f"{name} is cut in each of its {pieces} pieces"
            for pieces in sorted({group.pieces for group in plan.groups if group.pieces > 1})
            for name in fold(name for group in plan.groups if group.pieces == pieces for name in group.columns)
        ]
        shown += [
            f"{name} is divided by {self.parts} on each rank"
            for name in fold(f"{name}.{attribute}" for name, attribute in plan.divided)
        ]
        return shown + list(plan.notes)


def few_rows(model: nn.Module) -> int:
    """Return how many rows suffice to compare a cut model with the plain model."""
    return ROWS_NORMALISED if any(isinstance(part, BatchNorm) for part in model.modules()) else ROWS


def apply(
    model: nn.Module,
    world: World,
    plan: Mapping[str, str] | None,
    ties: Sequence[tuple[str, ...]],
    sample: Microbatch | None = None,
    loss: Callable[[object, Microbatch], Tensor] | None = None,
    few: Microbatch | None = None,
) -> Applied:
    """Find the layers to cut, cut them in place, and compare the results.

    Every rank must call this before any sharding. Tied tensors stay tied.

    Args:
        model: Changed in place.
        world: This rank, with the process groups of its layout.
        plan: Pattern of a module's name -> placement. None finds a plan by running the model on `sample`.
        ties: The result of `tied_parameters.find(model)`.
        sample: Some rows, with which outputs and gradients are compared with the plain model's. None skips the comparison.
        loss: (output, sample) -> the loss. The comparison includes the loss if it reads tensors of the model.
        few: Fewer rows, which replace `sample` if the model can compute them. None uses `sample`.

    Raises:
        ParallelError: A pattern matches nothing, a layer cannot be cut, tied tensors are cut differently, or a module has
            different results when cut.
    """
    parts = world.extent("tensor")
    empty = {name: param for name, param in model.named_parameters() if param.is_meta}
    # Compute the reference outputs before cuts are tried, because the tries have side effects on rank 0's model.
    plain = None
    if sample is not None and parts > 1:
        with stand_ins(model, world.device):
            # If the model has no values yet, ignore the loss, and compare only the gradients of small parameters, because large
            # gradients would be whole on each rank. Small gradients show errors in all cut layers that run after them.
            samples = [sample] if few is None else [few, sample]
            plain = reference(model, samples, world, None if empty else loss, SMALL if empty else None)
    rows = sample if plain is None else plain.sample
    run = None if rows is None else lambda: model(*rows.args, **rows.kwargs)

    def find() -> TensorPlan:
        if plan is not None:
            return plan_from_table(model, plan, run, parts)
        if run is None:
            raise ParallelError(
                "a plan for TensorParallel() is found by a pass over a batch. Give a loader, or TensorParallel(plan={...})."
            )
        return find_plan(model, run, parts, ties)

    # Try cuts only on rank 0, because different rounding on another machine might lead to another plan.
    with stand_ins(model, world.device):
        found: TensorPlan = decide(world, find, kinds=(TensorPlan, Group))
    if not found.placements:
        notes = "; ".join(found.notes) or "no pair of linear layers, no vocabulary"
        raise ParallelError(
            f"TensorParallel({parts}) finds no layer of {type(model).__name__} that it can cut: {notes}. Name layers, as in "
            "TensorParallel(plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}), or use another strategy."
        )
    if parts > 1:
        _check_ties(model, found, ties)
        hooked = {name for name, param in model.named_parameters(remove_duplicate=False) if Hooks(param)}
        cut(model, world.axes("tensor"), found, copies=world.layout.shard > 1)
        # `parallelize_module` breaks ties, because it gives each module a new parameter. So tie the parameters again.
        tie_again(model, ties)
        give_memory(world.device, model)
        for name, param in model.named_parameters(remove_duplicate=False):
            if name in hooked and isinstance(param, DTensor):
                raise ParallelError(
                    f"{name} has a hook on its gradient (register_hook), and TensorParallel() cuts it: no rank has all of that "
                    "gradient. Leave its layer whole (TensorParallel(plan={...: 'replicate'})), or use DataParallel()."
                )
        learning: list[DTensor] = [
            param for param in model.parameters() if isinstance(param, DTensor) and param.requires_grad
        ]
        for tensor in learning:
            register: Callable[[Callable[[DTensor], None]], object] = tensor.register_post_accumulate_grad_hook
            register(_cut_gradient)
        if plain is not None:
            for name, param in model.named_parameters():
                if name in empty:
                    value = stand_in(name, empty[name], world.device)
                    with torch.no_grad():
                        local(param).copy_(value[slices(region_of(param))])
            plain.verify(world.group("tensor"))
    return Applied(plan=found, parts=parts)


def cut(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan, *, copies: bool = False) -> None:
    """Cut the layers of the plan in place. The caller must tie parameters again.

    With `copies` a layer returns copies of whole outputs, because these are views, which FSDP2 does not accept.
    """
    keep_lookups_apart()
    modules = dict(model.named_modules())
    learns = {name: param.requires_grad for name, param in model.named_parameters(remove_duplicate=False)}
    keeps = {name for group in plan.groups for name in group.columns}
    takes = {group.row for group in plan.groups}
    pieces = {name: group.pieces for group in plan.groups for name in group.columns if group.pieces > 1}
    for name, placement in plan.placements.items():
        if is_turned(modules[name]):
            cut_turned(modules[name], mesh, placement, name in keeps, name in takes)
        else:
            style = _style(modules[name], placement, name in keeps, name in takes)
            # Pass `src_data_rank=None`: all ranks have equal values, so each rank cuts its part from its own without a message.
            parallelize_module(modules[name], mesh, style, src_data_rank=None)
        keep_own_parts(modules[name])
        if name in pieces:
            deal(modules[name], pieces[name], mesh.get_group())
        if name in plan.changed or (copies and name not in keeps):
            # Clone the output, which torch's hooks return as a view that autograd forbids to change in place.
            modules[name].register_forward_hook(lambda module, args, output: output.clone())
    for name, param in model.named_parameters(remove_duplicate=False):
        # Restore requires_grad, which torch 2.9 sets on every parameter that it cuts, frozen ones too.
        param.requires_grad_(learns[name])
    for name, attribute in plan.divided:
        setattr(modules[name], attribute, getattr(modules[name], attribute) // mesh.size())


def _cut_gradient(param: DTensor) -> None:
    if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)


def _style(module: nn.Module, placement: str, keeps: bool, takes: bool) -> ParallelStyle:
    if placement == "rowwise" and isinstance(module, nn.Linear):
        return RowwiseParallel() if takes else RowwiseParallel(input_layouts=Replicate())
    if isinstance(module, nn.Embedding) and placement in ("vocab", "rowwise"):
        return RowwiseParallel(input_layouts=Replicate())
    return ColwiseParallel() if keeps else ColwiseParallel(output_layouts=Replicate())


def _check_ties(model: nn.Module, plan: TensorPlan, ties: Sequence[tuple[str, ...]]) -> None:
    for names in ties:
        ways = {name: _way(model, plan, name) for name in names}
        if len(set(ways.values())) > 1:
            shown = ", ".join(f"{name} {way}" for name, way in ways.items())
            raise ParallelError(
                f"{' and '.join(names)} are one tensor, but TensorParallel(plan) cuts it in different ways: {shown}. Give the "
                "modules that share it the same placement ('vocab' for an embedding and its head)."
            )


def _way(model: nn.Module, plan: TensorPlan, name: str) -> str:
    owner, _, own = name.rpartition(".")
    placement = plan.placements.get(owner)
    if placement is None:
        return "whole"
    module = model.get_submodule(owner)
    if own == "bias":
        return "whole" if placement == "rowwise" else "by rows"
    by_rows = placement == "vocab" or (placement == "rowwise") == (
        isinstance(module, nn.Embedding) or is_turned(module)
    )
    return "by rows" if by_rows else "by columns"
