"""Keys, and HMAC-SHA256 digests (RFC 2104) of messages."""

from __future__ import annotations

import hashlib
import hmac
import secrets

#: Bytes of a key, and of a digest.
SECRET_LENGTH = DIGEST_LENGTH = 32
#: The environment variable that a key travels in.
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """Return a new key."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Return the message's digest, 32 bytes."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Return whether the digest is the message's, in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)
