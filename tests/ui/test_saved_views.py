"""Views with names: on the page, on the command line, and as files that other programs may write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UserError
from paceline.runs import states
from paceline.runs.search.saved_views import SavedView, SavedViews
from paceline.workspace import Workspace
from tests.cli.conftest import Cli
from tests.ui.conftest import HOSTILE, Place, log_values


def change(client: Any, **fields: str) -> Any:
    key = re.search(r'name="form_key" value="([^"]+)"', client.get("/").text)
    assert key is not None
    return client.post("/views", data={"form_key": key[1], **fields}, follow_redirects=False)


def test_list_view_is_saved_listed_renamed_and_removed(place: Place) -> None:
    client = place.client()
    assert change(client, action="save", name="best runs", page="runs", query="?q=state%3DCompleted").status_code == 303
    assert '<a class="view" href="?q=state%3DCompleted">best runs</a>' in client.get("/").text
    assert "exists already" in change(client, action="save", name="best runs", page="runs").text
    assert change(client, action="save", name="best runs", query="q=a", replace="1").status_code == 303
    assert SavedViews(place.path)["best runs"].query == "q=a"
    change(client, action="rename", name="best runs", new_name="other")
    assert [*SavedViews(place.path)] == ["other"]
    assert "other" in client.get("/views").text
    change(client, action="remove", name="other")
    assert [*SavedViews(place.path)] == []
    assert "there is no view" in change(client, action="remove", name="other").text


def test_saved_view_is_offered_only_on_its_own_kind_of_page(place: Place) -> None:
    folder = place.run()
    log_values(folder, "loss", [1.0])
    views, client = SavedViews(place.path), place.client()
    views.save(SavedView(name="mine", page="run", query="axis=time", layout='{"pinned":[{"name":"loss"}],"folded":[]}'))
    views.save(SavedView(name="both", page="compare", query=f"run={folder.run_id}"))
    run, comparison = client.get(f"/runs/{folder.run_id}").text, client.get(f"/compare?run={folder.run_id}").text
    assert 'data-layout="{&#34;pinned&#34;' in run
    assert ">both<" not in run
    assert ">both<" in comparison
    assert ">mine<" not in comparison + client.get("/").text


def test_read_only_page_opens_views_and_saves_none(place: Place) -> None:
    SavedViews(place.path).save(SavedView(name="kept"))
    client = place.client(read_only=True)
    text = client.get("/").text
    assert ">kept<" in text
    assert "Save this view" not in text + client.get("/views").text
    answer = client.post("/views", data={"action": "remove", "name": "kept"})
    assert answer.status_code == 403
    assert [*SavedViews(place.path)] == ["kept"]


@pytest.mark.parametrize("name", ["", "../x", "/etc/x", ".hidden", HOSTILE, "a\n", "a" * 81, "ä"])
def test_invalid_name_of_a_saved_view_is_refused(place: Place, name: str) -> None:
    with pytest.raises(UserError, match="must begin with a letter or digit"):
        SavedView(name=name)
    assert SavedViews(place.path).get(name) is None


@pytest.mark.parametrize("layout", ["{}", "[]", "x", '{"pinned":1,"folded":[]}', "[" * 50_000])
def test_invalid_layout_of_a_saved_view_is_refused(layout: str) -> None:
    with pytest.raises(UserError, match="layout"):
        SavedView(name="a", page="run", layout=layout)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"version": 2}',
        '{"version": 1, "query": 3}',
        '{"version": 1, "page": "x"}',
        "[" * 100_000,
        "x" * 300_000,
    ],
)
def test_damaged_saved_view_is_skipped(place: Place, content: str) -> None:
    views = SavedViews(place.path)
    views.save(SavedView(name="good"))
    (place.path / "views" / "bad.json").write_text(content)
    assert [*views] == ["good"]
    assert place.client().get("/views").status_code == 200


def test_hostile_query_of_a_saved_view_is_escaped(place: Place) -> None:
    (place.path / "views").mkdir()
    (place.path / "views" / "a.json").write_text(json.dumps({"version": 1, "query": f'x="><{HOSTILE}'}))
    client = place.client()
    assert "<script>document" not in client.get("/").text + client.get("/views").text


def test_query_of_a_saved_view_includes_all_its_filters() -> None:
    query = "q=loss+or+acc&experiment=my+exp&state=live&tag=k%3Dv&tag=t&sort=-created&columns=state,params.lr,latest&trials=1"
    view = SavedView(name="a", query=query)
    assert view.where == '(loss or acc) and experiment = "my exp" and state = live and tags.k = v and tags.t'
    assert (view.sort, view.columns, view.has_children, view.is_archived) == (
        "-created",
        ["state", "params.lr"],
        True,
        False,
    )
    assert SavedView(name="a", query="q=loss").where == "loss"


def test_command_line_and_python_api_list_the_runs_that_match_a_saved_view(cli: Cli) -> None:
    place = Place(Path(cli.folder))
    place.run("a_1700000001_00000001", states.FAILED, display_name="bad-one")
    place.run("a_1700000002_00000001", display_name="good-one")
    workspace = Workspace(place.path)
    workspace.views.save(SavedView(name="failed", query="state=Failed&columns=state,experiment"))
    cli("trust", str(place.path))
    listed = cli("list", "--view", "failed").stdout
    assert listed.split() == ["name", "state", "experiment", "bad-one", "Failed", "a"]
    assert "good-one" not in listed
    assert cli("list", "--view", "failed", "--where", "good").stdout.startswith("No such runs")
    assert [run.id for run in workspace.get_runs(workspace.views["failed"].where)] == ["a_1700000001_00000001"]
    workspace.views.save(SavedView(name="by state", query="group=state&columns=state,duration"))
    table = [line.split() for line in cli("list", "--view", "by state").stdout.splitlines()]
    assert [line[:2] for line in table] == [["state", "RUNS"], ["Completed", "1"], ["Failed", "1"]]
    assert table[0][2:] == ["state", "duration"]
    assert cli("list", "--view", "by state", "--group", "experiment").stdout.startswith("experiment")
    wrong = cli("list", "--view", "faild", code=2).stderr
    assert "there is no view 'faild'" in wrong
    assert "failed" in wrong.partition("Views are: ")[2]
