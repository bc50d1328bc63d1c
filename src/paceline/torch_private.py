"""The supported torch releases, and access to every private part of torch that Paceline uses.

    from paceline.torch_private import FakeTensorMode      # imported from torch on first access

A release of torch may move a private part without notice. So all of them are in this file, with the differences between
releases. `tests/test_torch_private.py` compares their signatures, and `make compat` runs the tests with every supported
release. Other files use only parts that have been stable for years: nn.Module's dictionaries (`_parameters`,
`_modules`, `_buffers`) and a tensor's `_version`, `_is_view` and `_cdata`.

Importing this module needs only the standard library.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch._ops import OpOverload as Operation
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn import Module, Parameter
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

    #: The exceptions that a fake tensor raises when code reads its values.
    VALUE_NEEDED: tuple[type[Exception], ...]

#: Oldest and newest minor version of torch with which the tests have passed. pyproject.toml has the same limits.
OLDEST = (2, 9)
NEWEST = (2, 15)

_FAKE = "torch._subclasses.fake_tensor"

#: Attribute of this module -> torch's module, and the object's name in it. If there are several names, the attribute is a tuple.
_WHERE = {
    "BatchNorm": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    "DispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "FakeTensorMode": (_FAKE, "FakeTensorMode"),
    "InstanceNorm": ("torch.nn.modules.instancenorm", "_InstanceNorm"),
    "VALUE_NEEDED": (
        _FAKE,
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
    ),
}

__all__ = [
    "NEWEST", "OLDEST", "VALUE_NEEDED", "BatchNorm", "DispatchMode", "FakeTensorMode", "InstanceNorm", "Operation",
    "Store", "TorchError", "checkpoints_inputs", "corner_of_part", "data_iterator_class", "default_store", "has_mpi",
    "is_being_made_whole", "is_torchs_attribute", "keep_lookups_apart", "keep_own_parts", "lost_arguments",
    "offer_mpi", "recorded_collectives", "reduce_unused_too", "requirement", "time_every_step", "too_old", "waited_s",
    "warn_if_untried", "whole_parameters", "work_class",
]  # fmt: skip


class TorchError(PacelineError, ImportError):
    """An error because the installed torch is unsupported or lacks a needed part."""


# Functions that check torch's version.


def requirement() -> str:
    """Return pip's requirement for supported versions of torch."""
    return f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def too_old(what: str) -> str | None:
    """Return a message if the installed torch is too old for `what`, else None."""
    return _needs(what) if _release() < OLDEST else None


def warn_if_untried(what: str) -> None:
    """Warn once if torch is newer than every tested release.

    `what` names the feature. A newer torch is not refused, because most releases change nothing that Paceline uses.
    """
    if _release() > NEWEST and not _told:
        _told.append(what)
        warnings.warn(
            f"{what} was tried with torch {_span()}; this is {_version()}. If anything is wrong with it: "
            f"pip install '{requirement()}'.",
            stacklevel=4,
        )


_told: list[str] = []


def _needs(what: str) -> str:
    return f"{what} needs torch {_span()}; this is {_version()}: pip install '{requirement()}'."


def _span() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def _version() -> str:
    import torch

    return str(torch.__version__)


def _release() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", _version())
    # A torch built from source may have a version without numbers. Treat it as the newest version.
    return (int(found[1]), int(found[2])) if found else NEWEST


# Access to names that torch does not document.

# Hide `__getattr__` from type checkers. Otherwise they would accept any misspelled name of this module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Import torch's module only now, because this takes seconds, and some callers need only `OLDEST` and `NEWEST`.
        module, *there = _WHERE[name]
        try:
            found = tuple(getattr(importlib.import_module(module), one) for one in there)
        except (ImportError, AttributeError) as error:
            raise _moved(f"{module}: {', '.join(there)}") from error
        globals()[name] = found if len(found) > 1 else found[0]
        return globals()[name]


def _moved(what: str) -> TorchError:
    return TorchError(f"{_needs('Paceline')} (It has no {what}.)")


# Functions that use internals of torch's activation checkpointing.


def checkpoints_inputs() -> tuple[type, ...]:
    """Return autograd functions that only save inputs for activation checkpointing.

    They compute nothing. From torch 2.12 on, the result is empty.
    """
    from torch.utils import checkpoint

    kind = getattr(checkpoint, "_NoopSaveInputs", None)
    return () if kind is None else (kind,)


# Functions that use internals of DTensor.


def keep_lookups_apart() -> None:
    """Repair torch 2.9 and 2.10 for embeddings whose vocabulary is sharded.

    Call this function before a model is sharded. It does nothing on releases without the following two bugs. In a
    lookup, a rank masks the tokens of other ranks, and needs that mask for the output. These releases use one mask for
    vocabularies of equal shape, so the lookup fails if two models differ only in dtype. A cache of the backward pass
    ignores the vocabulary's size, so a second model gets gradients in the first model's shape.
    """
    try:
        lookups = importlib.import_module("torch.distributed.tensor._ops._embedding_ops")
        schema = importlib.import_module("torch.distributed.tensor._op_schema")
    except ImportError:
        return
    # Masks have the class _MaskPartial up to torch 2.9, MaskPartial since 2.10. Without either class, there is no bug.
    kind: Any = getattr(lookups, "_MaskPartial", None) or getattr(lookups, "MaskPartial", None)
    # The bug is present if two new masks compare equal. After the repair they compare unequal, so a second call of this function
    # does nothing.
    if kind is not None and kind(offset_shape=(1, 1)) == kind(offset_shape=(1, 1)):
        equal, code = kind.__eq__, kind.__hash__
        kind.__eq__ = lambda self, other: bool(equal(self, other)) and self.mask_buffer is other.mask_buffer
        kind.__hash__ = lambda self: hash((code(self), id(self.mask_buffer)))
    _count_the_size_of_a_vocabulary(schema)


def _count_the_size_of_a_vocabulary(schema: ModuleType) -> None:
    from torch import ops
    from torch.distributed.tensor import DTensor

    propagator = getattr(getattr(DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    known = getattr(propagator, "op_to_schema_info", None)
    # A torch with the table named below needs no repair, because its cache key includes the vocabulary's size.
    if known is None or hasattr(propagator, "op_to_schema_info_for_single_dim_strategy"):
        return
    # Start the cache key at argument 2 (num_weights) of aten::embedding_dense_backward(grad_output, indices, num_weights, ...).
    known.setdefault(ops.aten.embedding_dense_backward.default, schema.RuntimeSchemaInfo(static_argnum=2))


def keep_own_parts(module: Module) -> None:
    """Let a newly sharded module keep only this rank's shards in memory.

    Before torch 2.12 a shard along the first dimension is a view that keeps the whole parameter in memory. Later releases copy
    the shard.
    """
    from torch.distributed.tensor import DTensor
    from torch.nn import Parameter

    for name, param in list(module.named_parameters(recurse=False)):
        if not isinstance(param, DTensor):
            continue
        part = param.to_local().detach()
        if part.untyped_storage().nbytes() == part.nbytes:
            continue
        shape, stride = param.shape, param.stride()
        own = DTensor.from_local(
            part.clone(), param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
        )
        module.register_parameter(name, Parameter(own, requires_grad=param.requires_grad))


def is_torchs_attribute(name: str) -> bool:
    """Return whether FSDP2 sets a module attribute of this name."""
    return name.startswith("__composable_api_state_key") or name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


# Functions that use internals of FSDP2.


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run a `with` block without TorchFunctionModes and TorchDispatchModes."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def lost_arguments(function: Any) -> dict[str, object]:
    """Return arguments in a call of `function` that torch hides from TorchFunctionModes.

    Call this in a mode's `__torch_function__`. Only l1_loss of torch 2.13 and later hides an argument, its weight.
    """
    from torch.nn.functional import l1_loss

    frame = sys._getframe() if function is l1_loss else None
    while frame is not None and frame.f_code is not l1_loss.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals.get("weight")
    return {} if weight is None else {"weight": weight}


def whole_parameters(module: Module, *, inner: bool = True) -> Iterator[tuple[Parameter, Parameter]]:
    """Yield (this rank's shard, whole parameter) for a sharded module's gathered parameters.

    With `inner`, also yield the parameters of nested FSDP units.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules() if inner else (module,):
        if isinstance(part, FSDPModule):
            for group in _parameter_groups(part):
                yield from (
                    (held.sharded_param, _whole(held)) for held in group.fsdp_params if _whole(held) is not None
                )


def sharded_parameters(unit: Module) -> Iterator[Parameter]:
    """Yield this rank's shards of the parameters that the FSDP2 unit gathers."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(unit, FSDPModule):
        for group in _parameter_groups(unit):
            yield from (held.sharded_param for held in group.fsdp_params)


def is_being_made_whole(part: Module) -> bool:
    """Return whether FSDP2 has started to prefetch the parameters of this unit."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(part, FSDPModule) and any(
        getattr(group, "_all_gather_result", None) is not None for group in _parameter_groups(part)
    )


def reduce_unused_too(part: FSDPModule) -> None:
    """Let an FSDP2 unit also send zeros for parameters without gradients."""
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True, recurse=False)
        return
    # Before torch 2.13, a rank that omits a parameter without gradient would send a shorter message.
    for group in _parameter_groups(part):
        group.post_backward = _with_zeros(group, group.post_backward)


def _with_zeros(group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
    import torch

    def run(*unused: Any) -> None:
        for held in group.fsdp_params if group.reduce_grads else ():
            whole = _whole(held)
            if (
                whole is not None
                and whole.requires_grad
                and whole.grad is None
                and held.unsharded_accumulated_grad is None
            ):
                whole.grad = torch.zeros_like(whole)
        post_backward(*unused)

    return run


def _parameter_groups(part: FSDPModule) -> list[Any]:
    try:
        state: Any = part._get_fsdp_state()
        # Since torch 2.12, FSDP2 may have several parameter groups for one module.
        if hasattr(state, "_fsdp_param_groups"):
            return list(state._fsdp_param_groups)
        return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    except AttributeError as error:
        raise _moved(f"FSDP2 like that of earlier releases: {error}") from error


def _whole(held: Any) -> Any:
    return getattr(held, "_unsharded_param", None)


# Functions that use internals of torch.distributed.


def default_store() -> Store:
    """Return the key-value store of the default process group."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    try:
        store: Store = c10d._get_default_store()
        return store
    except AttributeError as error:
        raise _moved("torch.distributed.distributed_c10d._get_default_store") from error


def count_messages() -> tuple[int, int]:
    """Return how many operations the default group has begun, and the number of groups."""
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    if world is None:
        return 0, 0
    try:
        return int(world._get_sequence_number_for_group()), len(dist.distributed_c10d._world.pg_map)
    except AttributeError as error:
        raise _moved("ProcessGroup._get_sequence_number_for_group") from error


def recorded_collectives() -> bytes:
    """Return the flight recorder's JSON, and JSON of groups' ranks, as two lines.

    The result is empty if this torch has no flight recorder, or if TORCH_FR_BUFFER_SIZE=0 disables the recorder. The
    function imports nothing.
    """
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    # Before torch 2.8 this function was `_dump_nccl_trace_json`, which returned only NCCL's calls.
    dump = getattr(module, "_dump_fr_trace_json", None) or getattr(module, "_dump_nccl_trace_json", None)
    if dump is None:
        return b""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, members = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    ranks = {str(name): sorted(members.get(group, ())) for group, name in list(names.items())}
    data: str | bytes = dump()
    return (data.encode() if isinstance(data, str) else data) + b"\n" + json.dumps(ranks).encode()


def work_class() -> Any:
    """Return torch's class `Work` of collective handles; None without torch.distributed."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)


def data_iterator_class(module: ModuleType) -> Any:
    """Return the base class of DataLoader iterators, or None if torch lacks it.

    `module` is the torch module that defines DataLoader.
    """
    found = getattr(module, "_BaseDataLoaderIter", None)
    return found if hasattr(found, "__next__") else None


def time_every_step(model: Any) -> bool:
    """Make DistributedDataParallel time each step. Return False if it cannot.

    On CPUs a measurement costs microseconds. For a model on GPUs the function returns False. DDP still times each
    hundredth step there, and its main thread does not wait for messages.
    """
    try:
        if getattr(model, "device_type", "") != "cpu":
            return False
        model._set_ddp_runtime_logging_sample_rate(1)
        return callable(model._get_ddp_logging_data)
    except (AttributeError, TypeError, RuntimeError):
        return False


def waited_s(model: Any) -> float | None:
    """Return how long DDP's last step waited for messages; None if unknown.

    The time counts from the moment at which this rank has computed its own gradients.
    """
    try:
        told = model._get_ddp_logging_data()
        # Convert nanoseconds to seconds. Use 0 before the first step, because torch has not measured these times yet.
        return float(
            max(0, told.get("backward_comm_time", 0) - told.get("backward_compute_comm_overlap_time", 0)) / 1e9
        )
    except (AttributeError, TypeError, RuntimeError):
        return None


def has_mpi(distributed: ModuleType) -> bool:
    """Return whether this torch was built with MPI, or `offer_mpi` has added MPI."""
    return bool(getattr(distributed.distributed_c10d, "_MPI_AVAILABLE", False))


def offer_mpi(distributed: ModuleType, kind: type, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let torch make process groups of the backend "mpi" by `kind.create(ranks)`.

    Args:
        distributed: `torch.distributed`, which may still be importing.
        kind: Class whose `create` makes a process group.
        around: Gets torch's own function that makes process groups, and returns a function that replaces it.

    Raises:
        TorchError: This torch makes process groups in another way.
    """
    c10d: Any = distributed.distributed_c10d
    missing = [name for name in ("_new_process_group_helper", "_MPI_AVAILABLE") if not hasattr(c10d, name)]
    if missing:
        raise _moved(f"torch.distributed.distributed_c10d.{missing[0]}")
    # Wrap this function, because both init_process_group and new_group call it.
    c10d._new_process_group_helper = around(c10d._new_process_group_helper)
    c10d.ProcessGroupMPI = kind
    # torch's function is_mpi_available() returns this variable.
    c10d._MPI_AVAILABLE = True
    setattr(distributed, "ProcessGroupMPI", kind)  # noqa: B010 - torch's stubs don't have it
    # Since torch 2.15, the flight recorder listens to C++ groups, which a group made in Python lacks. torch expects the backends
    # in this set to record their calls themselves.
    recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add("mpi")


def corner_of_part(tensor: DTensor) -> tuple[int, ...]:
    """Return the shard's offsets in the whole tensor, one for each dimension."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets)
