"""The files in the outputs of a sweep."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from paceline.sweeps.pictures import draw
from tests.sweeps.pictures.trials import SPEC, SPEC_OF_TWO, make_trials, make_trials_of_two


@pytest.mark.promise("sweep-s-outputs-table-history")
def test_draw_writes_every_picture_of_a_sweep(tmp_path: Path) -> None:
    for module in ("matplotlib", "optuna", "sklearn"):
        pytest.importorskip(module)
    drawn = draw.sketched("Sweep", SPEC, make_trials())
    written = draw.into(tmp_path / "new", drawn)
    assert [Path(path).name for path in written] == [
        *("sweep.html", "importance.csv", "history.png", "parallel_coordinates.png", "importance.png"),
    ]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(Path(path).name for path in written)
    for path in written[2:]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")
    with open(written[1]) as file:
        assert next(csv.DictReader(file))["parameter"] == "lr"


def test_sweep_of_two_metrics_gets_a_scatter_plot_of_its_pareto_front(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # The sixth trial has just begun, and has no values.
    trials = [*make_trials_of_two(5), make_trials(6)[5]]
    drawn = draw.sketched("Sweep", SPEC_OF_TWO, trials)
    assert "front.png" in {Path(path).name for path in draw.into(tmp_path, drawn)}
    assert 'class="front"' in (tmp_path / "sweep.html").read_text()
    assert [remark.split()[2] for remark in drawn.remarks] == ["loss", "size"]


@pytest.mark.promise("sweep-s-outputs-table-history")
def test_sweep_page_is_written_without_matplotlib_and_no_png_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    drawn = draw.sketched("Sweep", SPEC, make_trials(5))
    assert [Path(path).name for path in draw.into(tmp_path, drawn)] == ["sweep.html"]
    assert (draw.without_png() or "").startswith("No PNG is drawn: that needs matplotlib")
    remark = "Importance is left out: it needs values of 10 runs, got 3."
    assert drawn.remarks == (remark,)
    assert remark in (tmp_path / "sweep.html").read_text()
