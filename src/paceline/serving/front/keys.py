"""The two keys of a service, either of which a request may bring: one is replaced while the other goes on."""

from __future__ import annotations

import hmac
import json
from pathlib import Path

from paceline.errors import ServingError

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
