"""Access control: every request is checked here before any view sees it.

    Host        must be a name of this server, else another site could reach the server by DNS rebinding
    token       must be in the cookie, or in the first request's URL, whose response sets the cookie. Not for members
    POST        must come from a page of this server (Origin), with the key that its forms have

Every response gets headers that keep browsers from executing its content.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import os
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import WorkspaceError
from paceline.system.files import PRIVATE, write_whole
from paceline.ui.bundle import classic, styles
from paceline.ui.config import UiConfig
from paceline.ui.render import root_of
from paceline.ui.shares import PREFIX, SharedLinks
from paceline.ui.visitors import Visitor, Visitors, refusal, rule_of

#: Content-Security-Policy that permits only this server's files, and inline only theme.js and ui.css.
POLICY = (
    f"default-src 'none'; script-src 'self' {classic('theme.js').allowed}; style-src 'self' {styles('ui.css').allowed}; "
    "img-src 'self'; connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
#: Seconds for which the login cookie is valid: a year.
_COOKIE_S = 365 * 86400
#: Path of static files. They are served without a token, because they reveal nothing, and the login page needs them.
_OPEN = "/static/"
#: Paths that routes may see: only names of files may have control characters. In a route, `$` also matches before a final
#: newline, so "/views\n" would reach the route "/views", but not its rules.
_PATH = re.compile(
    r"[^\x00-\x1f\x7f]*|(?:/shared/[^/]*)?/runs/[^/\x00-\x1f]+/(?:file|folder|folder-live|frame|look|zip)/[\s\S]*"
)
_LEAST = 32
#: Maximum number of bytes to read of a refused request.
_MOST_SKIPPED = 1 << 18


class Guard:
    def __init__(self, app: ASGIApp, config: UiConfig, token: Token, shares: SharedLinks, visitors: Visitors) -> None:
        self._app, self._config, self._token, self._shares = app, config, token, shares
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(PREFIX):
            await self._show_shared(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                added = [(b"content-security-policy", POLICY.encode()), (b"cache-control", b"no-store"), *_HEADERS]
                message["headers"] = [*message["headers"], *(one for one in added if one[0] not in there)]
            elif visitor is not None and not self._visitors.is_still(visitor):
                raise ConnectionAbortedError("the member's role changed while a page was open.")
            await send(message)

        refused = self._refused(scope)
        visitor: Visitor | None = scope.get("paceline.visitor")
        if refused is not None:
            await _skip_body(receive)
        await (self._app if refused is None else refused)(scope, receive, guarded)

    async def _show_shared(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request that came by a share link (`shares`)."""
        token, slash, rest = scope["path"].removeprefix(PREFIX).partition("/")
        share = self._shares.find(token) if slash else None
        origins = " ".join(share.origins).encode() if share else b""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = dict(message["headers"])
                policy = there.pop(b"content-security-policy", POLICY.encode())
                if origins:
                    policy = policy.replace(b"frame-ancestors 'none'", b"frame-ancestors " + origins)
                    policy = policy.replace(b"frame-ancestors 'self'", b"frame-ancestors 'self' " + origins)
                added = {b"content-security-policy": policy, b"cache-control": b"no-store", **dict(_HEADERS)}
                # Don't send the page's URL to other sites as the referrer, because the URL contains the token.
                added[b"referrer-policy"] = b"no-referrer"
                if origins:
                    del added[b"x-frame-options"]
                headers = [(name, value) for name, value in message["headers"] if name != b"content-security-policy"]
                message["headers"] = [*headers, *(one for one in added.items() if one[0] not in there)]
            elif share is not None and not self._shares.is_valid(share):
                raise ConnectionAbortedError("the link was withdrawn while its page was open.")
            await send(message)

        refused: Response | None = None
        if (unknown := self._unknown(scope)) is not None:
            refused = unknown
        elif share is None:
            refused = PlainTextResponse(
                "This link is wrong, has ended, or was withdrawn. Ask its sender for a new one.\n", 404
            )
        elif scope["method"] not in ("GET", "HEAD"):
            refused = PlainTextResponse("This link only shows pages. It changes nothing.\n", 403)
        elif not share.allows(f"/{rest}"):
            refused = PlainTextResponse("This link does not show this page.\n", 403)
        if refused is None and share is not None:
            # Remove the prefix /shared/... from the path for the view. Relative URLs in the page still begin with the prefix.
            raw = scope.get("raw_path", scope["path"].encode()).removeprefix(PREFIX.encode()).partition(b"/")[2]
            inner = {"path": f"/{rest}", "raw_path": b"/" + raw, "query_string": share.query(scope["query_string"])}
            await self._app({**scope, **inner, "paceline.share": share}, receive, guarded)
        elif refused is not None:
            await refused(scope, receive, guarded)

    def _unknown(self, scope: Scope) -> Response | None:
        """Return the response to a request for an unknown host or path, or None."""
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if self._knows(host):
            is_path = _PATH.fullmatch(scope["path"])
            return None if is_path else PlainTextResponse("No page has a control character in its path.\n", 404)
        return PlainTextResponse(
            f"This server does not have the name {host!r}. Open the address that `paceline ui` has printed; behind a proxy, "
            "start it with --proxy NAME.\n",
            421,
        )

    def _refused(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request, or None to accept it."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if (unknown := self._unknown(scope)) is not None:
            return unknown
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse(
                f"{scope['method']} is not allowed. Use GET, HEAD or POST.\n", 405, {"allow": "GET, HEAD, POST"}
            )
        if scope["path"].startswith(_OPEN):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        try:
            visitor = self._visitors.of(scope)
        except HTTPException as error:
            return PlainTextResponse(f"{error.detail}\n", error.status_code)
        if visitor is None and given and scope["method"] == "GET" and self._token.is_right(given[0]):
            return self._welcome(scope, query)
        if visitor is None and not self._token.is_cookie(self._cookie(headers.get("cookie", ""))):
            return _ask_for_token(scope, is_wrong=bool(given))
        if scope["method"] == "POST" and not self._is_own(headers, host):
            return PlainTextResponse("The request came from a page of another site, so Paceline did nothing.\n", 403)
        visitor = scope["paceline.visitor"] = visitor or self._visitors.owner
        if scope["method"] == "POST" and not visitor.may(rule_of(scope["path"])):
            return PlainTextResponse(f"{refusal(visitor)}\n", 403)
        return None

    def _knows(self, host: str) -> bool:
        name = host.lower()
        name = name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]
        return name in self._config.host_names or (bool(name) and self._config.takes_any_host)

    def _is_own(self, headers: dict[str, str], host: str) -> bool:
        origin = headers.get("origin")
        if origin is None:
            # All current browsers send Origin or Sec-Fetch-Site with a POST. Other programs may omit both headers.
            return headers.get("sec-fetch-site", "same-origin") == "same-origin"
        return urlsplit(origin).netloc.lower() == host.lower()

    def _cookie(self, header: str) -> str:
        jar = SimpleCookie()
        for part in header.split(";"):
            # Parse each cookie separately, so that a malformed cookie of another server does not hide this server's cookie.
            try:
                jar.load(part.strip())
            except CookieError:
                continue
        found = jar.get(self._token.cookie)
        return found.value if found is not None else ""

    def _welcome(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        # Redirect by a relative URL (the path's last part, or "./"), because a server behind a proxy does not know its own URL.
        last = scope["path"].rpartition("/")[2]
        response = RedirectResponse(f"./{last}" + (f"?{rest}" if rest else ""), 303)
        is_secure = scope.get("scheme") == "https" or bool(self._config.proxies and not self._is_local(scope))
        response.set_cookie(
            self._token.cookie,
            self._token.cookie_value,
            max_age=_COOKIE_S,
            httponly=True,
            secure=is_secure,
            # With Lax, the browser sends the cookie when a user follows a link, but not with a POST from another site.
            samesite="lax",
        )
        return response

    @staticmethod
    def _is_local(scope: Scope) -> bool:
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").partition(":")[0]
        return host in ("127.0.0.1", "localhost")


async def _skip_body(receive: Receive) -> None:
    """Read the rest of a refused request; otherwise a proxy would fail."""
    left = _MOST_SKIPPED
    while left > 0 and (message := await receive()).get("more_body"):
        left -= len(message["body"])


def _ask_for_token(scope: Scope, *, is_wrong: bool) -> Response:
    if scope["method"] != "GET" or b"text/html" not in dict(scope["headers"]).get(b"accept", b""):
        return PlainTextResponse("The token is missing or wrong. Open the link that `paceline ui` prints.\n", 401)
    said = "This token is wrong." if is_wrong else "This page shows a workspace's runs to people who have its token."
    return HTMLResponse(_PAGE.format(root=root_of(scope["path"]), said=html.escape(said)), 401)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Paceline: token</title><link rel="stylesheet" href="{root}static/0/ui.css"></head>
<body class="ask"><main><h1>Paceline</h1><p>{said}</p>
<p>To get the link, look at the terminal where <code>paceline ui</code> runs, or call it again in the workspace's folder:
it prints a link with the token. On another machine: <code>paceline ui --ssh HOST</code>.</p>
<p>Or type the token. It is the text in the link after <code>token=</code>, and the content of the file <code>ui/token</code>
in the workspace, which its owner can read.</p>
<form method="get"><label for="token">Token</label> <input id="token" name="token" type="password" required autofocus
autocomplete="off"> <button>Open</button></form></main></body></html>
"""


class Token:
    """The access token of a workspace, created on first use.

    Raises:
        WorkspaceError: The token can't be read or written.
    """

    def __init__(self, workspace_dir: Path) -> None:
        path = workspace_dir / "ui" / "token"
        try:
            self.text = _read(path) or _make(path)
        except OSError as error:
            raise WorkspaceError(
                f"the page's token in {str(path)!r} can't be read or written: {error.strerror or error}."
            ) from error
        #: The cookie's name differs between workspaces, because browsers send cookies to all ports of a host.
        self.cookie = "paceline_ui_" + hashlib.sha256(os.fsencode(os.path.realpath(workspace_dir))).hexdigest()[:10]

    @property
    def cookie_value(self) -> str:
        """Return the value of the access cookie, which does not reveal the token."""
        return self._sign("cookie")

    def is_right(self, given: str) -> bool:
        """Return whether `given` is the token, comparing in constant time."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.text.encode())

    def is_cookie(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.cookie_value.encode())

    def form_key(self, member: str = "") -> str:
        """Return a key that proves that this member's page sent a form (CSRF).

        Each call returns a different key, to prevent compression attacks (BREACH).
        """
        nonce = secrets.token_hex(8)
        return f"{nonce}.{self._sign(f'form {nonce}{member}')}"

    def is_form_key(self, given: str, member: str = "") -> bool:
        nonce, _, signature = given.partition(".")
        return hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign(f"form {nonce}{member}").encode())

    def _sign(self, what: str) -> str:
        return hmac.new(self.text.encode(), what.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _read(path: Path) -> str | None:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return text if len(text) >= _LEAST else None


def _make(path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = secrets.token_urlsafe(32)
    write_whole(path, text + "\n", mode=PRIVATE)
    # Read the file a second time: if two servers start at the same time, both then use the token that was written last.
    return _read(path) or text
