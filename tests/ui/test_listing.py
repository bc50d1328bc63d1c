"""The rows of the list: kept where nothing changes, told where something does."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from paceline.runs import states, tags_and_properties
from paceline.ui import index as index_module
from paceline.ui import render
from paceline.ui.app import make_app
from paceline.ui.guard import Token
from paceline.ui.index import Index
from paceline.ui.latest import LatestValues
from paceline.ui.views import listing
from paceline.ui.views.listing import RunRows
from tests.ui.conftest import Place, log_values
from tests.ui.streams import opened


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_FRESH_S", 0.0)
    monkeypatch.setattr(index_module, "_REST", 0.0)
    monkeypatch.setattr(listing, "_LOOK_S", 0.05)


def test_row_of_an_ended_run_is_rendered_again_after_a_change(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    done, live = place.run("a_1700000001_00000001"), place.run("a_1700000002_00000001", states.RUNNING)
    made: list[str] = []
    part = render.part

    def counted(template: str, **values: Any) -> str:
        made.append(values["run"].run_id)
        return part(template, **values)

    monkeypatch.setattr(render, "part", counted)
    index, rows = Index(place.runs_dir), RunRows(LatestValues(place.runs_dir))

    def look(root: str = "./") -> str:
        made.clear()
        index.refresh()
        return str(rows.of(index.entries(), root)[done.run_id])

    look()
    assert sorted(made) == [done.run_id, live.run_id]
    look()
    assert made == [live.run_id]
    tags_and_properties.set_tags(done.notes, {"best": "yes"})
    assert "best" in look()
    log_values(done, "loss", [0.25])
    assert "0.25" in look()
    assert 'href="../runs/' in look("../")


def test_list_page_gets_changes_since_it_was_rendered(place: Place) -> None:
    done = place.run("a_1700000001_00000001")
    page = place.client().get("/").text
    (stamp,) = re.findall(r'data-place="(\w+)"', page)
    token = Token(place.path)
    cookie = f"{token.cookie}={token.cookie_value}"

    async def told() -> None:
        app = make_app(place.config(), token)
        # A page that shows something else gets all rows at once.
        async with opened(app, cookie, "/live?place=0123456789abcdef") as watcher:
            rows = await watcher.until(lambda event, _: event == "rows")
            assert rows["first"] is True
            assert rows["order"] == [done.run_id]
            assert watcher.place == stamp
        # One that shows the same gets the first change alone.
        async with opened(app, cookie, f"/live?place={stamp}") as watcher:
            tags_and_properties.set_tags(done.notes, {"seen": "yes"})
            rows = await watcher.until(lambda event, _: event == "rows")
            assert "seen" in rows["rows"][done.run_id]
            place.run("a_1700000002_00000001")
            rows = await watcher.until(lambda event, _: event == "rows")
            assert rows["first"] is False
            assert [*rows["rows"]] == ["a_1700000002_00000001"]

    asyncio.run(told())
