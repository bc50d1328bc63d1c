"""Sums and broadcasts of many tensors in few messages, and the norm of all gradients.

torch's `clip_grad_norm_` supports one mesh and no pipelines. If each stage clipped by its own norm, the direction of the step
would change, and a tensor in two stages would count twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.exchange import gather
from paceline.parallel.full_tensor import axes_of, cut_as, is_part
from paceline.parallel.mesh import World

_TensorT = TypeVar("_TensorT", bound=Tensor)

#: The bucket size of torch's DDP: large enough for full bandwidth, small enough to send one bucket while the next is filled.
BUCKET_BYTES = 25 * 2**20
#: A tensor of at least this many bytes is sent alone, without a copy into a bucket.
ALONE_BYTES = 2**20


def sum_gradients(
    params: Iterable[nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Sum each gradient over the ranks of a group, in place.

    A missing gradient counts as 0 if another rank has this gradient. If no rank has it, it stays None.

    Args:
        params: The same parameters in the same order on every rank. For a DTensor the local parts are summed. Frozen parameters
            are skipped.
        group: The ranks whose gradients are summed. With None the function does nothing.
        bucket_bytes: The size of a message.
    """
    if group is None:
        return
    trained = [param for param in params if param.requires_grad]
    running = []
    for bucket in _buckets(trained, bucket_bytes):
        flags = [float(param.grad is not None) for param in bucket]
        like = local(bucket[0])
        # One flag per parameter says if this rank has a gradient. The flags share the bucket's message, because a
        # second message would cost as much time as a small bucket.
        flat = torch.cat([*(_gradient_or_zeros(param).flatten() for param in bucket), like.new_tensor(flags)])
        running.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in running:
        assert work is not None
        work.wait()
        *sums, counts = torch.split(flat, [*(local(param).numel() for param in bucket), len(bucket)])
        # Copy all flags to the host in one transfer, because each transfer has to wait for the GPU.
        for param, part, flag in zip(bucket, sums, counts.tolist(), strict=True):
            summed = part.view(local(param).shape)
            # No rank has used this parameter. Keep None: an optimizer would apply decay and momentum to a gradient of zeros.
            if flag == 0:
                continue
            if param.grad is None:
                own = summed.clone()
                param.grad = cut_as(param, own) if is_part(param) else own
            else:
                local(param.grad).copy_(summed)


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Overwrite each tensor with the value on the rank number `source` of `group`.

    With None as group the function does nothing.
    """
    if group is None:
        return
    root = dist.get_global_rank(group, source)
    with torch.no_grad():
        own = [local(tensor).detach() for tensor in tensors]
        # Send large tensors alone: copying them into a bucket and back costs as much as a message. All ranks decide by size.
        for tensor in filter(_is_large, own):
            whole = tensor.contiguous()
            dist.broadcast(whole, root, group=group)
            if whole is not tensor:
                tensor.copy_(whole)
        for bucket in _buckets([tensor for tensor in own if not _is_large(tensor)], BUCKET_BYTES):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.broadcast(flat, root, group=group)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _is_large(tensor: Tensor) -> bool:
    return tensor.nbytes >= ALONE_BYTES


def sum_number(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the sum of a number over the ranks of `group`."""
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return float(total)


def anywhere(flag: bool, world: World) -> bool:
    """Return whether `flag` is True on any rank. Every rank must call this."""
    if world.size == 1:
        return flag
    most = torch.tensor(float(flag), device=world.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return bool(most)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or any other tensor unchanged."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _gradient_or_zeros(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(local(param)) if param.grad is None else local(param.grad).detach()


def _buckets(tensors: Sequence[_TensorT], bucket_bytes: int) -> Iterator[list[_TensorT]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[_TensorT]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    # All ranks must have the same buckets in the same order. So fill buckets by size, whichever gradients a rank has.
    for kind in kinds.values():
        filled = 0
        buckets: list[list[_TensorT]] = []
        for tensor in kind:
            if not buckets or filled >= bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(tensor)
            filled += local(tensor).numel() * tensor.element_size()
        yield from buckets


class Clipper:
    """Gradient clipping by the norm over all workers.

    Every rank must make this object. `params` come from `Executor.named_parameters`.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], world: World) -> None:
        self._params = dict(params)
        self._world = world
        self._owned = _owned(self._params, world)

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients as a 0-dim tensor. Every rank must call this."""
        group = self._world.model_group
        if group is None:
            return torch.nn.utils.get_total_norm([p.grad for p in self._params.values() if p.grad is not None])
        # Sum squares in float64. In float32 the norm would depend on how the parameters are spread over the ranks.
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for name, param in self._params.items():
            if param.grad is not None and name in self._owned and _counts_here(param.grad, self._world):
                squares += torch.linalg.vector_norm(local(param.grad), dtype=_wide(param.grad)).double().square()
        dist.all_reduce(squares, group=group)
        return squares.sqrt()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients down so that their norm is at most `max_norm`.

        Every rank must call this. Return the norm before clipping.
        """
        if self._world.model_group is None:
            # In a single process use torch's function, for exactly the same result as in a plain training loop.
            return torch.nn.utils.clip_grad_norm_(self._params.values(), max_norm)
        norm = self.norm()
        # Use the same constant as torch's `clip_grad_norm_`.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for param in self._params.values():
            if param.grad is not None:
                part = local(param.grad)
                part.mul_(factor.to(part.dtype))
        return norm


def _owned(params: Mapping[str, nn.Parameter], world: World) -> set[str]:
    """Return the names of the parameters that this rank's stage adds to the norm."""
    group = world.group(world.holder_axis)
    if group is None:
        return set(params)
    # A parameter that is split along the mesh axis `holder_axis` has no copies: each rank adds its part to the norm.
    held = gather([name for name, param in params.items() if world.holder_axis not in axes_of(param)], group)
    # Leave out a tied parameter that an earlier stage also has, because only the first of these stages adds its gradient.
    earlier = {name for names in held[: world.coordinate(world.holder_axis)] for name in names}
    return set(params) - earlier


def _counts_here(grad: Tensor, world: World) -> bool:
    """Return whether this rank adds its part of the gradient to the norm.

    Every rank adds its part of a split gradient. If ranks along an axis have copies, only the first adds its copy.
    """
    split = axes_of(grad)
    return all(world.coordinate(axis) == 0 for axis in ("shard", "tensor") if axis not in split)


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)
