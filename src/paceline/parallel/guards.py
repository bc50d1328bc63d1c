"""Errors for models and optimizers that a layout cannot train, and for wrong use of a training's model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.parallel.errors import ParallelError
from paceline.parallel.experts import is_fused
from paceline.parallel.failure import is_communication
from paceline.parallel.tied_parameters import find
from paceline.torch_private import BatchNorm, whole_parameters

if TYPE_CHECKING:
    from paceline.parallel.strategy import Layout


#: Name of an optimizer class that can't step DTensors -> the reason. (Each rank has only a part of a DTensor.)
_NOT_IN_PARTS = {"Adafactor": "looks at whole matrices", "Rprop": "changes single numbers of a gradient in place"}


class KeptTensors:
    """A record of the parameters' dtypes and devices when `parallelize` was called."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = dict(params)
        self._before = {name: _kind(param) for name, param in self._params.items()}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within the block, explain errors caused by converting or moving the model.

        Raises:
            ParallelError: The dtype or device of a parameter has changed; the message names the parameter.
        """
        try:
            yield
        except ParallelError:
            raise
        except Exception as error:
            if is_communication(error):
                raise  # another rank's failure is the cause, and that rank reports it
            for name, param in self._params.items():
                if _kind(param) != self._before[name]:
                    raise ParallelError(
                        f"{name} was {self._before[name]} when parallelize took the model over, and is {_kind(param)} now. "
                        "Convert or move the model first (model.to(...), .double(), .half()), then make the optimizer, then "
                        f"call parallelize. torch says: {error}"
                    ) from error
            raise


class _Taken(NamedTuple):
    root: weakref.ref[nn.Module]
    layout: Layout


_taken: weakref.WeakKeyDictionary[nn.Module, _Taken] = weakref.WeakKeyDictionary()


def take(model: nn.Module, layout: Layout) -> None:
    """Record that this model's modules belong to a training in this layout."""
    taken = _Taken(weakref.ref(model), layout)
    for module in model.modules():
        _taken[module] = taken


def refuse_shared(model: nn.Module, layout: Layout | None = None) -> None:
    """Refuse a model that shares a module with another training.

    `layout` is the model's future layout, None if unknown.

    Raises:
        ParallelError: A module is shared, and one training's layout cuts modules. The message names the module.
    """
    for name, module in model.named_modules():
        taken = _taken.get(module)
        if taken is None or not any(True for _ in module.parameters()):
            continue
        # Refuse a model that an earlier `parallelize` has cut. Also refuse to cut modules that another training's model uses.
        is_apart = taken.root() is not model
        if _cuts(taken.layout) and not is_apart:
            raise ParallelError(
                f"parallelize has already cut {type(model).__name__} for {taken.layout}. Use that training, or "
                "build the model again."
            )
        if _cuts(taken.layout) or (taken.root() is not None and is_apart and layout is not None and _cuts(layout)):
            now = "" if layout is None else f", and {layout} would cut it for this one"
            raise ParallelError(
                f"{name or type(model).__name__} is part of a model that parallelize has taken over already, on "
                f"{taken.layout}{now}. Only with DataParallel() in both may two trainings share a module, such as the "
                "discriminator of a GAN or what an actor and a critic have in common: it leaves modules whole."
            )


def _cuts(layout: Layout) -> bool:
    return max(layout.shard, layout.pipe, layout.tensor, layout.context, layout.expert) > 1


class Layers:
    """A watch for layers that the script replaces or adds after `parallelize`.

    The gradients of such layers would not be synchronised, and a pipeline would not compute them: ranks would diverge.
    """

    def __init__(self, model: nn.Module, held: nn.Module) -> None:
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._is_whole = held is model
        self._held = held
        self._new: list[tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module | nn.Parameter]]] = []
        own = weakref.ref(self)

        def see(owner: nn.Module, name: str, new: nn.Module | nn.Parameter | None) -> None:
            if (layers := own()) is not None and new is not None:
                layers._see(owner, name, new)

        # Register global hooks. torch calls them for each module of the process, before the module gets a new layer or parameter.
        for handle in (register_module_module_registration_hook(see), register_module_parameter_registration_hook(see)):
            weakref.finalize(self, handle.remove)

    def refuse_changed(self) -> None:
        """Raise ParallelError if a layer or parameter was added after `parallelize`."""
        # FSDP2 replaces whole parameters by shards and back. In RNNs this looks like a user's change, so ignore such parameters.
        of_fsdp = {id(param) for pair in whole_parameters(self._held) for param in pair} if self._new else set()
        for its_owner, name, its_new in self._new:
            owner, new = its_owner(), its_new()
            if id(new) in of_fsdp:
                continue
            if owner is not None and new is not None and getattr(owner, name, None) is new:
                path = ".".join(filter(None, [self._names[owner], name]))
                raise ParallelError(
                    f"{path} was put into the model after parallelize, so the workers would not train it alike. "
                    "Change the model first, then make the optimizer, then call parallelize."
                )
        self._new.clear()

    def _see(self, owner: nn.Module, name: str, new: nn.Module | nn.Parameter) -> None:
        if owner not in self._names or (isinstance(new, nn.Module) and new in self._names):
            return
        if self._is_whole:
            # Accept a new layer that adds no new parameters, such as a compiled wrapper around a known layer.
            known = {id(param) for module in self._names for param in module.parameters(recurse=False)}
            params = [new] if isinstance(new, nn.Parameter) else list(new.parameters())
            if all(id(param) in known for param in params):
                return
        self._new.append((weakref.ref(owner), name, weakref.ref(new)))


def refuse_calls(model: nn.Module) -> None:
    """Make calls of a model that is cut into stages raise ParallelError."""

    def refuse(*_: object) -> None:
        raise ParallelError(
            f"{type(model).__name__} was called, but it is cut into stages, and this rank has only its own. Train with "
            "par.step(batch), get numbers with par.evaluate(loader, metric), and par.full_state_dict() for a plain model to call."
        )

    model.register_forward_pre_hook(refuse)


def _kind(param: nn.Parameter) -> str:
    return f"{str(param.dtype).removeprefix('torch.')} on {param.device}"


def check_fits(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout, microbatches: int = 1
) -> None:
    """Refuse a model or an optimizer that the layout cannot train.

    Raises:
        ParallelError: A module or the optimizer is unfit. Without this check torch would fail during a step.
    """
    for is_cut, is_unfit, why in _unfit(layout, microbatches):
        for name, module in model.named_modules() if is_cut else ():
            if is_unfit(module):
                raise ParallelError(f"{name or 'the model'} {why}")
    _refuse_renormalised(model, layout)
    if layout.replicas > 1 and layout.shard == 1 and layout.pipe == 1:
        for name, param in model.named_parameters():
            if param.is_complex() and param.requires_grad:
                raise ParallelError(
                    f"{name} is complex, and torch's DistributedDataParallel adds up real gradients alone. Keep it as real "
                    "numbers (torch.view_as_complex(param) in the forward), or use PipelineParallel(), or FullyShard() where all "
                    "parameters of a block have one type."
                )
    kind = type(optimizer).__name__
    cuts_experts = layout.expert > 1 and any(is_fused(module) for module in model.modules())
    if kind in _NOT_IN_PARTS and (layout.shard > 1 or layout.tensor > 1 or cuts_experts):
        raise ParallelError(
            f"{kind} {_NOT_IN_PARTS[kind]}, and {layout} leaves each worker a part of them. Use DataParallel() or "
            "PipelineParallel(), or another optimizer, such as AdamW."
        )


def _unfit(layout: Layout, microbatches: int) -> Iterator[tuple[bool, Callable[[nn.Module], bool], str]]:
    yield (
        max(layout.replicas, layout.tensor, layout.context) > 1,
        lambda module: _learns(module) and bool(module.sparse),
        f"has sparse gradients (sparse=True), which {layout} does not exchange. Make it with sparse=False, or use "
        "PipelineParallel() alone.",
    )
    yield (
        layout.replicas > 1 or microbatches > 1,
        lambda module: _learns(module) and bool(module.scale_grad_by_freq),
        "divides gradients by how often a row is in the batch (scale_grad_by_freq=True), but "
        f"{layout} with {microbatches} microbatches computes parts of the batch separately. Make it with "
        "scale_grad_by_freq=False, or compute each batch in one part: microbatches=1 and accumulate=1 under TensorParallel().",
    )
    yield (
        layout.context > 1,
        lambda module: isinstance(module, BatchNorm),
        f"normalises over a batch, and under {layout} each worker has a part of each sequence. Use LayerNorm or GroupNorm over "
        "features, or DataParallel().",
    )
    yield (
        max(layout.tensor, layout.context, layout.expert) > 1,
        is_compiled,
        f"is compiled, and compiled code cannot compute with the parts that {layout} makes. Give parallelize the model before "
        "torch.compile, or use DataParallel() or FullyShard().",
    )
    yield (
        layout.tensor > 1 or layout.shard > 1,
        lambda module: isinstance(module, torch.jit.ScriptModule),
        f"is a module of TorchScript (torch.jit), whose parameters {layout} can't cut. Give the module before torch.jit, or use "
        "DataParallel() or PipelineParallel().",
    )


def _learns(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight.requires_grad


def _refuse_renormalised(model: nn.Module, layout: Layout) -> None:
    """Raise ParallelError if copies of an embedding with max_norm see different batches.

    A forward pass rescales the embedding rows that its batch looks up, so the copies would diverge.
    """
    tied = {name for group in find(model) for name in group}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if max(layout.replicas, layout.context, layout.expert) > 1:
            why = "of which each worker looks up others, so that their copies would differ"
        elif layout.pipe > 1 and f"{name}.weight".lstrip(".") in tied:
            why = "and another stage may hold a copy of the tied weight, which stays as it is"
        else:
            continue
        raise ParallelError(
            f"{name or 'the model'} ({type(module).__name__}) with max_norm={module.max_norm} scales the rows that it looks "
            f"up in its forward, {why} under {layout}. Use TensorParallel(), where all workers look up the same rows, or leave "
            "max_norm out."
        )


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` or `module.compile()` was called."""
    # torch.compile(module) returns a wrapper with the attribute `_orig_mod`. module.compile() sets an attribute of the module.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
