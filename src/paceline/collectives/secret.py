"""The secret that the ranks of one run share, and what they sign with it.

Whoever starts the ranks makes it and gives it to them in their environment: a run's supervisor for each attempt,
`horovodrun` for each job. It is written down nowhere, and stands on no command line. Ranks that meet in torch's store,
which checks no identity, know by it what one of them has said. torchrun gives none: then nothing is signed, and
whoever reaches the ranks' ports is believed, as torch itself does.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from paceline.collectives.errors import CollectivesError

#: 32 bytes or more, as hexadecimal digits.
VARIABLE = "PACELINE_RUN_SECRET"
TAG_BYTES = 32
_LEAST_BYTES = 16


def run_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret; None where whoever started this process gave none.

    Raises:
        CollectivesError: the variable holds something else.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < _LEAST_BYTES:
        raise CollectivesError(
            f"{VARIABLE} holds no secret: {2 * _LEAST_BYTES} or more hexadecimal digits are one, the same for every rank. "
            "Unset it, and let Paceline or horovodrun set it; or make one with `python -c 'import secrets; "
            "print(secrets.token_hex(32))'`."
        )
    return key


def tag(key: bytes, purpose: str, data: bytes) -> bytes:
    """A proof, `TAG_BYTES` long, that whoever said `data` for this purpose knows the secret (HMAC-SHA256, RFC 2104).

    The purpose keeps what was said in one place from counting in another.
    """
    made = hmac.new(key, f"{purpose}\0".encode(), "sha256")
    made.update(data)
    return made.digest()


def is_tag(found: bytes, key: bytes, purpose: str, data: bytes) -> bool:
    """True if `found` is the `tag` of these. Takes as long for a wrong one as for the right one, so timing tells nothing."""
    return hmac.compare_digest(found, tag(key, purpose, data))
