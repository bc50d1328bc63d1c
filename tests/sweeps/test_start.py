"""What a sweep keeps from its submission on."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runs import controllers, store
from paceline.submit import SourceCopy, take_snapshot
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import submit_sweep
from tests.helpers import make_job, write_tree


def test_sweep_records_the_git_commit_at_which_its_snapshot_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep that is a step of a pipeline it was that of the folder when the step began, hours later maybe."""
    monkeypatch.setattr(controllers, "start", lambda folder, fd: None)
    source = SourceCopy(directory=write_tree(tmp_path / "code", {"train.py": "import sys; print(sys.argv)"}))
    job, workspace_dir = make_job(), tmp_path / "ws"
    taken = take_snapshot(job, source, workspace_dir, None, ())
    source = SourceCopy(directory=source.directory, snapshot_id=taken.id, git={"commit": "f00d"})
    spec = SweepSpec(space=Space({"lr": [0.1, 0.2]}), metric="loss", goal="minimize", trials=2)
    record = store.stored(submit_sweep(job, spec, source, workspace_dir, "tuned"))
    assert (record.kind, record.snapshot_id, record.git) == ("sweep", taken.id, {"commit": "f00d"})
