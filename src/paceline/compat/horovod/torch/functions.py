"""Broadcasts of parameters, optimizer state and objects, so that all ranks start equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.objects import allgather_object, broadcast_object
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.torch.broadcast import broadcast_async_

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


Parameters: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]] | Iterable[torch.Tensor]"


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Set every rank's tensors to the values of `root_rank`, in place.

    `params` is `model.state_dict()`, `model.named_parameters()` or a list of (name, tensor), in any order. It may also
    be `model.parameters()` or a list of tensors, in the same order on every rank. None values are skipped.

    Raises:
        ValueError: `params` is anything else, or has a value that is not a tensor.
    """
    under_way = []
    for name, tensor in _named(params):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {name!r} is of type {type(tensor).__name__}, not a tensor. "
                "Send it with hvd.broadcast_object, and leave it out here."
            )
        under_way.append(broadcast_async_(tensor, root_rank, name, process_set))
    for handle in under_way:
        handles.synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Set every rank's optimizer to the state of `root_rank`'s optimizer.

    The state includes options such as the learning rate. State that a rank lacks is created from the root's state,
    without an optimizer step; extra state is removed. As in Horovod, if this rank's optimizer had no state, parameters
    without a gradient get a zero gradient. This is sparse for SparseAdam, and for sparse embeddings of `model`.

    Raises:
        ValueError: The optimizer is LBFGS, whose state is not stored by parameter; or the ranks' parameter groups differ.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it isn't kept by parameter.")
    groups, params = optimizer.param_groups, [p for group in optimizer.param_groups for p in group["params"]]
    # Check now whether this rank's optimizer has no state, because the root's state is copied into the optimizer below.
    is_new = not optimizer.state
    shape = [len(group["params"]) for group in groups]
    own = {
        "shape": shape,
        "options": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "state": {index: optimizer.state[p] for index, p in enumerate(params) if p in optimizer.state},
    }
    tensors: list[torch.Tensor] = []
    sent = broadcast_object(_without_tensors(own, tensors), root_rank, name="optimizer_state")
    # Every rank has the root's description now. Send tensors only if the parameter groups of all ranks match this description.
    if not all(fits := allgather_object(sent["shape"] == shape, name="optimizer_fits")):
        raise ValueError(
            f"the optimizers of the ranks {[rank for rank, fit in enumerate(fits) if not fit]} have other groups of "
            f"parameters than rank {root_rank}'s, which has groups of {sent['shape']} (here: {shape})."
        )
    filled = _receive(sent, root_rank, tensors)
    if is_new:
        _add_gradients(optimizer, params, model)
    # The root may return here, because it has sent all that the other ranks receive.
    if basics.rank() == root_rank:
        return
    for group, options in zip(groups, filled["options"], strict=True):
        group.update(options)
    # Remove this rank's state: state that the root lacks would make this rank's next step differ from the root's step.
    for parameter in params:
        optimizer.state.pop(parameter, None)
    group_of = [group for group in groups for _ in group["params"]]
    for index, state in filled["state"].items():
        # As torch's load_state_dict does, keep the step on the CPU unless the optimizer reads it on the device.
        kept = set() if group_of[index].get("fused") or group_of[index].get("capturable") else {"step"}
        moved = {key: _on_device(value, params[index].device) for key, value in state.items() if key not in kept}
        optimizer.state[params[index]] = state | moved


def _add_gradients(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], model: torch.nn.Module | None) -> None:
    """Add zero gradients to parameters, because scripts read gradients before the first step."""
    embeddings = [] if model is None else [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.sparse]
    sparse = {id(p) for embedding in embeddings for p in embedding.parameters()}
    for p in params:
        if not p.requires_grad or p.grad is not None:
            continue
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or (
            isinstance(optimizer, torch.optim.SGD) and id(p) in sparse
        )
        zeros = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
        p.grad = zeros.to_sparse() if is_sparse else zeros


@dataclass(frozen=True)
class _Place:
    """Placeholder for a tensor that is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _named(params: Parameters) -> list[tuple[str | None, object]]:
    if isinstance(params, Mapping):
        return [(str(name), value) for name, value in params.items()]
    listed = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
    items: list[Any] = [
        (None, item) if isinstance(item, torch.Tensor) and item is not params else item for item in listed
    ]
    if not all(isinstance(item, tuple) and len(item) == 2 for item in items):
        raise ValueError(
            f"invalid params of type {type(params).__name__}: give model.state_dict(), model.named_parameters(), or a "
            "list of (name, tensor)."
        )
    return items


def _without_tensors(value: object, tensors: list[torch.Tensor]) -> object:
    """Return `value` with placeholders for its tensors, which are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(tuple(value.shape), value.dtype)
    return _rebuilt(value, lambda item: _without_tensors(item, tensors))


def _receive(sent: object, root_rank: int, own: list[torch.Tensor]) -> Any:
    """Replace placeholders in the state `sent` by tensors, broadcast from the root (`own`)."""
    under_way: list[int] = []
    is_root, left = basics.rank() == root_rank, iter(own)

    def fill(value: object) -> object:
        if isinstance(value, (_Place, torch.Tensor)):
            # The placeholders were created in the order of this traversal, so `next` returns the matching tensor.
            tensor = next(left).detach() if is_root else torch.empty(value.shape, dtype=value.dtype)
            under_way.append(broadcast_async_(tensor, root_rank, f"optimizer_state.{len(under_way)}"))
            return tensor
        return _rebuilt(value, fill)

    filled = fill(sent)
    for handle in under_way:
        handles.synchronize(handle)
    return filled


def _rebuilt(value: object, change: Callable[[object], object]) -> object:
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    # Leave subclasses unchanged: a named tuple's constructor takes its fields, not one iterable.
    if type(value) is list or type(value) is tuple:
        return type(value)(change(item) for item in value)
    return value


def _on_device(value: object, device: torch.device) -> object:
    """Return optimizer state with its tensors on this device."""
    return value.to(device) if isinstance(value, torch.Tensor) else _rebuilt(value, lambda v: _on_device(v, device))
