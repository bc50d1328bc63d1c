"""Keys, and what proves that a message was written by somebody who has the key: HMAC with SHA-256 (RFC 2104)."""

from __future__ import annotations

import hashlib
import hmac
import secrets

#: Bytes of a key, and of a digest.
SECRET_LENGTH = DIGEST_LENGTH = 32
#: The environment variable that a key travels in.
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """A new key."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The digest of the message, 32 bytes."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """True if it is the message's digest; takes as long for a wrong one."""
    return hmac.compare_digest(compute_digest(key, message), digest)
