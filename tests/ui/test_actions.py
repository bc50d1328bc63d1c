"""Cancel, tag, rename and rerun from a page: by the command line's functions, and for nobody else's forms."""

from __future__ import annotations

import dataclasses
import re

import pytest

from paceline.observe.stacks import RunStacks
from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json
from paceline.ui.guard import Token
from paceline.ui.views import run
from tests.observe.test_wait_graph import entry, rank, told
from tests.ui.conftest import Place


def key_of(place: Place, folder: RunFolder) -> str:
    """The key that the run's own page carries."""
    found = re.search(r'name="form_key" value="([^"]+)"', place.client().get(f"/runs/{folder.run_id}").text)
    assert found
    return found[1]


@pytest.mark.promise("cancel-rerun-tags-go-command")
def test_cancel_is_requested_once_with_the_user(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client()
    form = {"form_key": key_of(place, folder)}
    answer = client.post(f"/runs/{folder.run_id}/cancel", data=form, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, f"../{folder.run_id}")
    assert read_json(folder.cancel_request)["by"]
    text = client.get(f"/runs/{folder.run_id}").text
    assert "CancelRequested" in text
    assert "/cancel" not in text


def test_a_run_that_has_ended_is_not_canceled(place: Place) -> None:
    folder = place.run()
    form = {"form_key": Token(place.path).form_key()}
    answer = place.client().post(f"/runs/{folder.run_id}/cancel", data=form)
    assert answer.status_code == 409
    assert "is Completed already" in answer.json()["error"]
    assert not folder.cancel_request.exists()


@pytest.mark.promise("hang-told-shown-page-button")
def test_a_run_that_hangs_has_a_banner_with_the_reason_its_ranks_and_a_button_for_stacks(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = {
        "since_utc": "2026-11-23T06:12:03.000Z",
        "text": "Rank 0 waits for <rank 1>.",
        "report": "attempts/1/hang.txt",
    }
    folder = place.run(status=states.RUNNING)
    store.write(folder, dataclasses.replace(store.stored(folder), hang=hang))
    report = folder.hang_report(len(store.stored(folder).attempts))
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("rank 1: train.py, line 7\n")
    client = place.client()
    text = client.get(f"/runs/{folder.run_id}").text
    for words in (
        "Running, hangs since 2026-11-23 06:12:03 UTC",
        "</span> Hangs</span>",
        "waits for &lt;rank 1&gt;.",
        "rank 1: train.py, line 7",
    ):
        assert words in text
    assert "hangs since 2026-11-23" in client.get("/").text
    assert "<title>! Hangs: " in text
    assert "icon-bad.svg" in text
    look = told(rank(at="<train>\x1b[2J.py:20 step"), rank(entry("allreduce")))
    monkeypatch.setattr(run, "take", lambda folder: RunStacks(look))  # type: ignore[arg-type]
    form = {"form_key": key_of(place, folder)}
    answer = client.post(f"/runs/{folder.run_id}/stacks", data=form)
    assert answer.status_code == 200
    assert "&lt;train&gt;\\x1b[2J.py:20" in answer.text
    assert "<train>" not in answer.text
    assert client.post(f"/runs/{folder.run_id}/stacks", data={}).status_code in (403, 415)


@pytest.mark.promise("cancel-rerun-tags-go-command")
def test_tags_are_set_and_taken_away(place: Place) -> None:
    folder = place.run()
    client, form = place.client(), {"form_key": key_of(place, folder)}
    client.post(f"/runs/{folder.run_id}/tag", data=form | {"key": "keep", "value": ""})
    client.post(f"/runs/{folder.run_id}/tag", data=form | {"key": "a=<b>", "value": "ü & 'x'"})
    assert tags_and_properties.read(folder.notes).tags == {"keep": None, "a=<b>": "ü & 'x'"}
    assert "a=&lt;b&gt;" in client.get("/").text
    client.post(f"/runs/{folder.run_id}/tag", data=form | {"remove": "keep"})
    assert list(tags_and_properties.read(folder.notes).tags) == ["a=<b>"]
    for wrong in ({"key": ""}, {"key": "k" * 501}):
        assert client.post(f"/runs/{folder.run_id}/tag", data=form | wrong).status_code in (400, 409)


@pytest.mark.promise("run-readable-name-other-run")
def test_run_is_renamed(place: Place) -> None:
    folder = place.run()
    client, form = place.client(), {"form_key": key_of(place, folder)}
    client.post(f"/runs/{folder.run_id}/rename", data=form | {"name": " best <so far> "})
    assert tags_and_properties.read(folder.notes).name == "best <so far>"
    assert "best &lt;so far&gt;" in client.get("/").text
    for wrong in ({"name": " "}, {"name": "n" * 501}, {}):
        assert client.post(f"/runs/{folder.run_id}/rename", data=form | wrong).status_code in (400, 409)
    assert tags_and_properties.read(folder.notes).name == "best <so far>"


def test_a_form_without_its_key_does_nothing(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client()
    for form in ({}, {"form_key": ""}, {"form_key": "a.b"}, {"form_key": "0123456789abcdef." + "0" * 64}):
        assert client.post(f"/runs/{folder.run_id}/cancel", data=form).status_code in (403, 415)
    body = {"form_key": Token(place.path).form_key()}
    assert client.post(f"/runs/{folder.run_id}/cancel", json=body).status_code == 415
    assert client.post(f"/runs/{folder.run_id}/tag", content=b"x" * 100_000).status_code in (413, 415)
    assert not folder.cancel_request.exists()


@pytest.mark.promise("cancel-rerun-tags-go-command")
def test_read_only_server_has_no_forms_and_refuses_posts(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client(read_only=True)
    assert '<form method="post"' not in client.get(f"/runs/{folder.run_id}").text
    form = {"form_key": Token(place.path).form_key()}
    for action in ("cancel", "rename", "rerun", "tag"):
        assert client.post(f"/runs/{folder.run_id}/{action}", data=form).status_code == 403
    assert not folder.cancel_request.exists()


def test_a_run_without_its_source_is_not_submitted_again(place: Place) -> None:
    folder = place.run()
    form = {"form_key": Token(place.path).form_key()}
    answer = place.client().post(f"/runs/{folder.run_id}/rerun", data=form)
    assert answer.status_code == 409
    assert "no longer in" in answer.json()["error"]
    assert [path.name for path in place.runs_dir.iterdir() if path.name[0] != "."] == [folder.run_id]
