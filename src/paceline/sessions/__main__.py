"""`python -m paceline.sessions KIND IDLE_S`: the worker of a session (`paceline dev`).

KIND is jupyter, ssh or shell. The worker starts the server of the session, and stores the user's notebooks. The worker
ends after IDLE_S seconds without activity; with 0, it never ends for this reason.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from paceline.sessions import Serving, serving_line
from paceline.sessions.notebooks import Notebooks
from paceline.system import processes

#: Seconds between two checks of the session's server, and between two copies of the session's notebooks.
_LOOK_S, _COPY_S = 1.0, 5.0


def main(kind: str, idle_s: float) -> None:
    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    notebooks = Notebooks(
        Path.cwd(), Path(os.environ["PACELINE_CHECKPOINT_DIR"]), Path(os.environ["PACELINE_OUTPUT_DIR"])
    )
    notebooks.restore()
    check, last_activity, close = _served(kind)
    active = time.monotonic()
    copied = 0.0
    try:
        while True:
            time.sleep(_LOOK_S)
            check()
            now = time.monotonic()
            if now - copied > _COPY_S:
                copied = now
                if notebooks.keep():
                    active = now
            if idle_s and (last_activity() or attached()):
                active = now
            if idle_s and now - active > idle_s:
                print(f"paceline: the session ends after {idle_s:g} s without activity", flush=True)
                return
    finally:
        close()
        notebooks.keep()


def _served(kind: str) -> tuple[Callable[[], None], Callable[[], bool], Callable[[], None]]:
    """Start the server of a session. Return functions to check, watch and end it.

    For JupyterLab, the first function raises if the server has ended, and the second returns whether a user was active
    since its last call. For ssh and a shell, they do nothing and return False. The third ends the server.
    """
    if kind == "jupyter":
        from paceline.sessions.jupyter import Jupyter

        lab = Jupyter()
        return lab.check, lab.was_used, lab.close
    if kind == "ssh":
        from paceline.sessions.ssh import SshServer

        server = SshServer()
        return (lambda: None), (lambda: False), server.close
    print(serving_line(Serving(kind="shell", at="the node")), flush=True)
    return (lambda: None), (lambda: False), (lambda: None)


def attached() -> bool:
    """Return whether a user is connected by a shell or over ssh."""
    for pid in processes.with_variable("PACELINE_RUN_ID", os.environ["PACELINE_RUN_ID"]):
        words = processes.command_of(pid)
        if any(word.endswith("remote/agent/execute.py") for word in words):
            below = [word for child in processes.descendants(pid) for word in processes.command_of(child)]
            if below and not any(word.endswith("remote/agent/relay.py") for word in below):
                return True
    return False


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
