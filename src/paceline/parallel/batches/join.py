"""Pieces of a batch put together again. Loaded on use: it imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.batches.batch import Whole


def join_rows(pieces: Sequence[Any]) -> Any:
    """One structure with the rows of all pieces, in their order: what `take_rows` cut."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(list(pieces)) if first.dim() else first
    if isinstance(first, Whole):
        return first
    if isinstance(first, Mapping):
        return {name: join_rows([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_rows(items) for items in zip(*pieces, strict=True)))
    if isinstance(first, list) and not any(isinstance(item, (Tensor, Mapping, tuple, list, Whole)) for item in first):
        # Plain values, one for each row.
        return [item for piece in pieces for item in piece]
    if isinstance(first, (tuple, list)):
        return type(first)(join_rows(items) for items in zip(*pieces, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [item.name for item in dataclasses.fields(first) if item.init]
        joined = {name: join_rows([getattr(piece, name) for piece in pieces]) for name in fields}
        return dataclasses.replace(first, **joined)
    return first
