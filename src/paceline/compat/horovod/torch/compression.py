"""Compression of torch's tensors while they are sent."""

from __future__ import annotations

import torch

from paceline.compat.horovod.common.reduction import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Compression of floating-point tensors to float16. Other tensors stay unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor.to(ctx) if ctx is not None and ctx.is_floating_point else tensor


class Compression:
    """The choices for the argument `compression=`: none, or float16."""

    none = NoneCompressor
    fp16 = FP16Compressor
