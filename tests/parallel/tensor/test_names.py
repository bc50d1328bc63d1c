"""Equal layers are told in one line."""

from __future__ import annotations

from paceline.parallel.tensor.names import fold


def test_blocks_in_a_row_are_one_name() -> None:
    names = ["tok", *(f"blocks.{index}.{part}" for index in range(12) for part in ("up.0", "down")), "head", "4"]
    assert fold(names) == ["tok", "blocks.{0..11}.up.0", "blocks.{0..11}.down", "head", "4"]


def test_what_is_missing_in_the_row_is_seen() -> None:
    assert fold(["h.0.q", "h.2.q", "h.3.q"]) == ["h.{0,2,3}.q"]
    assert fold(["norm1.weight", "norm2.weight"]) == ["norm1.weight", "norm2.weight"]
    assert fold([]) == []
