"""The header of a safetensors file: which tensors it has. Read as JSON; the tensors themselves are not touched.

    8 bytes       length N of the header, little-endian
    N bytes       {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    the rest      the tensors' bytes

https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The library's own limit.
_MOST_HEADER = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor. dtype: as the format names it, such as "F32" or "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The tensors in order of name, and the texts that were written beside them."""

    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """The numbers of all tensors."""
        return sum(tensor.parameters for tensor in self.tensors)


def header(path: Path) -> Header | None:
    """The header; None where the file is no safetensors file, or is cut short.

    Raises:
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MOST_HEADER, size - 8):
            return None
        text = file.read(length)
    try:
        found = json.loads(text)
        metadata = found.pop("__metadata__", None) or {}
        tensors = [_tensor(name, one, size - 8 - length) for name, one in sorted(found.items())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return Header(tensors=tuple(tensors), metadata={str(key): str(value) for key, value in metadata.items()})


def _tensor(name: str, one: Mapping[str, Any], size: int) -> Tensor:
    begin, end = one["data_offsets"]
    shape = tuple(one["shape"])
    if not (0 <= begin <= end <= size) or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(name)
    return Tensor(name=name, dtype=str(one["dtype"]), shape=shape)
