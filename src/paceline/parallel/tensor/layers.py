"""The linear layers that can be cut: torch's own, and GPT-2's Conv1D of transformers, whose weight is the other way round.

    nn.Linear     weight [outputs, inputs]
    Conv1D        weight [inputs, outputs]

Loaded on use: it imports torch, and no transformers: a model that has a Conv1D has brought it along.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


def linear_kind(module: nn.Module) -> Any:
    """The class of linear layer that it is; None for any other module."""
    kind = getattr(sys.modules.get(_CONV1D[0]), _CONV1D[1], None)
    return next((one for one in (nn.Linear, kind) if one is not None and isinstance(module, one)), None)


def is_turned(module: nn.Module) -> bool:
    """Say if the rows of its weight are its inputs."""
    return linear_kind(module) not in (None, nn.Linear)


def outputs(module: Any) -> int:
    """How many numbers a linear layer gives for a row."""
    return int(module.weight.shape[1 if is_turned(module) else 0])


def inputs(module: Any) -> int:
    """How many numbers it takes for a row."""
    return int(module.weight.shape[0 if is_turned(module) else 1])


def cut_turned(module: nn.Module, mesh: Any, placement: str, keeps: bool, takes: bool) -> None:
    """Cut a Conv1D in place, as torch's ColwiseParallel and RowwiseParallel cut an nn.Linear, which they alone take.

    placement: "colwise" or "rowwise". keeps: its outputs stay in parts. takes: its inputs are in parts already.
    """
    is_column = placement == "colwise"
    cuts: dict[str, Any] = {"weight": Shard(1 if is_column else 0), "bias": Shard(0) if is_column else Replicate()}

    def partition(name: str, layer: nn.Module, mesh: Any) -> None:
        for own, param in list(layer.named_parameters(recurse=False)):
            value = distribute_tensor(param, mesh, [cuts[own]], src_data_rank=None)
            layer.register_parameter(own, nn.Parameter(value, requires_grad=param.requires_grad))

    def take(layer: nn.Module, args: Any, mesh: Any) -> Any:
        given, *rest = args
        if not isinstance(given, DTensor):
            given = DTensor.from_local(given, mesh, [Shard(-1) if takes else Replicate()], run_check=False)
        return (given if is_column else given.redistribute(placements=[Shard(-1)]), *rest)

    def give(layer: nn.Module, output: Any, mesh: Any) -> Any:
        kept = is_column and keeps
        return output.redistribute(placements=[Shard(-1) if kept else Replicate()]).to_local()

    # torch's type stubs know older forms of these functions, which torch itself deprecates.
    inward: Any = take
    outward: Any = give
    distribute_module(module, mesh, partition, inward, outward)
