"""Scalars out of event files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from paceline.trackers.event_file import EventFile, Scalar, scalars, tensor_scalar


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def part(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def event(step: int, *values: bytes, time: float = 12.5) -> bytes:
    summary = b"".join(part(1, value) for value in values)
    return b"\x09" + struct.pack("<d", time) + (b"\x10" + varint(step) if step else b"") + part(5, summary)


def plain(tag: str, value: float) -> bytes:
    return part(1, tag.encode()) + b"\x15" + struct.pack("<f", value)


def record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + b"crc " + data + b"crc "


def test_event_file_reader_returns_only_scalars_in_each_encoding() -> None:
    long = "a" * 300
    as_tensor = part(1, b"t") + part(8, b"\x08\x01" + part(2, b"") + part(4, struct.pack("<f", 2.5)))
    histogram = part(1, b"h") + part(5, b"\x09" + bytes(8))
    with_metadata = part(1, b"m") + part(9, part(1, b"scalars")) + b"\x15" + struct.pack("<f", 1.0)
    text = part(1, b"text") + part(8, b"\x08\x07" + part(8, b"hello"))
    matrix = part(1, b"x") + part(8, b"\x08\x01" + part(2, part(2, b"\x08\x02")) + part(4, bytes(8)))
    found = scalars(event(300, plain("loss", 0.5), as_tensor, histogram, with_metadata, text, matrix))
    assert found == [Scalar("loss", 300, 0.5, 12.5), Scalar("t", 300, 2.5, 12.5), Scalar("m", 300, 1.0, 12.5)]
    assert scalars(event(0, plain(long, 1.0))) == [Scalar(long, 0, 1.0, 12.5)]
    assert scalars(event(-7, plain("loss", -1.0))) == [Scalar("loss", -7, -1.0, 12.5)]
    # The first record of a file has no values, and neither have bytes that are not an Event.
    assert scalars(b"\x09" + bytes(8) + part(3, b"brain.Event:2")) == []
    assert scalars(b"\xff\xff\xff") == []


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (b"\x08\x01\x2d" + struct.pack("<f", 1.5), 1.5),
        (b"\x08\x02" + part(4, struct.pack("<d", 0.1)), 0.1),
        (b"\x08\x02" + part(6, struct.pack("<d", 0.1)), 0.1),
        (b"\x08\x09" + part(10, varint(3)), 3.0),
        (b"\x08\x03\x38\x05", 5.0),
        (b"\x08\x13" + part(4, struct.pack("<e", 2.0)), 2.0),
        (b"\x08\x01", 0.0),
        (b"\x08\x01" + part(4, bytes(8)), None),
    ],
    ids=["float", "double", "double beside", "int64", "int32", "half", "zero", "two"],
)
def test_one_element_tensor_in_an_event_file_is_a_scalar(tensor: bytes, value: float | None) -> None:
    assert tensor_scalar(tensor) == value


def test_each_complete_record_of_a_growing_event_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    first, second = record(event(1, plain("loss", 1.0))), record(event(2, plain("loss", 2.0)))
    path.write_bytes(first + second[:20])
    file = EventFile(path)
    assert [(one.step, one.value) for one in file.new()] == [(1, 1.0)]
    assert file.offset == len(first)
    assert [*file.new()] == []
    path.write_bytes(first + second)
    assert [(one.step, one.value) for one in file.new()] == [(2, 2.0)]
    assert [(one.step, one.value) for one in EventFile(path, offset=len(first)).new()] == [(2, 2.0)]
    # A record with an impossible length ends the reading.
    path.write_bytes(first + b"\xff" * 40)
    assert len([*EventFile(path).new()]) == 1
