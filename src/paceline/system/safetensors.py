"""The header of a file of safetensors, written and read.

    a file: 8 bytes, little endian, the length of the header | header, JSON | the tensors' bytes
    header: name -> {"dtype": "F32", "shape": [2, 3], "data_offsets": [from, to]}, counted from the end of the header

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

#: As in the format's own library.
_MOST_BYTES = 100_000_000


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with. tensors: name, type, shape and bytes of each, in the order in which they follow."""
    told: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape, size in tensors:
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(told, separators=(",", ":")).encode()
    # Readers map the file, and want numbers to begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO) -> tuple[Any, int, int]:
    """The header's JSON, where the tensors' bytes begin, and how many there are. file: at its beginning.

    Raises:
        ValueError: it has no such header.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MOST_BYTES):
        raise ValueError(f"its header would be {length} bytes long")
    return json.loads(file.read(length)), 8 + length, size - 8 - length


def fill(file: BinaryIO, view: Any) -> bool:
    """Read as many bytes as the view, a memoryview or an array of bytes, has room for; False where the file ends before."""
    done = 0
    while done < len(view):
        got: int = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            return False
        done += got
    return True
