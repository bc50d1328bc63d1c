"""The output of a node while it prepares: lines, and a bar that is redrawn in place and never disturbs a line."""

from __future__ import annotations

import pytest

from paceline.node import output
from paceline.node.output import Bar, bar_text, say


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ((0, 200_000_000, 0, 20), "train  [------------------------]   0%  0.0 of 200.0 MB, 0 of 20 files"),
        (
            (120_000_000, 200_000_000, 12, 20),
            "train  [##############----------]  60%  120.0 of 200.0 MB, 12 of 20 files",
        ),
        ((2 * 10**9, 2 * 10**9, 1, 1), "train  [########################] 100%  2.0 of 2.0 GB, 1 of 1 files"),
        ((0, 0, 0, 0), "train  [########################] 100%  0 of 0 B, 0 of 0 files"),
        ((20, 20, 1, 1), "train  [########################] 100%  20 of 20 B, 1 of 1 files"),
        ((500, 1500, 0, 1), "train  [########----------------]  33%  0.5 of 1.5 kB, 0 of 1 files"),
    ],
)
def test_progress_bar_shows_bytes_and_files(figures, text):
    assert bar_text("train", *figures) == text


def test_line_after_a_progress_bar_starts_on_a_new_line(capsys, monkeypatch):
    monkeypatch.setattr(output, "_drawn_at", float("-inf"))
    bar = Bar("train")
    bar(1, 2, 0, 1)
    bar(2, 2, 1, 1)  # this update comes too soon after the first one to be drawn
    say("done")
    say("next")
    drawn, *lines = capsys.readouterr().out.split("\n")
    assert drawn.startswith("\rtrain  [####")
    assert drawn.count("\r") == 1
    assert lines == ["done", "next", ""]
