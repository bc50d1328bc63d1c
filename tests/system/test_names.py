"""Names in a sentence."""

from __future__ import annotations

from paceline.system.names import counted, some


def test_list_text_names_the_first_items_and_counts_further_ones() -> None:
    assert some(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert some(["a", "b"], 2) == "a, b"
    assert some((), 2) == ""


def test_count_text_uses_singular_and_plural():
    assert [counted(number, "file") for number in range(3)] == ["0 files", "1 file", "2 files"]
    assert counted(0, "GPU", "no") == "no GPUs"
