"""W&B's log of a run, `run-<id>.wandb`, read and written without W&B.

It is a LevelDB log of serialized Records (https://github.com/google/leveldb/blob/main/doc/log_format.md)
with a header of 7 bytes.

    block      32 KiB of frames; no frame crosses its end, and a rest of less than 7 bytes is empty
    frame      CRC-32 of type and data: 4 bytes | size: 2 | type: 1 | data            little-endian; the CRC is zlib's
    type       1 a whole record   2 its first   3 a middle   4 its last frame

https://github.com/wandb/wandb/blob/main/wandb/proto/wandb_internal.proto
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from paceline.trackers.event_file import fields

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK_BYTES = 1 << 15
_FRAME = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
#: Fields of a Record, of which each record has one beside its number.
HISTORY, SUMMARY, CONFIG, METRIC, RUN, EXIT, VERSION = 2, 3, 5, 12, 17, 18, 21


def records(path: Path, note: Callable[[str], object] = str) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the content of each whole record. Pass a sentence to `note` for a torn or damaged rest.

    Raises:
        OSError: The file can't be read.
        ValueError: It is no W&B log.
    """
    with open(path, "rb") as file:
        block = file.read(_BLOCK_BYTES)
        if not block.startswith(HEADER[:4]):
            raise ValueError("it has no header of W&B")
        at, parts = len(HEADER), list[bytes]()
        while block:
            while at + _FRAME.size <= len(block):
                checksum, size, kind = _FRAME.unpack_from(block, at)
                data = block[at + _FRAME.size : at + _FRAME.size + size]
                if kind == 0 and size == 0:
                    break  # the rest of the block is empty
                if len(data) < size or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
                    note("left out the rest of its log after a torn or damaged record")
                    return
                at += _FRAME.size + size
                parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
                if kind in (_FULL, _LAST):
                    yield from _content(b"".join(parts))
            block, at = file.read(_BLOCK_BYTES), 0


def _content(record: bytes) -> Iterator[tuple[int, bytes]]:
    for number, value in fields(record):
        if number in (HISTORY, SUMMARY, CONFIG, RUN, EXIT) and isinstance(value, bytes):
            yield number, value


def frames(record: bytes, offset: int) -> bytes:
    """Return the bytes that append a record to a log of `offset` bytes."""
    made = bytearray()
    kind = _FIRST
    while True:
        room = _BLOCK_BYTES - (offset + len(made)) % _BLOCK_BYTES
        if room < _FRAME.size:
            made += bytes(room)
            continue
        data, record = record[: room - _FRAME.size], record[room - _FRAME.size :]
        if not record:
            kind = _FULL if kind == _FIRST else _LAST
        made += _FRAME.pack(zlib.crc32(data, zlib.crc32(bytes([kind]))), len(data), kind) + data
        if not record:
            return bytes(made)
        kind = _MIDDLE


def message(parts: Iterable[tuple[int, int | str | bytes]]) -> bytes:
    """Return a serialized protobuf message of (field, value)."""
    made = bytearray()
    for number, value in parts:
        if isinstance(value, int):
            made += _varint(number << 3) + _varint(value)
        else:
            data = value.encode("utf-8", "replace") if isinstance(value, str) else value
            made += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(made)


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)
