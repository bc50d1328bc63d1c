"""A sweep that is submitted on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.sweeps.sweep_run import SweepRun
from tests.sweeps.helpers import SCRIPT, hide_matplotlib


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SweepRun]:
    """Submit a sweep of the script, with arguments of its own, in a workspace of this test's.

    with_png: let its end find matplotlib, which takes half a second of a core to load and draw.
    """
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    experiment = pl.Experiment(pl.Workspace(tmp_path / ".paceline"), "tuned")

    def submit(
        space: dict[str, Any], *, arguments: tuple[str, ...] = (), with_png: bool = False, **options: Any
    ) -> SweepRun:
        if not with_png:
            hide_matplotlib(tmp_path / ".paceline")
        estimator = pl.Estimator(tmp_path / "source", entry_script="train.py", arguments=list(arguments))
        run = experiment.submit(pl.Sweep(estimator, space, **{"metric": "score", "seed": 1, **options}))
        assert isinstance(run, SweepRun)
        return run

    return submit
