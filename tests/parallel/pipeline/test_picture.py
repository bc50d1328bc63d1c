"""The schedule as a PNG."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from paceline.parallel import ParallelError
from paceline.parallel.pipeline.timeline import draw_text, save_png, simulate
from tests.engines.conftest import require_engine


def test_pipeline_schedule_is_drawn_as_a_png_file(tmp_path: Path) -> None:
    from importlib.util import find_spec

    require_engine("matplotlib", find_spec("matplotlib"))
    events = simulate("interleaved", 2, 4, 2, backward=lambda stage: 2.0)
    path = save_png(events, 2, tmp_path / "a step.png", title="two workers")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 2000


def test_missing_matplotlib_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ParallelError, match=r"step\.png.*pip install matplotlib"):
        save_png(simulate("1f1b", 2, 2), 2, tmp_path / "step.png")
    assert not (tmp_path / "step.png").exists()


def test_text_drawing_of_a_pipeline_keeps_columns_aligned_if_microbatch_numbers_have_two_digits() -> None:
    lines = draw_text(simulate("1f1b", 2, 11), 2).splitlines()
    assert "F10" in lines[0]
    first, second = (line.partition("  ")[2] for line in lines)
    # Each cell is four characters wide, so that equal columns are aligned.
    assert first[4:7] == "F1 "
    assert second[4:7] == "F0 "
