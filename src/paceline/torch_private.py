"""Which releases of torch are served, and the parts of torch that are used without being public.

    from paceline.torch_private import FakeTensorMode      # imported from torch when it is first asked for

A release of torch may move any of these without a word. So they all stand here, with what differs between releases;
`tests/test_torch_private.py` compares their signatures, and `make compat` runs the tests on every release that is served. Used
elsewhere, because they have been the same for years: nn.Module's own dictionaries (`_parameters`, `_modules`, `_buffers`) and
a tensor's `_version`, `_is_view` and `_cdata`.

Nothing is imported here but the standard library.
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
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module, Parameter
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

    #: What a fake tensor raises when its values are asked for.
    VALUE_NEEDED: tuple[type[Exception], ...]

#: The oldest and the newest minor release on which the tests were run, as in pyproject.toml.
OLDEST = (2, 9)
NEWEST = (2, 15)

_FAKE = "torch._subclasses.fake_tensor"

#: Name here -> the module of torch, and the names there; of several, all in a tuple.
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
    "NEWEST",
    "OLDEST",
    "VALUE_NEEDED",
    "BatchNorm",
    "DispatchMode",
    "FakeTensorMode",
    "InstanceNorm",
    "TorchError",
    "checkpoints_inputs",
    "data_iterator_class",
    "default_store",
    "has_mpi",
    "is_being_made_whole",
    "is_torchs_attribute",
    "keep_lookups_apart",
    "keep_own_parts",
    "lost_arguments",
    "offer_mpi",
    "recorded_collectives",
    "reduce_unused_too",
    "requirement",
    "time_every_step",
    "too_old",
    "waited_s",
    "warn_if_untried",
    "whole_parameters",
    "work_class",
]


class TorchError(PacelineError, ImportError):
    """This release of torch is not one that is served, or has moved something that is needed."""


# Releases.


def requirement() -> str:
    """What pip is to be asked for."""
    return f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def too_old(what: str) -> str | None:
    """A sentence if the torch that is installed is older than those served; else None. what: what needs it."""
    return _needs(what) if _release() < OLDEST else None


def warn_if_untried(what: str) -> None:
    """Warn, once in a process, if torch is newer than every release on which the tests were run.

    It is not refused: most releases change nothing that is used here. What is missing then raises TorchError.
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
    # A build with a name of its own is its builder's business.
    return (int(found[1]), int(found[2])) if found else NEWEST


# Names.

# Hidden from type checkers: seeing it, they would take any name for one that this module has, misspelled ones too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Loaded now and kept: torch takes seconds to import, and some who import this module want the names of releases alone.
        module, *there = _WHERE[name]
        try:
            found = tuple(getattr(importlib.import_module(module), one) for one in there)
        except (ImportError, AttributeError) as error:
            raise _moved(f"{module}: {', '.join(there)}") from error
        globals()[name] = found if len(found) > 1 else found[0]
        return globals()[name]


def _moved(what: str) -> TorchError:
    return TorchError(f"{_needs('Paceline')} (It has no {what}.)")


# Checkpoints' inside.


def checkpoints_inputs() -> tuple[type, ...]:
    """The custom autograd functions with which `torch.utils.checkpoint` keeps a block's arguments; none from torch 2.12 on.

    Nothing is computed in them: their results are for the checkpoint alone.
    """
    from torch.utils import checkpoint

    kind = getattr(checkpoint, "_NoopSaveInputs", None)
    return () if kind is None else (kind,)


# DTensor's inside.


def keep_lookups_apart() -> None:
    """Let each lookup in a cut vocabulary find its own mask and its own size; called before a model is cut.

    A rank masks what other ranks have of the vocabulary, and the same mask is due again for the output. torch 2.9 holds
    masks of equal vocabularies for equal, and so does 2.10, and keeps in a cache by them how a tensor goes from one layout to
    another. Two models that differ in nothing but their dtype then get each other's masks, and the lookup fails. In the cache
    of the backward pass the vocabulary's size is missing, so that a second model gets gradients of the first one's shape. Does
    nothing where torch does both.
    """
    try:
        lookups = importlib.import_module("torch.distributed.tensor._ops._embedding_ops")
        schema = importlib.import_module("torch.distributed.tensor._op_schema")
    except ImportError:
        return
    # 2.10 has it without the underscore. Where it has moved, a newer release tells masks apart.
    kind: Any = getattr(lookups, "_MaskPartial", None) or getattr(lookups, "MaskPartial", None)
    # Two fresh masks that are equal show the fault, whatever the release is called. After the change they are not equal any
    # more, so that a second call does nothing.
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
    # Where this table has come as well, so has the size.
    if known is None or hasattr(propagator, "op_to_schema_info_for_single_dim_strategy"):
        return
    # aten::embedding_dense_backward(grad_output, indices, num_weights, ...): what is hashed begins with the third.
    known.setdefault(ops.aten.embedding_dense_backward.default, schema.RuntimeSchemaInfo(static_argnum=2))


def keep_own_parts(module: Module) -> None:
    """Let a module that has just been cut hold its parts alone; does nothing where torch has copied them, as from 2.12 on.

    Up to then a part along the first dimension is a view of the whole parameter, which stays in memory by it.
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
    """Whether it is FSDP2 that sets an attribute of this name on a module."""
    return name.startswith("__composable_api_state_key") or name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


# FSDP2's inside.


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Let no mode see the calls of torch in this block."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def lost_arguments(function: Any) -> dict[str, Any]:
    """Return the keyword arguments that torch leaves out where it hands this function of its own to a mode.

    To be called by the mode's `__torch_function__`. l1_loss leaves out its weight, from torch 2.13 on.
    """
    from torch.nn.functional import l1_loss

    frame = sys._getframe() if function is l1_loss else None
    while frame is not None and frame.f_code is not l1_loss.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals.get("weight")
    return {} if weight is None else {"weight": weight}


def whole_parameters(module: Module, *, inner: bool = True) -> Iterator[tuple[Parameter, Parameter]]:
    """This rank's part and the whole of each parameter of a sharded module that has been put together already.

    inner: those of the units within it too.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules() if inner else (module,):
        if isinstance(part, FSDPModule):
            for group in _parameter_groups(part):
                yield from (
                    (held.sharded_param, _whole(held)) for held in group.fsdp_params if _whole(held) is not None
                )


def sharded_parameters(unit: Module) -> Iterator[Parameter]:
    """This rank's parts of the parameters that a sharded unit puts together."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(unit, FSDPModule):
        for group in _parameter_groups(unit):
            yield from (held.sharded_param for held in group.fsdp_params)


def is_being_made_whole(part: Module) -> bool:
    """Whether FSDP2 has begun to put the parameters of this unit together, ahead of the pass that needs them."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(part, FSDPModule):
        return False
    return any(getattr(group, "_all_gather_result", None) is not None for group in _parameter_groups(part))


def reduce_unused_too(part: FSDPModule) -> None:
    """Let the ranks' messages have one length: a parameter that got no gradient on this rank goes into them as zeros."""
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True, recurse=False)
        return
    # Before torch 2.13, where a rank that leaves out a parameter sends a shorter message than the others.
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
        # Several from torch 2.12 on.
        if hasattr(state, "_fsdp_param_groups"):
            return list(state._fsdp_param_groups)
        return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    except AttributeError as error:
        raise _moved(f"FSDP2 like that of earlier releases: {error}") from error


def _whole(held: Any) -> Any:
    return getattr(held, "_unsharded_param", None)


# torch.distributed.


def default_store() -> Any:
    """The store by which the default process group was made."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    try:
        return c10d._get_default_store()
    except AttributeError as error:
        raise _moved("torch.distributed.distributed_c10d._get_default_store") from error


def recorded_collectives() -> bytes:
    """What the flight recorder holds, as torch writes it (JSON), and a line of JSON behind it: group -> its ranks in the world.

    Empty where this torch has no recorder, or it is turned off (TORCH_FR_BUFFER_SIZE=0). Loads nothing.
    """
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    # The second is the name before torch 2.8 or so; it told of NCCL alone.
    dump = getattr(module, "_dump_fr_trace_json", None) or getattr(module, "_dump_nccl_trace_json", None)
    if dump is None:
        return b""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, members = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    ranks = {str(name): sorted(members.get(group, ())) for group, name in list(names.items())}
    data: str | bytes = dump()
    return (data.encode() if isinstance(data, str) else data) + b"\n" + json.dumps(ranks).encode()


def work_class() -> Any:
    """The class of torch's handles of collectives under way; None where there is none. Loads nothing."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)


def data_iterator_class(module: ModuleType) -> Any:
    """The class whose `__next__` gives the batches of every DataLoader; None where this torch has none. module: the loader's."""
    found = getattr(module, "_BaseDataLoaderIter", None)
    return found if hasattr(found, "__next__") else None


def time_every_step(model: Any) -> bool:
    """Have DistributedDataParallel measure each of its steps, which on CPUs takes microseconds; False where it can't be had.

    On GPUs it measures every hundredth by itself, and its main thread waits for no message: nothing is changed there.
    """
    try:
        if getattr(model, "device_type", "") != "cpu":
            return False
        model._set_ddp_runtime_logging_sample_rate(1)
        return callable(model._get_ddp_logging_data)
    except (AttributeError, TypeError, RuntimeError):
        return False


def waited_s(model: Any) -> float | None:
    """How long DistributedDataParallel has waited for messages in its last step, beyond its own gradients, in seconds; None where
    it does not tell.
    """
    try:
        told = model._get_ddp_logging_data()
        # In nanoseconds; not there before the first step.
        return float(
            max(0, told.get("backward_comm_time", 0) - told.get("backward_compute_comm_overlap_time", 0)) / 1e9
        )
    except (AttributeError, TypeError, RuntimeError):
        return None


def has_mpi(distributed: ModuleType) -> bool:
    """Whether this torch was built with MPI, or has been offered one."""
    return bool(getattr(distributed.distributed_c10d, "_MPI_AVAILABLE", False))


def offer_mpi(distributed: ModuleType, kind: type, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let torch make its process groups of the backend "mpi" with `kind.create(ranks)`.

    distributed: `torch.distributed`, whose import may be just ending.
    around: given what makes each process group, returns what is to be called in its place, with the same arguments.

    Raises:
        TorchError: this torch makes process groups in another way.
    """
    c10d: Any = distributed.distributed_c10d
    missing = [name for name in ("_new_process_group_helper", "_MPI_AVAILABLE") if not hasattr(c10d, name)]
    if missing:
        raise _moved(f"torch.distributed.distributed_c10d.{missing[0]}")
    # init_process_group and new_group both make their groups by this one function.
    c10d._new_process_group_helper = around(c10d._new_process_group_helper)
    c10d.ProcessGroupMPI = kind
    # is_mpi_available() reads it.
    c10d._MPI_AVAILABLE = True
    setattr(distributed, "ProcessGroupMPI", kind)  # noqa: B010 - torch's stubs don't have it
    # From torch 2.15 on a flight recorder listens to what goes through C++'s own group object, which a group made in Python has
    # not. Backends in this set are taken to record for themselves.
    recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add("mpi")
