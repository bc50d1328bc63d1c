"""The rows of the list: only changed rows are sent."""

from __future__ import annotations

import asyncio
import html
import re
from typing import Any

import pytest

from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.search import index as index_module
from paceline.runs.search.index import RunIndex
from paceline.ui import render
from paceline.ui.app import make_app
from paceline.ui.guard import Token
from paceline.ui.views import listing
from paceline.ui.views.listing import RunRows
from tests.helpers import make_job
from tests.ui.conftest import HOSTILE, Place, log_values
from tests.ui.streams import opened


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_FRESH_S", 0.0)
    monkeypatch.setattr(index_module, "_REST", 0.0)
    monkeypatch.setattr(listing, "_LOOK_S", 0.05)


def test_cached_row_of_an_ended_run_is_rendered_again_after_a_change(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, live = place.run("a_1700000001_00000001"), place.run("a_1700000002_00000001", states.RUNNING)
    made: list[str] = []
    part = render.part

    def counted(template: str, **values: Any) -> str:
        made.append(values["run"].run_id)
        return part(template, **values)

    monkeypatch.setattr(render, "part", counted)
    index, rows = RunIndex(place.runs_dir), RunRows()

    def look(root: str = "./", folder: RunFolder = done) -> str:
        made.clear()
        index.refresh()
        shown = [("latest", None), ("tags", None)]
        return str(rows.of(index.entries(), root, shown)[folder.run_id])

    look()
    assert sorted(made) == [done.run_id, live.run_id]
    look()
    assert made == [live.run_id]
    tags_and_properties.set_tags(done.notes, {"best": "yes"})
    assert "best" in look()
    log_values(live, "loss", [0.25])
    assert "0.25" in look(folder=live)
    assert 'href="../runs/' in look("../")


def test_row_shows_the_script_and_its_arguments(place: Place) -> None:
    place.run("a_1700000001_00000001", job=make_job(arguments=("--note", "<b>")))
    assert ">train.py --note &lt;b&gt;<" in place.client().get("/").text


def test_list_page_gets_changes_since_it_was_rendered(place: Place) -> None:
    done = place.run("a_1700000001_00000001")
    page = place.client().get("/").text
    (stamp,) = re.findall(r'data-place="(\w+)"', page)
    token = Token(place.path)
    cookie = f"{token.cookie}={token.cookie_value}"

    async def told() -> None:
        app = make_app(place.config(), token)
        # A browser page that shows other rows than the server gets all rows at once.
        async with opened(app, cookie, "/live?place=0123456789abcdef") as watcher:
            rows = await watcher.until(lambda event, _: event == "rows")
            assert rows["first"] is True
            assert rows["order"] == [done.run_id]
            assert watcher.place == stamp
        # A browser page that shows the same rows as the server gets only the first change.
        async with opened(app, cookie, f"/live?place={stamp}") as watcher:
            tags_and_properties.set_tags(done.notes, {"seen": "yes"})
            rows = await watcher.until(lambda event, _: event == "rows")
            assert "seen" in rows["rows"][done.run_id]
            place.run("a_1700000002_00000001")
            rows = await watcher.until(lambda event, _: event == "rows")
            assert rows["first"] is False
            assert [*rows["rows"]] == ["a_1700000002_00000001"]

    asyncio.run(told())


def test_invalid_query_shows_the_position_of_the_error_and_lists_no_runs(place: Place) -> None:
    place.run(display_name="<b>first</b>")
    client = place.client()
    text = client.get("/", params={"q": '"<b>" = 5'}).text
    assert "&#39;&lt;b&gt;&#39; is a text and not a field. At character 1. Expected: a field such as state." in text
    assert 'data-run="' not in text
    text = client.get("/", params={"q": "state = faild"}).text
    assert "&#39;faild&#39; is not a state. Did you mean &#39;Failed&#39;? At character 9. Expected: live, " in text


def test_added_columns_of_the_run_list_show_and_sort_fields(place: Place) -> None:
    for number, acc in enumerate((0.5, 0.9, 0.7)):
        log_values(
            place.run(f"a_170000000{number}_00000001", job=make_job(arguments=("--lr", f"0.{number}"))),
            "acc",
            [acc, 0.1],
        )
    client = place.client()
    text = client.get("/?columns=latest,params.lr,metrics.acc.best,odd,params.lr&sort=metrics.acc.best&add=size").text
    assert re.findall(r'data-run="a_170000000(\d)_', text) == ["1", "2", "0"]
    assert re.findall(r'class="c-more" data-name="([^"]+)">([^<]*)<', text)[:2] == [
        ("params.lr", "0.1"),
        ("metrics.acc.best", "0.9"),
    ]
    assert "?sort=metrics.acc.best&amp;columns=latest%2Cmetrics.acc.best%2Csize" in text
    assert re.findall(r'<th [^>]*data-name="([^"]+)"', text) == [
        "name",
        "latest",
        "params.lr",
        "metrics.acc.best",
        "size",
    ]
    assert 'class="c-state' not in text


def test_columns_of_the_run_list_are_moved_pinned_and_reset_by_links(place: Place) -> None:
    place.run()
    client = place.client()

    def go(label: str, text: str) -> str:
        (address,) = re.findall(rf'href="([^"]+)" aria-label="{label}"', text)
        return client.get("/" + html.unescape(address)).text

    def headings(text: str) -> list[str]:
        return re.findall(r'<th [^>]*data-name="([^"]+)"', text)[1:]

    text = client.get("/").text
    first = headings(text)
    assert first == ["state", "experiment", "target", "created", "duration", "latest", "tags"]
    assert 'aria-label="Move left State"' not in text
    text = go("Move right State", text)
    assert headings(text)[:2] == ["experiment", "state"]
    text = go("Pin Tags", text)
    assert headings(text)[:3] == ["tags", "experiment", "state"]
    assert 'class="c-tags pin1"' in text
    # A pinned column and a column that is not pinned can't change places.
    assert 'aria-label="Move right Tags"' not in text
    text = go("Unpin Tags", text)
    assert "pin1" not in text
    text = go("Move right Tags", text)
    text = go("Remove column State", text)
    assert headings(text) == ["experiment", "tags", "target", "created", "duration", "latest"]
    assert 'href="?">Reset columns' in text


def test_groups_of_the_run_list_show_mean_deviation_and_count(place: Place) -> None:
    for number, (lr, acc) in enumerate([("0.1", 0.5), ("0.1", 0.7), ("0.01", 0.9)]):
        folder = place.run(f"a_170000000{number}_00000001", job=make_job(arguments=("--lr", lr)))
        log_values(folder, "acc", [acc])
    place.run("b_1700000009_00000001", states.RUNNING)
    client = place.client()
    address = "/?group=params.lr&columns=state,experiment,metrics.acc,params.lr&sort=metrics.acc.best"

    def groups(text: str) -> list[tuple[str, list[str]]]:
        rows = re.findall(r'data-run="group ([^"]+)"(.*?)</tr>', text, re.DOTALL)
        return [(name, re.findall("<b>([^<]*)</b>", row)) for name, row in rows]

    text = client.get(address).text
    # The best group comes first. The runs without a value are the last group.
    assert groups(text) == [
        ("0.01", ["Completed", "a", "0.9 (1)", "0.01 (1)"]),
        ("0.1", ["Completed", "a", "0.6 ± 0.141 (2)", "0.1 ± 0 (2)"]),
        ("-", ["Running", "b"]),
    ]
    assert 'data-run="a_' not in text
    (opening,) = re.findall(r'data-run="group 0.1".*?<a href="([^"]+)"', text, re.DOTALL)
    text = client.get("/" + html.unescape(opening)).text
    assert re.findall(r'data-run="(a_\d+|group [^"_]+)', text) == [
        "group 0.01",
        "group 0.1",
        "a_1700000001",
        "a_1700000000",
        "group -",
    ]
    assert text.count('aria-expanded="true"') == 1
    text = client.get("/?group=odd<b>").text
    assert re.search(r"there is no field &#39;odd&lt;b&gt;&#39;\..* Expected: a field such as state", text)


def test_hanging_run_is_listed_as_hangs_and_still_matches_the_query_for_running(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    store.change(
        folder,
        store.stored(folder),
        states.RUNNING,
        hang={"since_utc": "2026-11-28T10:00:00Z", "text": "rank 1 waits", "report": "h"},
    )
    client = place.client()
    assert "</span> Hangs</span>" in client.get("/?state=Hangs").text
    assert "</span> Hangs</span>" in client.get("/", params={"q": "state = hangs"}).text
    # A hanging run still counts as running.
    for query in ("state = running", "state = live"):
        assert folder.run_id in client.get("/", params={"q": query}).text
    assert folder.run_id in client.get("/?state=Running").text
    assert folder.run_id not in client.get("/", params={"q": "state = failed"}).text


def test_archived_runs_are_listed_on_request(place: Place) -> None:
    folder = place.run()
    tags_and_properties.set_archived(folder.notes, True)
    client = place.client()
    queries = {"/": False, "/?archived=1": True, "/?q=archived=yes": True, "/?q=archived=no": False}
    assert {query: folder.run_id in client.get(query).text for query in queries} == queries


def test_query_completion_suggests_fields_names_operators_and_values(place: Place) -> None:
    log_values(place.run(tags={"team": "computer vision"}), HOSTILE, [1.0])
    client = place.client()
    client.get("/")

    def suggested(query: str, at: int | None = None) -> list[str]:
        found = client.get("/complete", params={"q": query} | ({} if at is None else {"at": at})).json()
        return [one["text"] for one in found["suggestions"]]

    assert suggested("sta")[:2] == ["state", "started"]
    assert suggested("state ")[:2] == ["=", "!="]
    assert suggested("state = co") == ["Completed"]
    assert suggested("state in (failed, li") == ["live", "Finalizing"]
    assert suggested("tags.te and x", 7) == ["tags.team"]
    assert suggested("not (tags.team = vis") == ['"computer vision"']
    assert suggested('tags.team = "computer v') == ['"computer vision"']
    assert suggested('metrics."<scr')[0].startswith('metrics."<script>')
    assert "-7d" in suggested("created > ")
    assert suggested("archived = t") == ["true"]
    assert suggested("metrics.") != []
    assert suggested("x ! y") == []
