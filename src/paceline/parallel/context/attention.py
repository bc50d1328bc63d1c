"""Attention of a part of a sequence to all of it. Loaded on use: it imports torch.

Keys and values are put together from all workers for each call of torch's scaled_dot_product_attention, whose kernels then
compute this worker's queries. Llama 3 was trained so (https://arxiv.org/abs/2407.21783, section 3.3.2). It works on CPUs and with
any mask; torch's ring attention has no rules for the kernels of CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from paceline.parallel.context.sequence import Places
from paceline.parallel.errors import ParallelError


@contextlib.contextmanager
def attending_to_all(places: Places) -> Iterator[None]:
    """Until the block ends, torch's attention of parts of sequences is that of their parts to the whole."""
    was_fast = torch.backends.mha.get_fastpath_enabled()
    # In evaluation mode nn.MultiheadAttention has a kernel for all of it, which knows nothing of other workers.
    torch.backends.mha.set_fastpath_enabled(False)
    mode = _Attending(places)
    _functional.scaled_dot_product_attention = mode.attend
    try:
        with mode:
            yield
    finally:
        _functional.scaled_dot_product_attention = _TORCHS
        torch.backends.mha.set_fastpath_enabled(was_fast)


_functional: Any = F
_TORCHS = F.scaled_dot_product_attention


class _Attending(TorchFunctionMode):
    """Meets torch's function under whatever name a script has imported it.

    A mode does not see calls in torch's own functions of Python, such as that of nn.MultiheadAttention: those find `attend` in
    torch.nn.functional.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places
        self._is_attending = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = self.attend if func is _TORCHS and not self._is_attending else func
        return called(*args, **(kwargs or {}))

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        # What torch's function consists of (a causal bias dispatches itself) has to find torch's own.
        _functional.scaled_dot_product_attention, self._is_attending = _TORCHS, True
        try:
            return _attend(self._places, *args, **kwargs)
        finally:
            _functional.scaled_dot_product_attention, self._is_attending = self.attend, False


def _attend(
    places: Places,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    options["dropout_p"] = dropout_p
    if key.shape[-2] != places.own:
        # Whole already, such as an encoder's output.
        if is_causal:
            raise _refusal(f"is causal over {key.shape[-2]} keys, and this worker has {places.own}")
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    key, value = _both(places, key, value)
    if attn_mask is not None:
        return F.scaled_dot_product_attention(query, key, value, _whole_mask(places, attn_mask), **options)
    if not is_causal:
        return F.scaled_dot_product_attention(query, key, value, **options)
    if query.shape[-2] != places.own:
        raise _refusal(f"is causal over {query.shape[-2]} queries, and this worker has {places.own}")
    found, start = [], 0
    for first, end in places.pieces:
        size = end - first
        own, start = query.narrow(-2, start, size), start + size
        # Keys behind the piece count for none of its queries: they are left out, and each worker has as much to do.
        keys, values = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
        if first == 0:
            found.append(F.scaled_dot_product_attention(own, keys, values, is_causal=True, **options))
        else:
            found.append(F.scaled_dot_product_attention(own, keys, values, _causal(size, end, query.device), **options))
    return torch.cat(found, -2)


def _causal(size: int, end: int, device: torch.device) -> Any:
    """The mask for the last queries, so many, of `end` places: each has the keys up to its own."""
    if device.type == "cuda":
        # Kernels of GPUs know this one without a tensor of that size. Below a dispatch mode, as in the first step's
        # comparison, torch can't make it.
        with contextlib.suppress(RuntimeError):
            return causal_lower_right(size, end)
    return torch.arange(end - size, end, device=device)[:, None] >= torch.arange(end, device=device)


def _both(places: Places, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if key.shape != value.shape or key.dtype != value.dtype:
        return places.together(key, -2), places.together(value, -2)
    # In one message.
    keys, values = places.together(torch.stack((key, value)), -2)
    return keys, values


def _whole_mask(places: Places, mask: Tensor) -> Tensor:
    """The mask for all keys."""
    if mask.shape[-1] in (1, places.length):
        return mask
    if mask.shape[-1] == places.own and (mask.dim() < 2 or mask.shape[-2] == 1):
        # It says which keys count, for all queries.
        return places.together(mask, -1) if mask.is_floating_point() else places.gather(mask.int(), -1).bool()
    raise _refusal(
        f"has a mask of the shape {list(mask.shape)} for {places.length} keys. Make it before the first block, for the whole "
        "sequence, and hand it to the blocks"
    )


def _refusal(what: str) -> ParallelError:
    return ParallelError(f"ContextParallel(): attention in a block {what}.")
