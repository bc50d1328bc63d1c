"""The state of a server: `server.json` beside its configuration, replaced at each change.

    {"pid": 812, "scheme": "http", "host": "127.0.0.1", "port": 43121, "state": "ready", "error": null,
     "revision": "4", "refused": null,
     "workers": [{"pid": 815, "state": "ready", "error": null, "revision": "4"}]}

state: "starting" until a first model process is ready; "ready"; "unready" while all model processes are being replaced;
    "draining" after SIGTERM; "stopped"; "failed" if the server could not serve, with `error`.
revision: the revision being served.
refused: {"revision": ..., "error": ...} of a configuration that could not be loaded after SIGHUP. The previous
    configuration is still served.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, cast

from paceline.system.files import read_json, write_json

STATE_FILE = "server.json"

STARTING, READY, UNREADY, DRAINING, STOPPED, FAILED = "starting", "ready", "unready", "draining", "stopped", "failed"


class Refusal(TypedDict):
    """A configuration that the server could not load: its revision, and the reason."""

    revision: str
    error: str


class WorkerState(TypedDict):
    """The state of one model process."""

    pid: int
    state: str
    error: str | None
    revision: str


class ServerState(TypedDict):
    """The state of a server, as `server.json` stores it."""

    pid: int
    scheme: str
    host: str
    port: int
    state: str
    error: str | None
    revision: str
    refused: Refusal | None
    workers: list[WorkerState]


def read_state(folder: Path) -> ServerState | None:
    """Return the server's state, or None if the server has not started."""
    value = read_json(folder / STATE_FILE)
    return cast(ServerState, value) if isinstance(value, dict) else None


def write_state(folder: Path, state: ServerState) -> None:
    write_json(folder / STATE_FILE, state)
