"""All-reduce of tensors in GPU memory by NCCL.

    caller's stream   ... backward | ready                      | waits for done, then step ...
    own stream                       waits for ready | reduce | done

The CPU waits for neither event: after starting the reduction, it makes the caller's stream wait for `done`. Operations
begin in the order on which the engine's ranks have agreed, because NCCL requires equal orders.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.collectives import numbers, rendezvous
from paceline.collectives.errors import CollectivesError

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import Tensor
    from torch.distributed.distributed_c10d import Work

_NAMES = {"sum": "SUM", "average": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}


class ReducingGroup(Protocol):
    """The methods of torch's process groups that Paceline calls to reduce GPU tensors."""

    def allreduce(self, tensors: list[Tensor], op: object) -> Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether HOROVOD_GPU_OPERATIONS=NCCL is set."""
    return environ.get("HOROVOD_GPU_OPERATIONS", "").strip().upper() == "NCCL"


def streams_of(device: torch.device) -> ModuleType | None:
    """Return `torch.cuda` if the device is a GPU, and None for the CPU."""
    import torch

    return torch.cuda if device.type == "cuda" else None


def ready(device: torch.device) -> torch.cuda.Event | None:
    """Return a CUDA event after all queued work, or None on a CPU."""
    streams = streams_of(device)
    if streams is None:
        return None
    event: torch.cuda.Event = streams.Event()
    event.record(streams.current_stream(device))
    return event


def join(
    environ: Mapping[str, str], generation: int, number: int, members: Sequence[int], rank: int, device: torch.device
) -> DeviceGroup:
    """Create the NCCL group of process set `number`. All `members` must call this."""
    import torch.distributed as dist

    name = f"device/{generation}"
    with translated(rank):
        meeting = rendezvous.place_to_meet(environ, name)
        if meeting.rank != rank:
            raise CollectivesError(f"RANK={meeting.rank}, but this is rank {rank} of the world.")
        part = meeting.part(f"set{number}", members)
        part.wait_for_all()
        # Use the store without signatures: NCCL calls methods of the store that the signing store does not have.
        store, there = part.raw_store("group"), members.index(rank)
        if device.type == "cuda":
            nccl = getattr(dist, "ProcessGroupNCCL", None)
            if nccl is None:
                raise CollectivesError(f"torch {sys.modules['torch'].__version__} has no NCCL.")
            with sys.modules["torch"].cuda.device(device):
                group = nccl(store, there, len(members), nccl.Options())
        else:
            gloo: Any = dist.ProcessGroupGloo
            group = gloo(store, there, len(members), part.operation_timeout)
    return DeviceGroup(group, len(members), streams_of(device), device)


@contextlib.contextmanager
def translated(rank: int) -> Iterator[None]:
    """Raise torch's errors in the block as CollectivesError, with `rank` and advice."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        raise CollectivesError(
            f"rank {rank} can't reduce tensors on its GPU: {first}. Unset HOROVOD_GPU_OPERATIONS to go through the host."
        ) from error


class DeviceGroup:
    """The reductions of a process set on one device.

    `group` is torch's process group of the set's ranks. `streams` is the module `torch.cuda`, or None on the CPU.
    Reductions on the CPU are synchronous.
    """

    def __init__(
        self, group: ReducingGroup, size: int, streams: ModuleType | None = None, device: torch.device | None = None
    ) -> None:
        self._group = group
        self._size = size
        self._streams = streams
        self._stream: torch.cuda.Stream | None = None if streams is None else streams.Stream(device=device)

    def allreduce(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        op: str,
        prescale: float,
        postscale: float,
        ready: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Start an all-reduce from `sources` into `targets`, which may be `sources`.

        Returns:
            The CUDA event that marks the end, or None on the CPU, where the reduction has finished.
        """
        if self._streams is None or self._stream is None or ready is None:
            self._reduce(sources, targets, op, prescale, postscale)
            return None
        with self._streams.stream(self._stream):
            self._stream.wait_event(ready)
            for tensor in (*sources, *targets):
                # Keep torch from reusing the tensor's memory while this stream still uses the tensor.
                tensor.record_stream(self._stream)
            self._reduce(sources, targets, op, prescale, postscale)
            done: torch.cuda.Event = self._streams.Event()
            done.record(self._stream)
        return done

    def let_wait(self, done: torch.cuda.Event | None) -> None:
        """Make the caller's CUDA stream wait for the event `done`, unless it is None."""
        if self._streams is not None and done is not None:
            self._streams.current_stream().wait_event(done)

    def close(self, *, broken: bool) -> None:
        """Release the NCCL group's connections and GPU memory. A `broken` group is aborted."""
        end = self._group.abort if broken else self._group.shutdown
        # An error of the abort does not matter, because the group is not used again.
        with contextlib.suppress(RuntimeError):
            end()

    def _reduce(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], op: str, prescale: float, postscale: float
    ) -> None:
        from torch.distributed import ReduceOp

        works = []
        for source, target in zip(sources, targets, strict=True):
            work, kind = _prepared(source, op, prescale)
            # Here `wait` lets only the GPU stream wait, not the CPU.
            self._group.allreduce([work], getattr(ReduceOp, kind)).wait()
            works.append((work, target))
        for work, target in works:
            divisor = numbers.divisor(op, str(target.dtype).removeprefix("torch."), self._size)
            target.copy_(_scaled(work, postscale, divisor))


def _prepared(source: Tensor, op: str, prescale: float) -> tuple[Tensor, str]:
    import torch

    if source.dtype == torch.bool:
        # For bools, "sum" means any and "product" means all. An average that is truncated to an integer means all, too.
        return source.to(torch.uint8).contiguous(), "MAX" if op in ("sum", "max") else "MIN"
    half = source.dtype in (torch.float16, torch.bfloat16)
    work = source.detach().to(torch.float32 if half else source.dtype, copy=True).contiguous()
    return _scaled(work, prescale, 1), _NAMES[op]


def _scaled(tensor: Tensor, factor: float, divisor: int) -> Tensor:
    import torch

    if factor == 1.0 and divisor == 1:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor / divisor)
    if factor == 1.0:
        return torch.div(tensor, divisor, rounding_mode="trunc")
    # As on the CPU, average integers as float64 and truncate the result towards 0.
    return (tensor.to(torch.float64) * factor / divisor).trunc().to(tensor.dtype)
