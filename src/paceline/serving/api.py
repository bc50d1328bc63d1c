"""The public names of `paceline.serving`. Other packages import only from this module.

The server itself is a program: `python -m paceline.serving CONFIG.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.serving.config import ServedModel, ServerConfig, absolute
from paceline.serving.model.answers import message_of
from paceline.serving.state import READY, ServerState, read_state
from paceline.system.lazy_import import face

if TYPE_CHECKING:
    from paceline.serving.bench import bench, picture, table
    from paceline.serving.check import check

__all__ = [
    "READY",
    "ServedModel",
    "ServerConfig",
    "ServerState",
    "absolute",
    "bench",
    "check",
    "message_of",
    "picture",
    "read_state",
    "table",
]

# Load these functions on first use, since the supervisor of each service imports this module without calling them.
__getattr__ = face(
    __name__, {"paceline.serving.bench": ("bench", "picture", "table"), "paceline.serving.check": ("check",)}
)
