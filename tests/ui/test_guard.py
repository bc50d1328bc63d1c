"""Which requests are allowed, and the security headers of every answer."""

from __future__ import annotations

import asyncio
import re

import pytest
from starlette.types import Message

from paceline.runs import states
from paceline.ui.bundle import Inlined
from paceline.ui.guard import Token
from tests.ui.conftest import Place

PAGE = {"accept": "text/html"}


@pytest.mark.promise("without-token-nothing-told-server")
def test_request_without_the_token_shows_no_data(place: Place) -> None:
    folder = place.run(display_name="secret name")
    client = place.client(cookie=False)
    paths = ["/", "/live", "/models", "/compute/live", f"/runs/{folder.run_id}", f"/runs/{folder.run_id}/curves"]
    for path in (*paths, f"/runs/{folder.run_id}/file/outputs/a", "/nothing"):
        for headers in ({}, PAGE):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert "secret name" not in answer.text
    assert client.post(f"/runs/{folder.run_id}/cancel").status_code == 401
    # The page that asks for the token loads its style sheet without a token.
    assert client.get("/static/0/ui.css").status_code == 200


def test_opening_the_link_sets_a_cookie_and_removes_the_token_from_the_url(place: Place) -> None:
    client, token = place.client(cookie=False), Token(place.path)
    answer = client.get(f"/?state=live&token={token.text}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "./?state=live")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert token.text not in answer.headers["set-cookie"]
    assert client.get("/").status_code == 200
    # If the token is wrong, the page asks again.
    assert "This token is wrong" in place.client(cookie=False).get("/?token=wrong", headers=PAGE).text


def test_page_for_a_missing_token_names_the_commands_that_print_the_link(place: Place) -> None:
    text = place.client(cookie=False).get("/", headers=PAGE).text
    for words in ("<code>paceline ui</code>", "<code>paceline ui --ssh HOST</code>", "<code>ui/token</code>"):
        assert words in text
    assert Token(place.path).text not in text


@pytest.mark.promise("token-stays-owner-s-alone")
def test_token_is_persistent_and_readable_by_its_owner_only(place: Place) -> None:
    token = Token(place.path)
    assert Token(place.path).text == token.text
    assert (place.path / "ui" / "token").stat().st_mode & 0o077 == 0
    assert len(token.text) >= 40
    key = token.form_key()
    assert not token.is_form_key(key[:-1] + ("1" if key[-1] == "0" else "0"))
    assert token.is_form_key(token.form_key())
    assert token.form_key() != token.form_key()


@pytest.mark.promise("without-token-nothing-told-server")
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil:7223", "10.0.0.1:7223", "[::2]:7223"]
)
def test_request_with_a_foreign_host_name_is_refused(place: Place, host: str) -> None:
    answer = place.client().get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "--proxy" in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:7223", "localhost:1", "LOCALHOST", "[::1]:7223"])
def test_request_with_localhost_or_a_loopback_address_as_its_host_header_is_accepted(place: Place, host: str) -> None:
    assert place.client().get("/", headers={"host": host}).status_code == 200


def test_proxy_host_name_is_accepted_if_configured(place: Place) -> None:
    client = place.client(proxies=("hub.example.org",))
    assert client.get("/", headers={"host": "hub.example.org"}).status_code == 200
    assert client.get("/", headers={"host": "other.example.org"}).status_code == 421


@pytest.mark.promise("without-token-nothing-told-server")
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_cross_site_post_is_refused(place: Place, headers: dict[str, str]) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client()
    form = {"form_key": Token(place.path).form_key()}
    assert client.post(f"/runs/{folder.run_id}/cancel", data=form, headers=headers).status_code == 403
    assert not folder.cancel_request.exists()


def test_opened_page_contains_only_the_style_and_script_that_its_policy_permits(place: Place) -> None:
    client = place.client()
    opened = client.get("/", headers={**PAGE, "sec-fetch-mode": "navigate"})
    inlined = re.findall(r"<(?:script|style)>(.*?)</", opened.text, re.DOTALL)
    assert len(inlined) == 2
    policy = opened.headers["content-security-policy"]
    assert [Inlined(text).allowed in policy for text in inlined] == [True, True]
    assert "ui.css" not in opened.text
    # A script that fetches the page, such as the search of the list, has the style already.
    assert "<style>" not in client.get("/", headers={**PAGE, "sec-fetch-mode": "cors"}).text


def test_every_response_has_security_headers(place: Place) -> None:
    folder = place.run()
    (folder.outputs / "a.txt").write_text("a")
    client = place.client()
    for path in ("/", f"/runs/{folder.run_id}", f"/runs/{folder.run_id}/curves", "/nothing", "/models"):
        headers = client.get(path, headers=PAGE).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"


def test_refused_form_is_read_before_the_server_responds(place: Place) -> None:
    """jupyter-server-proxy was still sending the form when the server closed the connection, and reported status 500."""
    seen = []

    async def receive() -> Message:
        seen.append("read")
        return {"type": "http.request", "body": b"x", "more_body": len(seen) < 3}

    async def send(message: Message) -> None:
        seen.append(message["type"])

    address = {"type": "http", "method": "POST", "path": "/new", "raw_path": b"/new", "query_string": b""}
    asyncio.run(place.client().app({**address, "headers": [(b"host", b"evil.example")]}, receive, send))
    assert seen == ["read", "read", "read", "http.response.start", "http.response.body"]


def test_unsupported_http_methods_return_405(place: Place) -> None:
    folder = place.run()
    client = place.client()
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS"):
        assert client.request(method, f"/runs/{folder.run_id}").status_code == 405
    assert client.get(f"/runs/{folder.run_id}/cancel").status_code == 405
