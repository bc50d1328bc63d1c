"""The header of safetensors files: read and write agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.system.safetensors import fill, header, read_header


def test_written_safetensors_header_is_read_back_with_dtypes_shapes_and_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header([("a", "F32", (2, 3), 24), ("b", "U8", [1], 1)], {"format": "pt"}) + bytes(25))
    with path.open("rb") as file:
        entries, metadata, start, size = read_header(file)
        assert metadata == {"format": "pt"}
        assert entries == {
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "U8", "shape": [1], "data_offsets": [24, 25]},
        }
        assert (start % 8, size) == (0, 25)
        assert fill(file, memoryview(bytearray(25)))
        assert not fill(file, memoryview(bytearray(1)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "would be 0 bytes long"),
        (b"\xff" * 20, f"would be {2**64 - 1} bytes long"),
        (b"\x09" + b"\0" * 7 + b"{}", "would be 9 bytes long"),
        (b"\x02" + b"\0" * 7 + b"{]", "line 1"),
    ],
)
def test_data_without_a_safetensors_header_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with (tmp_path / "x").open("rb") as file, pytest.raises(ValueError, match=words):
        read_header(file)
