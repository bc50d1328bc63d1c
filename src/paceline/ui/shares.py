"""Share links: read-only access to runs or a workspace for people without its token."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from paceline.errors import FileNameError, UserError
from paceline.runs.ids import check_run_id
from paceline.system.files import PRIVATE, read_json, write_json

#: The first part of the URL path of every shared page.
PREFIX = "/shared/"
#: Maximum days for which a link is valid, maximum number of runs that a link shows, maximum number of links.
MOST_DAYS, MOST_RUNS, _MOST = 365, 200, 1000
#: Pages that no share link may show, because they create links, start runs or name members.
_NEVER = ("/shares", "/new", "/members")
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(:[0-9]{1,5})?")
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share link to read-only pages.

    Attributes:
        share_id: First part of the link's token.
        digest: SHA-256, in hex, of the second part of the link's token.
        runs: Ids of the runs whose curves the link shows; empty for the whole workspace.
        made, expires: Times of creation and expiry in seconds since 1970.
        origins: Sites that may embed the page, such as "https://wiki.example.org".
    """

    share_id: str
    digest: str
    runs: tuple[str, ...]
    made: float
    expires: float
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for run_id in self.runs:
            check_run_id(run_id)
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise UserError(
                    f"the site {origin[:200]!r} must be an origin, such as https://wiki.example.org, without a path."
                )
        if not 0 < self.expires - self.made <= MOST_DAYS * 86400:
            raise UserError(f"a link ends after 1 to {MOST_DAYS} days, got {(self.expires - self.made) / 86400:g}.")
        if len(self.runs) > MOST_RUNS:
            raise UserError(f"a link shows {MOST_RUNS} runs at most, got {len(self.runs)}.")

    def allows(self, path: str) -> bool:
        """Return whether the share link shows the page at this path."""
        if path.startswith("/static/"):
            return True
        if not self.runs:
            return not any(path == never or path.startswith(f"{never}/") for never in _NEVER)
        return path in ("/embed", "/embed/curves", *(f"/runs/{run_id}/curves" for run_id in self.runs))

    def query(self, given: bytes) -> bytes:
        """Return the query string `given`, but with the link's runs if the link names runs."""
        if not self.runs:
            return given
        others = parse_qsl(given.decode("latin-1"), keep_blank_values=True)
        kept = [(name, value) for name, value in others if name != "run"]
        return urlencode([*(("run", run_id) for run_id in self.runs), *kept]).encode()


class SharedLinks:
    """A workspace's share links, stored as files of mode 0600 without tokens."""

    def __init__(self, workspace_dir: Path) -> None:
        self._folder = workspace_dir / "ui" / "shares"

    def make(self, runs: tuple[str, ...], days: float, origins: tuple[str, ...] = ()) -> tuple[Share, str]:
        """Create a share link. Return it with its token, which is not stored.

        Raises:
            UserError: A value is invalid, or there are too many links.
        """
        if len(self.all()) >= _MOST:
            raise UserError(f"there are {_MOST} links already. Withdraw some.")
        share_id, secret, now = secrets.token_hex(8), secrets.token_urlsafe(32), time.time()
        share = Share(
            share_id=share_id,
            digest=digest_of(secret),
            runs=runs,
            made=now,
            expires=now + days * 86400,
            origins=origins,
        )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(self._path(share_id), asdict(share), mode=PRIVATE)
        return share, f"{share_id}.{secret}"

    def find(self, token: str) -> Share | None:
        """Return the valid share link with this token, or None."""
        share_id, _, secret = token.partition(".")
        share = self._read(share_id) if _ID.fullmatch(share_id) else None
        if share is None or share.expires <= time.time():
            return None
        return share if hmac.compare_digest(share.digest.encode(), digest_of(secret).encode()) else None

    def is_valid(self, share: Share) -> bool:
        """Return whether a share link has neither expired nor been withdrawn."""
        return share.expires > time.time() and self._path(share.share_id).exists()

    def all(self) -> list[Share]:
        """Return the share links, newest first, and remove expired links."""
        found = []
        for share in self._shares():
            if share.expires > time.time():
                found.append(share)
            else:
                self.withdraw(share.share_id)
        return sorted(found, key=lambda share: -share.made)

    def withdraw(self, share_id: str) -> None:
        """Remove a share link; its token is invalid from now on.

        Raises:
            UserError: The id is malformed. An unknown id is no error.
        """
        if not _ID.fullmatch(share_id):
            raise UserError(f"there is no link {share_id[:50]!r}.")
        self._path(share_id).unlink(missing_ok=True)

    def _shares(self) -> Iterator[Share]:
        try:
            paths = [path for path in self._folder.iterdir() if path.suffix == ".json" and _ID.fullmatch(path.stem)]
        except OSError:
            return
        yield from filter(None, (self._read(path.stem) for path in paths))

    def _path(self, share_id: str) -> Path:
        return self._folder / f"{share_id}.json"

    def _read(self, share_id: str) -> Share | None:
        match read_json(self._path(share_id)):
            case {
                "digest": str(digest),
                "runs": list(runs),
                "made": int() | float() as made,
                "expires": int() | float() as expires,
                "origins": list(origins),
            } if all(isinstance(text, str) for text in (*runs, *origins)):
                try:
                    return Share(
                        share_id=share_id,
                        digest=digest,
                        runs=tuple(runs),
                        made=made,
                        expires=expires,
                        origins=tuple(origins),
                    )
                except (UserError, FileNameError):
                    return None
        return None


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a token's secret part in hex."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
