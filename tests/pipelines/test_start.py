"""What a pipeline keeps from its submission on."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest

import paceline as pl
from paceline.pruning import snapshots
from paceline.runs import states
from tests.helpers import write_tree
from tests.pipelines.conftest import Place


def test_the_sources_of_steps_that_wait_are_not_pruned(
    place: Place, submit: Callable[..., pl.PipelineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(place.top / "other", {"last.py": "print('there')"})
    first = place.step("first", f"wait={place.top / 'go'}")
    run = submit(first, pl.Step("last", pl.Estimator(place.top / "other", entry_script="last.py"), after=[first]))
    # A snapshot that was not asked for just now, and that no run has yet but the pipeline.
    monkeypatch.setattr(snapshots, "_FRESH_S", -1.0)
    assert len([path for path in (place.workspace.path / "snapshots").iterdir() if path.name[0] != "."]) == 2
    assert snapshots.unused(place.workspace.path) == []
    (place.top / "go").touch()
    assert run.wait_for_completion().status == states.COMPLETED


def test_secrets_of_steps_are_read_at_submission_and_kept_apart(
    place: Place, submit: Callable[..., pl.PipelineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRST_TOKEN", "one")
    monkeypatch.setenv("SECOND_TOKEN", "two")
    write_tree(place.top / "told", {"tell.py": "import os; print('token', os.environ['TOKEN'])"})

    def step(name: str, place_of_it: str) -> pl.Step:
        token = {"TOKEN": pl.secret(place_of_it)}
        return pl.Step(name, pl.Estimator(place.top / "told", entry_script="tell.py", environment_variables=token))

    first, second = step("first", "env:FIRST_TOKEN"), step("second", "env:SECOND_TOKEN")
    run = submit(first, second.run_after(first))
    assert stat.S_IMODE(os.stat(run.folder.record).st_mode) == 0o600
    monkeypatch.delenv("SECOND_TOKEN")
    run.wait_for_completion()
    told = [(run.steps[name].folder.logs / "rank_0.log").read_text().strip() for name in ("first", "second")]
    assert told == ["token one", "token two"]
    assert not run.folder.secrets.exists()
