"""Links for people without the token: what they show, refuse and send, and how they end."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from typing import Any

import pytest

from paceline.errors import UserError
from paceline.runs import states
from paceline.ui import shares
from paceline.ui.app import make_app
from paceline.ui.guard import Token
from paceline.ui.shares import Share, SharedLinks
from tests.ui.conftest import HOSTILE, Place, log_values
from tests.ui.streams import opened

SITE = "https://wiki.example.org"


def share(place: Place, *runs: str, origins: tuple[str, ...] = ()) -> tuple[Share, str]:
    """Return a link and the beginning of its path."""
    made, token = SharedLinks(place.path).make(runs, 7, origins)
    return made, f"/shared/{token}"


def two_runs(place: Place) -> list[str]:
    folders = [place.run(f"digits_170000000{number}_00000001", display_name=f"run {number}") for number in (1, 2)]
    for folder in folders:
        log_values(folder, "loss", [2.0, 1.0])
    return [folder.run_id for folder in folders]


def test_shared_link_to_runs_shows_only_their_curves(place: Place) -> None:
    first, second = two_runs(place)
    client, (_, at) = place.client(cookie=False), share(place, first)
    text = client.get(f"{at}/embed").text
    assert "run 1" in text
    assert "form_key" not in text
    assert str(place.path) not in text
    curves = client.get(f"{at}/runs/{first}/curves?name=loss").json()["curves"]
    assert [curve["y"] for curve in curves] == [[2.0, 1.0]]
    script = re.search(r'src="(?:\.\./|\./)*(static/[^"]*embed.js)"', text)
    assert script is not None
    assert client.get(f"{at}/{script[1]}").status_code == 200
    others = [
        "/",
        "/live",
        f"/runs/{first}",
        f"/runs/{second}/curves",
        f"/runs/{first}/log",
        "/shares",
        "/views",
        "/compare",
    ]
    for path in (
        *others,
        f"/runs/{first}/file/outputs/a",
        "/embed/../runs",
        "//embed",
        "/models",
        f"/runs/{first}/curves/",
    ):
        assert client.get(f"{at}{path}", follow_redirects=False).status_code == 403, path


def test_shared_link_shows_only_its_own_runs_whatever_runs_are_requested(place: Place) -> None:
    first, second = two_runs(place)
    client, (_, at) = place.client(cookie=False), share(place, first)
    for path in (f"/embed?run={second}", f"/embed?run={first}&run={second}&r%75n={second}"):
        assert "run 2" not in client.get(f"{at}{path}").text
    assert "run 2" not in client.get(f"{at}/embed/curves?run={second}").text
    _, both = share(place, first, second)
    found = client.get(f"{both}/embed/curves?name=loss").json()
    assert {curve["run"] for curve in found["curves"]} == {0, 1}


def test_shared_link_to_the_workspace_allows_reading_but_no_writing(place: Place) -> None:
    first, _ = two_runs(place)
    client, (_, at) = place.client(cookie=False), share(place)
    for path in ("/", f"/runs/{first}", f"/runs/{first}/log", "/models", "/views", f"/compare?run={first}"):
        text = client.get(f"{at}{path}").text
        assert "run 1" in text or path not in ("/", f"/runs/{first}")
        assert not re.search(r'name="form_key" value="[^"]', text), path
        assert 'method="post"' not in text, path
    for path in (f"/runs/{first}/cancel", "/actions", "/views", "/shares", "/new"):
        assert client.post(f"{at}{path}", data={"form_key": ""}).status_code == 403
        # A visitor who also has the cookie can't write through the shared link.
        assert place.client().post(f"{at}{path}", data={"form_key": ""}).status_code == 403
    for path in ("/shares", "/new", f"/runs/{first}/rerun"):
        assert client.get(f"{at}{path}").status_code == 403
        # The regular expression of a route also matches before a final newline.
        assert client.get(f"{at}{path}%0A").status_code == 404
    assert client.get("/").status_code == 401
    assert str(place.path) not in client.get(f"{at}/runs/{first}/details").text
    assert str(place.path) in place.client().get(f"/runs/{first}/details").text


def test_live_streams_of_a_shared_link_and_of_the_workspace_send_different_html(place: Place) -> None:
    path = f"/runs/{place.run('digits_1700000001_00000001', status=states.RUNNING).run_id}/details/live"
    _, at = share(place)
    token = Token(place.path)

    async def watch() -> None:
        app = make_app(place.config(), token)
        async with (
            opened(app, "", f"{at}{path}") as reader,
            opened(app, f"{token.cookie}={token.cookie_value}", path) as owner,
        ):
            shown, own = [
                (await page.until(lambda event, data: event == "part" and data["name"] == "head"))["html"]
                for page in (reader, owner)
            ]
            assert 'method="post"' not in shown
            assert 'name="form_key"' in own

    asyncio.run(watch())


def test_shared_link_allows_embedding_in_an_iframe_only_to_its_named_sites(place: Place) -> None:
    first, _ = two_runs(place)
    client = place.client(cookie=False)
    plain = client.get(f"{share(place, first)[1]}/embed").headers
    assert "frame-ancestors 'none'" in plain["content-security-policy"]
    assert plain["x-frame-options"] == "DENY"
    framed = client.get(f"{share(place, first, origins=(SITE,))[1]}/embed").headers
    assert f"frame-ancestors {SITE}" in framed["content-security-policy"]
    assert framed["content-security-policy"].count("frame-ancestors") == 1
    assert "x-frame-options" not in framed
    assert framed["referrer-policy"] == "no-referrer"
    whole = client.get(f"{share(place, origins=(SITE,))[1]}/runs/{first}").headers
    assert f"frame-ancestors {SITE}" in whole["content-security-policy"]


@pytest.mark.parametrize(
    "origin", ["*", "https://a/b", "javascript:x", "https://a; script-src *", "https://a\nx", "a.example.org", HOSTILE]
)
def test_shared_link_with_an_invalid_site_is_refused(place: Place, origin: str) -> None:
    with pytest.raises(UserError, match="must be an origin"):
        SharedLinks(place.path).make((), 7, (origin,))


@pytest.mark.parametrize("days", [0, -1, 366, float("nan")])
def test_shared_link_lifetime_outside_1_to_365_days_is_refused(place: Place, days: float) -> None:
    with pytest.raises(UserError, match="1 to 365 days"):
        SharedLinks(place.path).make((), days)


def test_expired_withdrawn_and_invalid_links_show_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    two_runs(place)
    client, (made, at) = place.client(cookie=False), share(place)
    assert client.get(f"{at}/").status_code == 200
    for wrong in (
        f"{at[:-1]}/",
        f"/shared/{made.share_id}.x/",
        "/shared/../ui/",
        "/shared/x",
        f"/shared/{made.share_id}./",
        f"{at}",
    ):
        assert client.get(wrong, follow_redirects=False).status_code in (401, 404), wrong
    SharedLinks(place.path).withdraw(made.share_id)
    assert client.get(f"{at}/").status_code == 404
    made, at = share(place)
    monkeypatch.setattr(shares.time, "time", lambda: made.expires + 1)
    assert client.get(f"{at}/").status_code == 404
    assert SharedLinks(place.path).all() == []


def test_file_of_a_shared_link_is_private_and_does_not_contain_the_token(place: Place) -> None:
    made, at = share(place)
    path = place.path / "ui" / "shares" / f"{made.share_id}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert at.rpartition(".")[2] not in path.read_text()


@pytest.mark.parametrize(
    "change", [{"expires": "x"}, {"runs": [1]}, {"origins": ["* x"]}, {"expires": 1e300}, {"runs": ["../x"]}]
)
def test_shared_link_with_a_damaged_file_returns_404_and_the_list_of_links_loads(
    place: Place, change: dict[str, object]
) -> None:
    made, at = share(place)
    path = place.path / "ui" / "shares" / f"{made.share_id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert place.client(cookie=False).get(f"{at}/").status_code == 404
    assert place.client().get("/shares").status_code == 200


def test_open_stream_of_a_withdrawn_link_ends(place: Place) -> None:
    two_runs(place)
    made, at = share(place)

    async def watch() -> None:
        async with opened(make_app(place.config()), "", f"{at}/live") as watcher:
            await watcher.until(lambda event, _: event == "rows")
            SharedLinks(place.path).withdraw(made.share_id)
            log_values(place.run("digits_1700000003_00000001"), "loss", [1.0])
            with pytest.raises(AssertionError, match="the stream has ended"):
                await watcher.until(lambda event, _: event == "never")

    asyncio.run(watch())


def form(client: Any, path: str, **fields: Any) -> Any:
    key = re.search(r'name="form_key" value="([^"]+)"', client.get(path).text)
    assert key is not None
    return client.post("/shares", data={"form_key": key[1], **fields}, follow_redirects=False)


def test_shared_links_are_created_and_revoked_on_the_page(place: Place) -> None:
    first, _ = two_runs(place)
    client = place.client()
    assert f'href="../shares?run={first}"' in client.get(f"/runs/{first}").text
    text = form(client, f"/shares?run={first}&axis=time", run=first, days="3", origins=SITE, settings="axis=time").text
    path = re.search(r'data-path="\./(shared/[^"]*)"', text)
    assert path is not None
    assert path[1].endswith("/embed?axis=time")
    assert place.client(cookie=False).get(f"/{path[1]}").status_code == 200
    (made,) = SharedLinks(place.path).all()
    assert (made.runs, made.origins) == ((first,), (SITE,))
    assert form(client, "/shares", days="x").status_code == 400
    assert form(client, "/shares", withdraw=made.share_id).status_code == 303
    assert SharedLinks(place.path).all() == []
    read_only = place.client(read_only=True)
    assert "Make a link" not in read_only.get("/shares").text
    assert read_only.post("/shares", data={"days": "1"}).status_code == 403


def test_request_for_a_shared_page_with_a_foreign_host_header_returns_421(place: Place) -> None:
    _, at = share(place)
    assert place.client(cookie=False).get(f"{at}/", headers={"host": "evil.example.org"}).status_code == 421
