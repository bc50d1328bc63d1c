"""Who may ask: whoever brings one of the two keys, and, where there is none, programs of this machine.

Each key is replaced while the other goes on. A page in a browser of this machine is no such program: it is let in where its
origin is allowed. Without this check any web page could have the model run, and read its answers by a host name of its own
that leads to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import ServingError
from paceline.system.listening import is_loopback

_LEAST = 16


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys of a file: JSON with "primary", and "secondary" where there is one.

    Raises:
        ServingError: it can't be read, or a key is missing or shorter than 16 characters. No key is in the message.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ServingError(f"keys_file={path!r} can't be read: {error}") from error
    given = value if isinstance(value, dict) else {}
    found = [given[name] for name in ("primary", "secondary") if given.get(name) is not None]
    if "primary" not in given or any(not isinstance(key, str) or len(key) < _LEAST for key in found):
        raise ServingError(
            f'keys_file={path!r} should be {{"primary": "...", "secondary": "..."}}, each a text of at least {_LEAST} characters.'
        )
    return tuple(key.encode() for key in found)


def is_right(header: bytes | None, keys: tuple[bytes, ...]) -> bool:
    """True where the header is `Bearer` and one of the keys. Takes as long for a wrong key as for a right one."""
    kind, _, given = (header or b"").partition(b" ")
    given = given.strip()
    # Each is compared, whichever is right.
    right = [hmac.compare_digest(given, key) for key in keys]
    return any(right) and kind.lower() == b"bearer"


def is_allowed(origin: str, origins: Collection[str]) -> bool:
    return "*" in origins or origin in origins


def refusal(given: Mapping[bytes, bytes], host: str, origins: Collection[str]) -> tuple[int, str] | None:
    """Return status and reason of a request without a key that is refused; None where it may pass.

    given: its headers `host`, `origin` and `sec-fetch-site`. host: where the server listens. origins: those that are allowed.
    """
    named = given.get(b"host", b"").decode("latin-1")
    if named and is_loopback(host):
        try:
            name = urlsplit(f"//{named}").hostname or ""
        except ValueError:
            name = ""
        if not (is_loopback(name) or name.endswith(".localhost") or name == host.lower()):
            return 421, (
                f"this server is not called {named!r}. Call it 127.0.0.1 or localhost, or start it with keys (`paceline serve "
                "--keys FILE`, `paceline service deploy --auth`)."
            )
    origin = given.get(b"origin", b"").decode("latin-1")
    if origin:
        if origin.partition("://")[2].lower() != named.lower() and not is_allowed(origin, origins):
            return 403, f"a page of {origin!r} may not ask. Let it with --allow-origin {origin}, or send no Origin."
    # What a page loads without a script, such as a picture, comes without an origin.
    elif given.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return 403, "a page of another site may not ask. Let its scripts with --allow-origin ORIGIN."
    return None
