"""Access control: a request needs one of two keys; without keys, only this machine may send requests.

Each key can be replaced while the other key stays valid. A web page in a local browser needs an allowed origin too.
Otherwise any web page could send requests to the model. It could also read the responses, through a host name that
resolves to 127.0.0.1 (DNS rebinding).
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
    """Read the keys of a JSON file with "primary" and optionally "secondary".

    Raises:
        ServingError: The file is unreadable, or a key is missing or shorter than 16 characters. The message has no key.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ServingError(f"keys_file={path!r} can't be read: {error}") from error
    document = value if isinstance(value, dict) else {}
    keys = [document[name] for name in ("primary", "secondary") if document.get(name) is not None]
    if "primary" not in document or any(not isinstance(key, str) or len(key) < _LEAST for key in keys):
        raise ServingError(
            f'keys_file={path!r} should be {{"primary": "...", "secondary": "..."}}, each a text of at least {_LEAST} characters.'
        )
    return tuple(key.encode() for key in keys)


def is_right(header: bytes | None, keys: tuple[bytes, ...]) -> bool:
    """Return whether an Authorization header is `Bearer` with one of the keys.

    The comparison takes constant time.
    """
    kind, _, given = (header or b"").partition(b" ")
    given = given.strip()
    # Compare the header with all keys, so that the time does not reveal which key matched.
    right = [hmac.compare_digest(given, key) for key in keys]
    return any(right) and kind.lower() == b"bearer"


def is_allowed(origin: str, origins: Collection[str]) -> bool:
    return "*" in origins or origin in origins


def refusal(given: Mapping[bytes, bytes], host: str, origins: Collection[str]) -> tuple[int, str] | None:
    """Return (status, reason) if a server without keys must refuse a request, else None.

    given: The headers `host`, `origin` and `sec-fetch-site` of the request.
    host: The address at which the server listens.
    origins: The allowed origins.
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
    # Check Sec-Fetch-Site: browsers send no Origin for resources that a page loads without a script, such as pictures.
    elif given.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return 403, "a page of another site may not ask. Let its scripts with --allow-origin ORIGIN."
    return None
