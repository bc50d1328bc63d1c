"""Parameters, gradients and optimizer states in equal parts, by torch's FSDP2.

A unit is a module whose parameters FSDP2 gathers together: each block (an element of the model's lists), and the model itself
with all other parameters. The model's unit also has tensors that two blocks share, because FSDP2 forbids sharing.

A forward pass may change parameters, such as a momentum encoder's. Hooks write the changes back to the parts, in this order:

    the model's forward begins      ChangedParts.begin
    a unit's forward                ChangedParts.before, FSDP2 gathers the parameters, Written.before
                                    ... the forward ... Written.after, FSDP2 frees the gathered parameters
    the model's forward ends        ChangedParts.after
    a unit's backward               FSDP2 gathers and frees the parameters again
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.full_tensor import is_part
from paceline.parallel.gradient_hooks import Hooks
from paceline.parallel.large.meta_parameters import give_memory, region_of, slices
from paceline.parallel.mesh import World
from paceline.parallel.pytree import map_tensors
from paceline.parallel.reduce import local
from paceline.torch_private import reduce_unused_too, sharded_parameters, whole_parameters


def shard_stage(module: nn.Module, world: World) -> list[Written]:
    """Shard a module's parameters by FSDP2. Return an observer for each FSDP2 unit.

    Parameters keep their names. Gradients become sums over the replicas, not means. The observers record which
    parameters a forward pass changes.

    Raises:
        ParallelError: A pattern of `units` matches no module, or torch cannot shard a parameter.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    layout = world.layout
    mesh = world.axes("data", "shard") if layout.data > 1 else world.axes("shard")
    options: dict[str, Any] = {"mesh": mesh}
    ignored = set(left_whole(module))
    if ignored:
        options["ignored_params"] = ignored
    names = [*find_units(module, layout.units), ""]
    _check_dtypes(module, names, ignored)
    hooks = {name: Hooks(param) for name, param in module.named_parameters(remove_duplicate=False)}
    noted: list[Written] = []
    held_names: dict[int, str] = {}
    try:
        for name in names:
            part = module.get_submodule(name)
            part.register_forward_hook(_own_outputs)
            # Register this hook before `fully_shard`: hooks run in order, and FSDP2's hook frees parameters that this hook reads.
            written = Written(part, held_names)
            noted.append(written)
            part.register_forward_hook(written.after)
            fully_shard(part, **options)
            # Register this hook after `fully_shard`, because FSDP2's hook must gather the parameters before this hook reads them.
            part.register_forward_pre_hook(written.before)
    except (ValueError, NotImplementedError) as error:
        raise ParallelError(f"this model can't be fully sharded by torch: {error}") from error
    _keep_recurrent_weights_apart(module)
    if world.device.type == "cuda":
        wait_for_changes(module, names, lambda: torch.cuda.current_stream().synchronize())
    give_memory(world.device, module)
    for name, param in module.named_parameters(remove_duplicate=False):
        held_names.setdefault(id(param), name)
        vars(param)["_paceline_hooks"] = hooks[name].also(param)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Let FSDP2 sum instead of averaging, because the microbatches' weights are in the loss.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # Send zeros for parameters that a rank's rows do not use: messages of different lengths would hang or crash.
            reduce_unused_too(part)
    return noted


def _keep_recurrent_weights_apart(module: nn.Module) -> None:
    """Stop recurrent layers from moving their weights to memory that FSDP2 does not fill."""
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    for part in recurrent:
        vars(part)["flatten_parameters"] = _leave_apart
    if recurrent:
        # Hide torch's warning that cuDNN has to flatten the weights in each call, because the lines above make this unavoidable.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


def _leave_apart() -> None:
    pass


def wait_for_changes(module: nn.Module, names: Iterable[str], wait: Callable[[], None]) -> None:
    """Make FSDP2 wait for in-place changes of parameters before it gathers them again.

    `names` are the modules that FSDP2 gathers; "" is `module`. `wait` is called if a forward pass has changed a parameter.
    """
    units = [module.get_submodule(name) for name in names]
    changed = ChangedParts(units, wait)
    for unit in units:
        # Detect in-place changes before (`prepend`) FSDP2's hook gathers the parameters: FSDP2 must wait for these changes.
        unit.register_forward_pre_hook(changed.begin if unit is module else changed.before, prepend=True)
    module.register_forward_hook(changed.after)


def _own_outputs(module: nn.Module, args: object, output: object) -> object:
    """Copy outputs that are views: changing a view in place would drop FSDP2's hook."""
    return map_tensors(output, lambda tensor: tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor)


def left_whole(module: nn.Module) -> list[nn.Parameter]:
    """Return the 0-dim parameters, which FSDP2 does not shard."""
    return [param for param in module.parameters() if param.dim() == 0]


def reduce_over_replicas(module: nn.Module, is_last: bool) -> None:
    """Set whether the next backward pass sums gradients over the replicas."""
    whole: Any = module
    whole.set_requires_all_reduce(is_last)
    whole.set_is_last_backward(is_last)


def reduce_after_last(module: nn.Module, is_last: bool) -> None:
    """Tell FSDP2 whether a stage's next backward pass is the step's last.

    Only the last pass sums gradients and frees the gathered parameters. Without FSDP2 this does nothing.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.set_is_last_backward(is_last)
        module.set_reshard_after_backward(is_last)
        module.set_requires_gradient_sync(is_last)


def part_again(module: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered for a forward pass.

    Without this call, a script that freezes one of `module.parameters()` would freeze only the gathered copy.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def find_units(module: nn.Module, patterns: tuple[str, ...] | None = None) -> list[str]:
    """Return the names of the modules that FSDP2 gathers as units, inner modules first.

    Without patterns the units are the elements of the outermost lists (ModuleList, Sequential, ModuleDict) that have
    parameters. Modules that share a parameter with other modules are left out.
    """
    if patterns is None:
        chosen = [name for name in _elements(module) if next(module.get_submodule(name).parameters(), None) is not None]
    else:
        names = [name for name, _ in module.named_modules() if name]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ParallelError(
                    f"FullyShard(units=[{pattern!r}]) matches no module. This model has, among others: {', '.join(names[:8])}."
                )
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    shared = _shared_outside(module, chosen)
    return sorted([name for name in chosen if name not in shared], key=lambda name: -name.count("."))


def _elements(module: nn.Module, prefix: str = "") -> list[str]:
    paths = []
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        # In nested lists, such as a list of stages that are lists of blocks, only elements of the inner lists are blocks.
        is_block = is_list and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        paths += [path] if is_block else _elements(child, f"{path}.")
    return paths


def _shared_outside(module: nn.Module, names: list[str]) -> set[str]:
    uses: dict[int, set[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        uses.setdefault(id(param), set()).add(name)
    shared = {
        name
        for name in names
        for param in module.get_submodule(name).parameters()
        if any(not use.startswith(f"{name}.") for use in uses[id(param)])
    }
    # A module that the model holds under two names counts as shared, because its parameters then have two names as well.
    seen: dict[int, str] = {}
    for name in names:
        first = seen.setdefault(id(module.get_submodule(name)), name)
        if first != name:
            shared |= {first, name}
    return shared


def _check_dtypes(module: nn.Module, units: Sequence[str], ignored: Iterable[nn.Parameter]) -> None:
    """Raise ParallelError if the trained parameters of an FSDP2 unit have several dtypes."""
    taken = {id(param) for param in ignored}
    for unit in units:
        own = {name: param for name, param in module.get_submodule(unit).named_parameters() if id(param) not in taken}
        taken.update(id(param) for param in own.values())
        first_of = {param.dtype: name for name, param in reversed(own.items()) if param.requires_grad}
        if len(first_of) > 1:
            types = ", ".join(f"{name} is {dtype}" for dtype, name in sorted(first_of.items(), key=str))
            raise ParallelError(
                f"FullyShard() keeps the parameters of {unit or 'the model outside of its units'} together, which have several "
                f"types: {types}. Make them of one type, or the parts with another one units: "
                "FullyShard(units=['<module>', ...])."
            )


class ChangedParts:
    """Hooks that wait for in-place changes of parameters before FSDP2 gathers them.

    FSDP2 gathers on its own GPU streams, which wait for the caller's stream only at the start of the model's forward
    pass. So FSDP2 could read a momentum encoder's parameters while the forward pass changes them.
    """

    def __init__(self, units: Sequence[nn.Module], wait: Callable[[], None]) -> None:
        """Watch the units. `wait` blocks until the caller's GPU work is done."""
        self._units = units
        self._wait = wait
        self._versions: dict[int, tuple[int, int]] = {}

    @torch.no_grad()
    def begin(self, *_: object) -> None:
        """Record parameter versions, to detect changes during the forward pass."""
        self._versions = {id(part): _versions(part) for unit in self._units for part in sharded_parameters(unit)}

    def before(self, unit: nn.Module, *_: object) -> None:
        self._look((unit,))

    def after(self, *_: object) -> None:
        self._look(self._units)

    @torch.no_grad()
    def _look(self, units: Iterable[nn.Module]) -> None:
        is_changed = False
        for unit in units:
            for part in sharded_parameters(unit):
                now = _versions(part)
                is_changed = is_changed or self._versions.get(id(part), now) != now
                self._versions[id(part)] = now
        if is_changed:
            self._wait()


def _versions(part: Tensor) -> tuple[int, int]:
    return part._version, local(part)._version


class Written:
    """An observer that writes in-place changes of gathered parameters to their shards.

    FSDP2 frees the gathered parameters after a pass, so a change, such as a momentum encoder's update, would be lost.
    """

    def __init__(self, part: nn.Module, names: Mapping[int, str]) -> None:
        """Watch a module. `names` maps parameter ids to names, and may be filled later."""
        self._part, self._names = part, names
        self._versions: dict[int, int] = {}
        #: Name of a changed parameter -> sum of its absolute values, which ranks compare. The executor empties the dict.
        self.sizes: dict[str, float] = {}

    def before(self, *_: object) -> None:
        """Before a forward pass, record parameter versions to detect changes."""
        self._versions = {id(whole): whole._version for _, whole in whole_parameters(self._part, inner=False)}

    def after(self, *_: object) -> None:
        """Write parameters that the forward pass has changed back to the shards."""
        for sharded, whole in whole_parameters(self._part, inner=False):
            if whole._version != self._versions.get(id(whole), whole._version):
                _write_back(sharded, whole)
                self.sizes[self._names.get(id(sharded), "a parameter")] = size_of(whole)
                self._versions[id(whole)] = whole._version


def size_of(param: Tensor) -> float:
    """Return the sum of absolute values of a parameter or of this rank's part."""
    return float(local(param.detach()).abs().sum(dtype=torch.float64))


def _write_back(sharded: nn.Parameter, whole: nn.Parameter) -> None:
    part = whole.detach()
    if is_part(part):
        raise ParallelError(
            "the model's forward pass changes a parameter that is cut by FullyShard() and by TensorParallel() in place. Leave "
            "its layer whole (TensorParallel(plan={...: 'replicate'})), or use DataParallel()."
        )
    with torch.no_grad():
        local(sharded).copy_(part[slices(region_of(sharded))])
