"""Pages of a workspace whose file system answers slowly, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.runs import store
from paceline.ui.views import places
from tests.ui.conftest import Place


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Listing the runs takes as long as the test. A message for each listing that a page waited for."""
    waited: list[str] = []
    over = threading.Event()

    def slow(runs_dir: Path) -> list[str]:
        if not over.wait(120):
            waited.append("the page waited for the list of runs")
        return ids(runs_dir)

    ids = store.ids
    monkeypatch.setattr(store, "ids", slow)
    yield waited
    over.set()


@pytest.mark.parametrize("path", ["/", "/compare/names?q=digits", "/runs/{}/details", "/complete?q=na&at=2"])
def test_page_does_not_wait_for_a_stuck_file_system(place: Place, stuck: list[str], path: str) -> None:
    run_id = place.run().run_id
    assert place.client().get(path.format(run_id)).status_code == 200
    assert stuck == []


def test_compute_page_does_not_wait_for_a_stuck_file_system(place: Place, stuck: list[str]) -> None:
    place.run()
    values = places.targets(cast("Any", SimpleNamespace(app=place.client().app)))
    assert [one.name for one in values["targets"]] == ["local"]
    assert (values["going"], stuck) == ({}, [])
