"""Read and write the header of a safetensors file.

    a file: 8 bytes, little endian, the length of the header | header, JSON | the tensors' bytes
    header: name -> {"dtype": "F32", "shape": [2, 3], "data_offsets": [from, to]}, counted from the end of the header

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, TypedDict

#: Maximum size of a header in bytes, as in the format's own library.
_MOST_BYTES = 100_000_000


class TensorEntry(TypedDict):
    """A tensor in a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return a file's header. tensors: (name, type, shape, byte count) of each, in file order."""
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    # Readers map the file into memory, and need numbers aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO) -> tuple[dict[str, TensorEntry], dict[str, str], int, int]:
    """Return a header's entries and metadata, and the tensors' offset and size in bytes.

    `file` must be at its start. The function checks only the JSON syntax of the entries.

    Raises:
        ValueError, TypeError, AttributeError: The header is invalid.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MOST_BYTES):
        raise ValueError(f"its header would be {length} bytes long")
    entries = json.loads(file.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    return entries, metadata, 8 + length, size - 8 - length


def fill(file: BinaryIO, view: Any) -> bool:
    """Fill a memoryview with a file's next bytes. Return False if too few."""
    done = 0
    while done < len(view):
        got: int = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            return False
        done += got
    return True
