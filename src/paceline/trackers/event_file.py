"""A reader of scalars in TensorBoard's event files that needs only the standard library.

    file    records of  length: 8 bytes | its CRC: 4 | an Event: length bytes | its CRC: 4        little-endian
    Event   1 wall_time: double   2 step: varint   5 Summary
    Summary 1 Value, repeated
    Value   1 tag   2 simple_value: float   8 TensorProto   9 SummaryMetadata

The formats are in event.proto, summary.proto and tensor.proto at
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto. The reader does not check CRCs, because
only the last record can be incomplete, which its length shows.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.runs.folder import RunFolder

_LENGTH = struct.Struct("<Q")
_DOUBLE = struct.Struct("<d")
_FLOAT = struct.Struct("<f")
#: Number of a dtype in TensorProto -> struct format of one value in the field tensor_content.
_CONTENT = {
    1: _FLOAT,
    2: _DOUBLE,
    3: struct.Struct("<i"),
    9: struct.Struct("<q"),
    10: struct.Struct("<?"),
    19: struct.Struct("<e"),
}
#: Number of a dtype in TensorProto -> number of the field that lists the tensor's values.
_VALUES = {1: 5, 2: 6, 3: 7, 9: 10, 10: 11}
#: Pattern of a typical Event, up to the length of its tag: it has one Value with tag and simple_value, and lengths of one byte.
_PLAIN = re.compile(
    rb"\x09.{8}(?:\x10([\x80-\xff]{0,8}[\x00-\x7f]))?\x2a[\x00-\x7f]\x0a[\x00-\x7f]\x0a([\x00-\x7f])", re.DOTALL
)
#: Wire type of Protobuf with a fixed size -> number of bytes of a value.
_FIXED_BYTES = {1: 8, 5: 4}
_BYTES_AT_ONCE = 1 << 22
#: Maximum length of a record in bytes; a longer one is corrupt.
_LONGEST = 1 << 30


class Scalar(NamedTuple):
    """A scalar of a metric (`tag`). time: seconds since 1970."""

    tag: str
    step: int
    value: float
    time: float


def is_event_file(name: str) -> bool:
    return "tfevents" in name


def event_folders(folder: RunFolder) -> list[Path]:
    """Return the folders of a run that contain TensorBoard event files."""
    by_target: dict[str, Path] = {}
    for top in (folder.work, folder.outputs, folder.logs, folder.checkpoints):
        for place, folders, names in os.walk(top):
            folders.sort()
            # Use each folder once: the outputs of a live run may also be inside its working directory.
            if any(map(is_event_file, names)):
                by_target.setdefault(os.path.realpath(place), Path(place))
    return list(by_target.values())


class EventFile:
    """A TensorBoard event file that may grow.

    Attributes:
        offset: Number of bytes that were read, always up to the end of a record.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def new(self) -> Iterator[Scalar]:
        """Yield the scalars of records that were appended since the last call.

        Raises:
            OSError: The file cannot be read.
        """
        rest = b""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while data := file.read(_BYTES_AT_ONCE):
                rest += data
                at, values, is_record = 0, list[Scalar](), True
                while at + 12 <= len(rest) and is_record:
                    (length,) = _LENGTH.unpack_from(rest, at)
                    is_record = length <= _LONGEST
                    end = at + 12 + length
                    if end + 4 > len(rest):
                        break
                    values += plain_scalar(rest, at + 12, end) or scalars(rest[at + 12 : end])
                    at = end + 4
                rest = rest[at:]
                self.offset += at
                yield from values
                if not is_record:
                    return


def plain_scalar(data: bytes, start: int, end: int) -> tuple[Scalar] | None:
    """Return (scalar,) for an Event `data[start:end]` with one plain scalar, else None."""
    form = _PLAIN.match(data, start, end)
    if form is None:
        return None
    tag, value = form.end(), form.end() + data[form.end() - 1]
    # Parse only an Event that ends with the key of simple_value and the value's four bytes.
    if value + 5 != end or data[value] != 0x15:
        return None
    step, shift = 0, 0
    for byte in form[1] or b"":
        step |= (byte & 127) << shift
        shift += 7
    (time_s,), (number,) = _DOUBLE.unpack_from(data, start + 1), _FLOAT.unpack_from(data, value + 1)
    return (Scalar(data[tag:value].decode("utf-8", "replace"), step, number, time_s),)


def scalars(event: bytes) -> list[Scalar]:
    """Return the scalars of one serialized Event."""
    time_s, step, values = 0.0, 0, list[tuple[str, float]]()
    try:
        for number, value in fields(event):
            match number, value:
                case 1, bytes():
                    (time_s,) = _DOUBLE.unpack(value)
                case 2, int():
                    step = value if value < 1 << 63 else value - (1 << 64)
                case 5, bytes():
                    values += _of_summary(value)
    except (ValueError, IndexError, struct.error):
        return []  # these bytes are not an Event
    return [Scalar(tag, step, value, time_s) for tag, value in values]


def _of_summary(summary: bytes) -> Iterator[tuple[str, float]]:
    for number, message in fields(summary):
        if number != 1 or not isinstance(message, bytes):
            continue
        tag, value = "", None
        for field, content in fields(message):
            match field, content:
                case 1, bytes():
                    tag = content.decode("utf-8", "replace")
                case 2, bytes():
                    (value,) = _FLOAT.unpack(content)
                case 8, bytes():
                    value = tensor_scalar(content)
        if tag and value is not None:
            yield tag, value


def tensor_scalar(tensor: bytes) -> float | None:
    """Return the number in a serialized TensorProto; None if not a scalar."""
    dtype, content, values = 0, b"", dict[int, int | bytes]()
    for number, field in fields(tensor):
        match number, field:
            case 1, int():
                dtype = field
            case 2, _ if field:
                return None  # only a tensor without dimensions is a scalar
            case 4, bytes():
                content = field
            case _:
                values[number] = field
    form = _CONTENT.get(dtype)
    if form is None:
        return None
    # Protobuf omits a value that is zero.
    value = content or values.get(_VALUES.get(dtype, 0), 0)
    if isinstance(value, int):
        return float(value)
    if content or dtype in (1, 2):
        return float(form.unpack(value)[0]) if len(value) == form.size else None
    number, end = _varint(value, 0)
    return float(number) if end == len(value) else None


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of each field of a serialized protobuf message.

    A value is an int for a varint, else bytes. https://protobuf.dev/programming-guides/encoding/
    """
    at, size = 0, len(message)
    while at < size:
        # Read keys and lengths of one byte here, because nearly all have one byte, and a function call for each would be slow.
        key = message[at]
        at += 1
        if key > 127:
            key, at = _varint(message, at - 1)
        kind = key & 7
        if kind == 0:
            number, at = _varint(message, at)
            yield key >> 3, number
            continue
        if kind == 2:
            length = message[at]
            at += 1
            if length > 127:
                length, at = _varint(message, at - 1)
        elif (length := _FIXED_BYTES.get(kind, 0)) == 0:
            raise ValueError(f"wire type {kind}")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 10 bytes")
