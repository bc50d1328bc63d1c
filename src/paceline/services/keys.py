"""The two keys of a service.

A request needs one of the keys, so clients can use one key while the other key is replaced.
"""

from __future__ import annotations

import secrets

from paceline.errors import ServiceError
from paceline.services.folder import ServiceFolder
from paceline.system.files import PRIVATE, read_json, stamp_of, write_json

NAMES = ("primary", "secondary")


def new() -> str:
    """Return a new random key of 256 bits."""
    return secrets.token_urlsafe(32)


def make(folder: ServiceFolder) -> None:
    """Create the two keys of a service, unless it already has keys."""
    if not folder.keys.exists():
        write_json(folder.keys, {name: new() for name in NAMES}, mode=PRIVATE)


def read(folder: ServiceFolder) -> tuple[str, str]:
    """Return the service's two keys (primary, secondary).

    Raises:
        ServiceError: The service has no keys, or the keys belong to another user.
    """
    keys = read_json(folder.keys)
    if not isinstance(keys, dict):
        if folder.keys.exists():
            raise ServiceError(
                f"keys of service {folder.name!r} can't be read from {str(folder.keys)!r}. Ask its owner."
            )
        raise ServiceError(f"service {folder.name!r} asks for no key. Deploy it with auth=True (`--auth`) for some.")
    return keys["primary"], keys["secondary"]


def changed_ns(folder: ServiceFolder) -> int:
    """Return the time of the keys' last change in Unix nanoseconds; 0 without keys."""
    return (stamp_of(folder.keys) or (0, 0, 0))[1]


def change(folder: ServiceFolder, which: str, value: str | None = None) -> str:
    """Replace the "primary" or "secondary" key, by default at random. Return the new key."""
    if not isinstance(which, str) or which.lower() not in NAMES:
        raise ServiceError(f"there is no key {which!r}. There are 'primary' and 'secondary'.")
    both = dict(zip(NAMES, read(folder), strict=True))
    if value is not None and (len(value) < 16 or not value.isascii() or not value.isprintable() or " " in value):
        raise ServiceError(
            "a key needs 16 or more printable ASCII characters without blanks. Without it, a random one."
        )
    both[which.lower()] = value or new()
    write_json(folder.keys, both, mode=PRIVATE)
    return both[which.lower()]
