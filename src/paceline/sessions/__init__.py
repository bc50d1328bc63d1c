"""Interactive sessions on a node, which `paceline dev` starts as runs: the worker's program and the client's side."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: The log line by which a session's worker reports its service, and JupyterLab's port or the command that starts the ssh server.
_SERVES = re.compile(r"^paceline: this session serves (jupyter|ssh|shell) at (\S.*)$", re.MULTILINE)
#: Environment variable with the token that gives access to JupyterLab. JupyterLab itself reads this variable.
TOKEN_VARIABLE = "JUPYTER_TOKEN"
#: Environment variable with the public key of the user who may log in by ssh.
KEY_VARIABLE = "PACELINE_SESSION_KEY"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The address of a session's JupyterLab, ssh server or shell.

    kind: "jupyter", "ssh" or "shell".
    at: For "jupyter" the port; for "ssh" the user and the command that starts the ssh server; for "shell" no address.
    """

    kind: str
    at: str


def serving_line(found: Serving) -> str:
    """Return the line that a session's worker logs once users can connect."""
    return f"paceline: this session serves {found.kind} at {found.at}"


def serving(log: str) -> Serving | None:
    """Return a session's address from the last `serving_line` of its log, or None."""
    lines = _SERVES.findall(log)
    return Serving(kind=lines[-1][0], at=lines[-1][1].strip()) if lines else None


def private_folder() -> Path:
    """Make a private folder on the worker's node, removed when the run ends."""
    return Path(tempfile.mkdtemp(prefix="session-", dir=Path(os.environ["PACELINE_WATCH_DIR"]).parent))
