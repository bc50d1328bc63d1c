"""The public parts of `paceline.serving`: other packages import nothing else of it.

The server itself is a program: `python -m paceline.serving CONFIG.json`.
"""

from paceline.serving import bench
from paceline.serving.check import check
from paceline.serving.config import ServedModel, ServerConfig, absolute
from paceline.serving.model.answers import message_of
from paceline.serving.state import READY, ServerState, read_state

__all__ = [
    "READY",
    "ServedModel",
    "ServerConfig",
    "ServerState",
    "absolute",
    "bench",
    "check",
    "message_of",
    "read_state",
]
