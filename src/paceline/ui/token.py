"""The page's token: who has it may see the workspace and act on its runs.

It lies in the workspace, for its owner alone, and stays the same: a page that is open goes on when the server is started again,
and a link that was kept still leads somewhere. A browser gets a cookie for it, so that it is in no address but the first.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from paceline.errors import WorkspaceError
from paceline.system.files import PRIVATE, write_whole

_LEAST = 32


class Token:
    """The token of a workspace, made on first use.

    Raises:
        WorkspaceError: it can't be read or written.
    """

    def __init__(self, workspace_dir: Path) -> None:
        path = workspace_dir / "ui" / "token"
        try:
            self.text = _read(path) or _make(path)
        except OSError as error:
            raise WorkspaceError(
                f"the page's token in {str(path)!r} can't be read or written: {error.strerror or error}."
            ) from error
        #: Cookies of all servers of a host come with each request, whatever their port: each workspace has its own name.
        self.cookie = "paceline_ui_" + hashlib.sha256(os.fsencode(os.path.realpath(workspace_dir))).hexdigest()[:10]

    @property
    def cookie_value(self) -> str:
        """What the browser keeps: the token can't be had from it."""
        return self._sign("cookie")

    def is_right(self, given: str) -> bool:
        """Whether this is the token. It takes as long for a wrong one."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.text.encode())

    def is_cookie(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.cookie_value.encode())

    def form_key(self) -> str:
        """What a form of a page brings along, so that no other site's form is taken for it; another one each time, lest its
        bytes be guessed from the length of a compressed page.
        """
        nonce = secrets.token_hex(8)
        return f"{nonce}.{self._sign('form ' + nonce)}"

    def is_form_key(self, given: str) -> bool:
        nonce, _, signature = given.partition(".")
        return hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign("form " + nonce).encode())

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
    # Of two servers that begin at once, both take what came last.
    return _read(path) or text
