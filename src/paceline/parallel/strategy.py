"""Strategies for spreading a model over workers, and the layouts that result from them.

    DataParallel(2) @ PipelineParallel(2)        two replicas of two stages each: four workers
    FullyShard()                 all workers; parameters, gradients and optimizer states in equal parts

A strategy without a size (None) uses all remaining workers. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.parallel.errors import ParallelError, check_count
from paceline.system.deprecation import experimental

SCHEDULES = ("1f1b", "gpipe", "interleaved")
PLACEMENTS = ("colwise", "rowwise", "vocab", "replicate")
BATCH_NORMS = ("sync", "local")
_CHOICES = {"schedule": SCHEDULES, "batch_norm": BATCH_NORMS}


class Joinable:
    """A base class of strategies, which `a @ b` combines."""

    def __matmul__(self, other: object) -> Strategy:
        if not isinstance(other, Joinable):
            return NotImplemented
        return Strategy(parts=(*parts_of(self), *parts_of(other)))


class _Part(Joinable):
    """A base class of the single strategies, which checks their fields."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name, value in [*vars(self).items()]:
            match name:
                case "size" | "stages" | "chunks" if value is not None:
                    check_count(f"{kind}({name}={value!r})", value)
                case "schedule" | "batch_norm":
                    _check_choice(kind, name, value, _CHOICES[name])
                case "units" | "cut" | "lists" if value is not None:
                    # Convert a list to a hashable tuple. Use `object.__setattr__`, because the dataclass is frozen.
                    object.__setattr__(self, name, _names(kind, name, value))


@dataclass(frozen=True)
class DataParallel(_Part):
    """Every worker has the whole model and computes a part of each batch.

    Attributes:
        size: The number of replicas. None uses all remaining workers.
        batch_norm: "sync" normalises over the batch of all replicas, as one process would. "local" uses each replica's own
            part of the batch, which is faster but gives other results than one process.

    Examples:
        >>> strategy = pl.DataParallel(2)
    """

    size: int | None = None
    batch_norm: Literal["sync", "local"] = "sync"


@dataclass(frozen=True)
class FullyShard(_Part):
    """Every worker has a part of each parameter, and computes a part of each batch.

    While a block of layers computes, each worker holds the block's whole parameters, gathered from all workers.

    Attributes:
        size: The number of parts.
        units: Patterns (`fnmatch`) for the names of the blocks, which are gathered one at a time. None makes a block of
            each element of the model's ModuleLists, ModuleDicts and Sequentials.
        batch_norm: "sync" or "local", as for `DataParallel`.

    Examples:
        >>> strategy = pl.FullyShard(4, units=("layers.*",))
    """

    size: int | None = None
    units: tuple[str, ...] | None = None
    batch_norm: Literal["sync", "local"] = "sync"


@dataclass(frozen=True)
class PipelineParallel(_Part):
    """The model is cut into stages, which compute microbatches one after the other.

    Attributes:
        stages: The number of workers for one copy of the model. Unless "interleaved", each worker has one stage.
        schedule: "1f1b" (holds few activations), "gpipe", or "interleaved" (each worker has `chunks` stages: less idle time,
            but more messages).
        chunks: With "interleaved": the number of stages of each worker.
        cut: The names of the modules that start a new stage, in order. None measures the blocks and balances the stages.

    Examples:
        >>> strategy = pl.DataParallel(2) @ pl.PipelineParallel(4)  # 8 workers
    """

    stages: int | None = None
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    cut: tuple[str, ...] | None = None
    chunks: int = 2


@dataclass(frozen=True)
class TensorParallel(_Part):
    """Each layer is cut over the workers, which all compute the same rows.

    Attributes:
        size: The number of parts.
        plan: Pattern of a module's name -> "colwise", "rowwise", "vocab" or "replicate". None finds the layers to cut.

    Examples:
        >>> strategy = pl.TensorParallel(2, plan={"*.up": "colwise", "*.down": "rowwise"})
    """

    size: int | None = None
    # Exclude the dict, which is not hashable, from the strategy's hash.
    plan: Mapping[str, str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None:
            for pattern, placement in self.plan.items():
                _check_choice("TensorParallel", f"plan[{pattern!r}]", placement, PLACEMENTS)
            # Copy the dict, because the script may change it.
            object.__setattr__(self, "plan", dict(self.plan))


@experimental("0.1")
@dataclass(frozen=True)
class ContextParallel(_Part):
    """Every worker has the whole model and computes a part of each sequence.

    Attention gathers the keys and values of all workers.

    Attributes:
        size: The number of parts. The strategy can be joined with DataParallel and FullyShard.
        dim: The sequence dimension of the blocks' input [rows, sequence, features].
        lists: Names of lists of blocks (nn.ModuleList, nn.Sequential). The sequence is split between a list's first and
            last block. None takes the model's outermost lists.

    Examples:
        >>> strategy = pl.ContextParallel(2)
    """

    size: int | None = None
    dim: int = 1
    lists: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(f"ContextParallel(dim={self.dim!r})", self.dim, "the number of a dimension, 0 or more", least=0)


@experimental("0.1")
@dataclass(frozen=True)
class ExpertParallel(_Part):
    """Every worker has some experts of each mixture-of-experts layer.

    Attributes:
        size: The number of parts. The strategy can be joined with DataParallel.

    Examples:
        >>> strategy = pl.DataParallel(2) @ pl.ExpertParallel(2)  # 4 workers
    """

    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Strategy(Joinable):
    """Several strategies used together: the result of `a @ b`."""

    parts: tuple[_Part, ...]

    def __post_init__(self) -> None:
        shown = " @ ".join(f"{type(part).__name__}()" for part in self.parts)
        for index, part in enumerate(self.parts):
            if any(type(part) is type(before) for before in self.parts[:index]):
                raise ParallelError(f"{type(part).__name__} occurs twice in {shown}. Give it once, with one size.")

    def __str__(self) -> str:
        return " @ ".join(map(repr, self.parts))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The number of workers along each axis, with the strategies' settings."""

    data: int = 1
    shard: int = 1
    pipe: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    cut: tuple[str, ...] | None = None
    chunks: int = 1
    plan: Mapping[str, str] | None = field(default=None, hash=False)
    units: tuple[str, ...] | None = None
    batch_norm: Literal["sync", "local"] = "sync"
    context_dim: int = 1
    context_lists: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.data * self.shard * self.pipe * self.tensor * self.context * self.expert

    @property
    def replicas(self) -> int:
        """The number of parts into which each batch is cut."""
        return self.data * self.shard

    def __str__(self) -> str:
        sizes = {axis: int(getattr(self, axis)) for axis in _AXES.values()}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one worker"


def strategy_of(layout: Layout) -> Strategy:
    """Return a strategy with the layout's sizes and default settings."""
    sizes = {kind: int(getattr(layout, axis)) for kind, axis in _AXES.items()}
    return Strategy(parts=tuple(kind(size) for kind, size in sizes.items() if size > 1) or (DataParallel(1),))


def shown(strategy: object) -> str:
    """Return a strategy in words: "DataParallel(2) @ PipelineParallel()"."""
    sizes = ((type(part).__name__, _size(part)) for part in parts_of(strategy))
    return " @ ".join(f"{kind}({'' if size is None else size})" for kind, size in sizes)


def parts_of(strategy: object) -> tuple[_Part, ...]:
    """Return the strategies that `@` has joined, or raise ParallelError."""
    match strategy:
        case Strategy():
            return strategy.parts
        case _Part():
            return (strategy,)
    if isinstance(strategy, type) and issubclass(strategy, _Part):
        raise ParallelError(f"strategy={strategy.__name__}: that is the class; write {strategy.__name__}().")
    raise ParallelError(
        f"strategy={strategy!r} is not a strategy. Give {', '.join(f'{kind.__name__}()' for kind in _AXES)}, "
        "several joined by @, such as DataParallel(2) @ PipelineParallel(2), or 'auto'."
    )


def resolve(strategy: object, world_size: int) -> Layout:
    """Return the layout of a strategy for this number of workers.

    Raises:
        ParallelError: The product of the sizes differs from the number of workers, or more than one size is omitted.

    Examples:
        >>> pl.parallel.resolve(pl.DataParallel(2) @ pl.PipelineParallel(), world_size=8).pipe
        4
    """
    parts = parts_of(strategy)
    _check_together(parts)
    sizes = {_AXES[type(part)]: _size(part) for part in parts}
    open_axes = [axis for axis, size in sizes.items() if size is None]
    product = math.prod(size or 1 for size in sizes.values())
    text = shown(strategy)
    if len(open_axes) > 1:
        raise ParallelError(
            f"{text} leaves the sizes of {' and '.join(open_axes)} open, but only one can be found from the world's "
            f"size ({world_size}). Give the others, such as DataParallel(2) @ PipelineParallel(2)."
        )
    if open_axes and world_size % product == 0:
        sizes[open_axes[0]] = world_size // product
    elif open_axes or product != world_size:
        factors = " x ".join(f"{axis} {'?' if size is None else size}" for axis, size in sizes.items())
        rule = f"a multiple of {product}" if open_axes else str(product)
        raise ParallelError(
            f"{text} needs {rule} workers ({factors}), but there {'is' if world_size == 1 else 'are'} {world_size}. "
            f"Start {'as many' if open_axes else product} workers (`torchrun --nproc-per-node {product} ...`, or "
            "node_count and process_count_per_node of the job), or change the sizes."
        )
    values: dict[str, Any] = {axis: size for axis, size in sizes.items() if size is not None}
    norms = {part.batch_norm for part in parts if isinstance(part, (DataParallel, FullyShard))}
    if len(norms) > 1:
        raise ParallelError(f"{text}: batch_norm is {' and '.join(sorted(norms))}. Give both parts the same.")
    values["batch_norm"] = norms.pop() if norms else "sync"
    for part in parts:
        match part:
            case PipelineParallel():
                # Ignore `chunks` except with "interleaved", because with other schedules each worker has one stage.
                chunks = part.chunks if part.schedule == "interleaved" else 1
                values |= {"schedule": part.schedule, "cut": part.cut, "chunks": chunks}
            case TensorParallel():
                values["plan"] = part.plan
            case FullyShard():
                values["units"] = part.units
            case ContextParallel():
                values |= {"context_dim": part.dim, "context_lists": part.lists}
    return Layout(**values)


_AXES: dict[Any, str] = {
    DataParallel: "data",
    FullyShard: "shard",
    PipelineParallel: "pipe",
    TensorParallel: "tensor",
    ContextParallel: "context",
    ExpertParallel: "expert",
}
#: Strategy -> the strategies with which it can be combined.
_WITH: dict[type, tuple[type, ...]] = {ContextParallel: (DataParallel, FullyShard), ExpertParallel: (DataParallel,)}


def _check_together(parts: tuple[_Part, ...]) -> None:
    for part in parts:
        allowed = (type(part), *_WITH.get(type(part), (_Part,)))
        for other in parts:
            if not isinstance(other, allowed):
                raise ParallelError(
                    f"{type(part).__name__} @ {type(other).__name__} is not built. {type(part).__name__} goes with "
                    f"{' and '.join(f'{kind.__name__}()' for kind in allowed[1:])}."
                )


def _size(part: Any) -> int | None:
    return part.stages if isinstance(part, PipelineParallel) else part.size


def _check_choice(kind: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ParallelError(f"{kind}({name}={value!r}): choose one of {', '.join(map(repr, choices))}.")


def _names(kind: str, name: str, value: object) -> tuple[str, ...]:
    # Refuse a string, because Python would iterate over its characters as if each character were a name.
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ParallelError(f"{kind}({name}={value!r}): a list of names, such as {name}=['blocks.6'].")
    names = tuple(value)
    if wrong := [item for item in names if not isinstance(item, str) or not item]:
        raise ParallelError(f"{kind}({name}={value!r}): {wrong[0]!r} is not a name of a module.")
    return names
