"""Sessions on a node as runs (`paceline dev`): the worker's program and the client's side."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The log line by which a session's worker reports what it serves, and its port (jupyter) or the command for a connection (ssh).
_SERVES = re.compile(r"^paceline: this session serves (jupyter|ssh|shell) at (\S.*)$", re.MULTILINE)
#: Variable with the token of JupyterLab, which the server reads itself.
TOKEN_VARIABLE = "JUPYTER_TOKEN"
#: Variable with the public key that may log in by ssh.
KEY_VARIABLE = "PACELINE_SESSION_KEY"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a session serves. `at`: the port of JupyterLab, or the words of the command for ssh."""

    kind: str
    at: str


def serving_line(found: Serving) -> str:
    """Return the line that a worker prints once it serves."""
    return f"paceline: this session serves {found.kind} at {found.at}"


def serving(log: str) -> Serving | None:
    """Parse the last `serving_line` of a log, or return None."""
    lines = _SERVES.findall(log)
    return Serving(kind=lines[-1][0], at=lines[-1][1].strip()) if lines else None
