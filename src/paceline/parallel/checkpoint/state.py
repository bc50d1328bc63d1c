"""The state that a checkpoint stores, under the names of the user's model, and its restoration.

    model.<name>               every parameter and persistent buffer; a tied tensor under its first name only
    optimizer.<name>.<key>     every tensor of the optimizer's state
    average.<number>.<name>    the same tensors for each average of the weights
    `record`                   all other values (parameter groups, numbers, progress, schedulers), in one object for all ranks

A rank holds only some of the names (a pipeline stage) or parts of the tensors (DTensors). Together the ranks hold all tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.exchange import gather
from paceline.parallel.full_tensor import whole
from paceline.parallel.mesh import World
from paceline.parallel.reduce import local

if TYPE_CHECKING:
    from paceline.parallel.deterministic_rng import OrderState
    from paceline.parallel.executor import TrainingState

#: Options of the optimizer that depend on the layout, so checkpoints lack them.
OWN_OPTIONS = frozenset({"params", "foreach", "fused"})


class Resumable(Protocol):
    """A learning-rate scheduler, or another object with a state of plain values."""

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


class ParameterGroup(TypedDict):
    """A parameter group of an optimizer, with its parameters' names."""

    names: list[str]
    options: dict[str, object]


class OwnRecord(TypedDict):
    """The values of one rank's model and optimizer that are not tensors.

    Attributes:
        groups: The optimizer's parameter groups.
        values: Parameter's name -> the values in its optimizer state that are not tensors.
        model_values: The extra state of modules.
    """

    groups: list[ParameterGroup]
    values: dict[str, dict[str, object]]
    model_values: dict[str, object]


class CheckpointRecord(OwnRecord):
    """Everything in a checkpoint except its tensors."""

    format: int
    torch: str
    optimizer: str
    layout: str
    state: TrainingState
    averages: list[list[int]]
    schedulers: list[dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """The part of the model and its optimizer that this rank holds.

    Attributes:
        module: This rank's module, with the tensors under their names in the user's model.
        parameters: Name in the user's model -> parameter. A tied parameter has its first name.
        averages: For each average of the weights: first name -> this rank's part of the averaged tensor.
    """

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    averages: Sequence[Mapping[str, Tensor]] = ()

    def average_tensors(self) -> dict[str, Tensor]:
        """Return this rank's weight averages by their keys in the checkpoint."""
        return {
            f"average.{number}.{name}": tensor
            for number, average in enumerate(self.averages)
            for name, tensor in average.items()
        }

    def model_tensors(self) -> dict[str, Tensor]:
        """Return name -> parameter or buffer of this rank, tied tensors only once."""
        state = self._tensors()
        tensors: dict[str, Tensor] = {}
        for name, first in self.first_names().items():
            tensors.setdefault(first, state[name])
        return tensors

    def first_names(self) -> dict[str, str]:
        """Return name -> the same tensor's first name, for this rank's tensors.

        A tied tensor has several names. The first name may belong to another pipeline stage.
        """
        first = {id(param): name for name, param in self.parameters.items()}
        return {name: first.setdefault(id(tensor), name) for name, tensor in self._tensors().items()}

    def model_values(self) -> dict[str, object]:
        """Return name -> extra state (`get_extra_state`) of modules that have one."""
        return {name: value for name, value in self._state_dict().items() if not isinstance(value, Tensor)}

    def optimizer_states(self) -> dict[str, tuple[nn.Parameter, dict[str, object]]]:
        """Return name -> (parameter, its state) for all parameters of the optimizer."""
        if self.optimizer is None:
            return {}
        names = {id(param): name for name, param in self.parameters.items()}
        # Use `get`, because `optimizer.state` is a defaultdict, in which a lookup with [] would create an empty state.
        state = self.optimizer.state
        return {
            names[id(param)]: (param, state.get(param, {}))
            for group in self.optimizer.param_groups
            for param in group["params"]
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._state_dict().items() if isinstance(value, Tensor)}

    def _state_dict(self) -> dict[str, object]:
        return dict(self.module.state_dict(keep_vars=True))


def tensors(held: HeldState) -> dict[str, Tensor]:
    """Return this rank's tensors by key in the checkpoint, without a copy."""
    of_model = {f"model.{name}": tensor.detach() for name, tensor in held.model_tensors().items()}
    of_optimizer = {
        f"optimizer.{name}.{key}": value.detach()
        for name, (_, state) in held.optimizer_states().items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return of_model | of_optimizer | held.average_tensors()


def own_record(held: HeldState) -> OwnRecord:
    """Return the values of this rank's model and optimizer that are not tensors."""
    groups: list[ParameterGroup] = []
    names = {id(param): name for name, (param, _) in held.optimizer_states().items()}
    for group in held.optimizer.param_groups if held.optimizer is not None else ():
        options = {key: value for key, value in group.items() if key not in OWN_OPTIONS}
        groups.append({"names": [names[id(param)] for param in group["params"]], "options": options})
    values = {
        name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for name, (_, state) in held.optimizer_states().items()
        if state
    }
    return {"groups": groups, "values": values, "model_values": held.model_values()}


def merge_records(records: list[OwnRecord]) -> OwnRecord:
    """Merge the ranks' values for a checkpoint. The first rank's values win."""
    merged: OwnRecord = {"groups": [], "values": {}, "model_values": {}}
    for record in records:
        # Several stages may have values of the same tied parameter: keep the values of the first of these stages.
        merged["values"] = record["values"] | merged["values"]
        merged["model_values"] = record["model_values"] | merged["model_values"]
    for index, group in enumerate(records[0]["groups"]):
        names = dict.fromkeys(name for record in records for name in record["groups"][index]["names"])
        merged["groups"].append({"names": list(names), "options": group["options"]})
    return merged


def targets(held: HeldState, saved: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Return key -> empty buffer for each tensor to read from a checkpoint.

    `saved` maps a key to the shape and dtype of the whole tensor in the checkpoint.
    """
    buffers = {f"model.{name}": torch.empty_like(tensor.detach()) for name, tensor in held.model_tensors().items()}
    buffers |= {key: torch.empty_like(tensor) for key, tensor in held.average_tensors().items()}
    params = {name: param for name, (param, _) in held.optimizer_states().items()}
    for key, (shape, dtype) in saved.items():
        kind, _, rest = key.partition(".")
        name, _, state = rest.rpartition(".")
        if kind != "optimizer" or name not in params:
            continue
        param = params[name]
        # State with the parameter's shape is split like the parameter. Other state, such as the step number, is whole.
        if shape == param.shape and state != "step":
            buffers[key] = torch.empty_like(param.detach(), dtype=dtype)
        else:
            buffers[key] = torch.empty(shape, dtype=dtype, device=param.device if len(shape) else "cpu")
    return buffers


def mismatch(
    held: Mapping[str, torch.Size], optimizer: str, record: CheckpointRecord, saved: Mapping[str, torch.Size]
) -> str:
    """Describe how the checkpoint differs from the model, or return "" if both fit.

    Args:
        held: First name -> shape of each whole tensor in the model, from all ranks.
        optimizer: The name of the optimizer's class. "" (no optimizer) accepts any checkpoint.
        record: The checkpoint's record.
        saved: First name -> shape of each whole tensor in the checkpoint.
    """
    for name, shape in held.items():
        if name not in saved:
            return f"it has no {name!r}, which the model has"
        if saved[name] != shape:
            return f"{name!r} has the shape {list(saved[name])} there and {list(shape)} in the model"
    if foreign := [name for name in saved if name not in held]:
        return f"it has {foreign[0]!r}, which the model has not"
    if optimizer and record["optimizer"] != optimizer:
        there = f"a state of {record['optimizer']}" if record["optimizer"] else "no state of an optimizer"
        return f"it has {there}, and the optimizer is {optimizer}"
    return ""


def order_mismatch(own: OrderState | None, saved: TrainingState) -> str:
    """Describe why the position within an epoch means nothing in the order `own`, or return ""."""
    order = saved.get("order")
    if own is None or order is None or not saved["progress"]["consumed"]:
        return ""
    return "; ".join(
        f"its position is of {name}={order.get(name)!r}, but this loader has {name}={own.get(name)!r}: positions of one order "
        "mean nothing in another"
        for name in sorted({*dict(own.items() - order.items())} - {"seed"})
    )


def groups_mismatch(held: HeldState, record: CheckpointRecord) -> str:
    """Describe how the optimizer's groups differ from the checkpoint's, or return ""."""
    if held.optimizer is None:
        return ""
    own = own_record(held)["groups"]
    saved = record["groups"]
    if len(own) != len(saved):
        return f"its optimizer has {len(saved)} parameter groups, and this one {len(own)}"
    of_saved = {name: index for index, group in enumerate(saved) for name in group["names"]}
    for index, group in enumerate(own):
        for name in group["names"]:
            if name not in of_saved:
                return f"its optimizer does not train {name!r}, which this one does"
            if of_saved[name] != index:
                return f"{name!r} is in the optimizer's group {of_saved[name]} there, and in group {index} here"
    return ""


def put_back(held: HeldState, saved: Mapping[str, Tensor], record: OwnRecord) -> None:
    """Restore the state of the model and its optimizer from a checkpoint.

    `saved` has the tensors that `targets` made, filled with the checkpoint's values.
    """
    with torch.no_grad():
        for name, tensor in held.model_tensors().items():
            local(tensor).copy_(local(saved[f"model.{name}"]))
        for key, tensor in held.average_tensors().items():
            local(tensor).copy_(local(saved[key]))
    own = held.model_values()
    if own:
        held.module.load_state_dict({name: record["model_values"][name] for name in own}, strict=False)
    if held.optimizer is None:
        return
    read: dict[str, dict[str, object]] = {}
    for key, tensor in saved.items():
        name, _, of_state = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer."):
            read.setdefault(name, {})[of_state] = tensor
    moved = _device_steps(held.optimizer)
    for name, (param, _) in held.optimizer_states().items():
        state = read.get(name, {}) | record["values"].get(name, {})
        if id(param) in moved and isinstance(step := state.get("step"), Tensor):
            state["step"] = step.to(param.device)
        if state:
            held.optimizer.state[param] = state
        else:
            # The checkpoint was saved before this parameter's first step, so it has no state for it. Drop the present state.
            held.optimizer.state.pop(param, None)
    for group, own_group in zip(held.optimizer.param_groups, record["groups"], strict=True):
        group.update(own_group["options"])


def _device_steps(optimizer: torch.optim.Optimizer) -> set[int]:
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {id(param) for group in groups for param in group["params"]}


def full_state_dict(held: HeldState, world: World) -> dict[str, Tensor]:
    """Return all whole parameters and persistent buffers on the CPU.

    Every rank must call this. Tied names share one tensor.
    """
    own = {name: _whole(tensor.detach()) for name, tensor in held.model_tensors().items()}
    names = held.first_names()
    group = world.group(world.holder_axis)
    if group is not None:
        names = {name: first for of_stage in gather(names, group) for name, first in of_stage.items()}
        own = _from_stages(own, group, world.device)
    return {name: own[first] for name, first in names.items()}


def _whole(tensor: Tensor) -> Tensor:
    # Copy the tensor even if it is whole and on the CPU already, because the next training step changes the original in place.
    return whole(tensor).to("cpu", copy=True)


def _from_stages(own: dict[str, Tensor], group: dist.ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """Gather all pipeline stages' tensors, a tied tensor from its first stage."""
    about = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
    together: dict[str, Tensor] = {}
    for stage, names in enumerate(gather(about, group)):
        root = dist.get_global_rank(group, stage)
        for name in [name for name in names if name not in together]:
            shape, dtype = names[name]
            is_owner = dist.get_rank() == root
            tensor = own[name].to(device) if is_owner else torch.empty(shape, dtype=dtype, device=device)
            if tensor.numel():
                dist.broadcast(tensor, root, group=group)
            together[name] = tensor.cpu()
    return together
