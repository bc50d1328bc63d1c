"""A text that identifies a machine, or a container on it."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Any

_NAMESPACES = "/proc/self/ns"


def host_hash(salt: Any = None) -> str:
    """Return `<host>-<32 hex digits>` from the host's name, its kernel namespaces and `salt`.

    All processes that share the machine and the namespaces get the same text.
    """
    name = socket.gethostname()
    # Linux's namespaces, such as `net:[4026531840]`, distinguish two containers on one machine.
    spaces = sorted(os.listdir(_NAMESPACES)) if os.path.isdir(_NAMESPACES) else []
    parts = [name, *(os.readlink(os.path.join(_NAMESPACES, space)) for space in spaces), str(salt or "")]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return f"{name.split('.')[0]}-{digest}"
