"""ui: the live page of a workspace, in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from paceline.cli.options import JSON, TLS, VerbOption, takes
from paceline.errors import UserError
from paceline.ui.config import PORT, UiConfig
from paceline.workspace import Workspace

UI = (
    VerbOption("--port", f"Port; default: {PORT} or the next free one. 0 takes any free port.", "N", int),
    VerbOption("--open", "Open the page in this machine's browser.", type=bool),
    VerbOption("--read-only", "Only show the workspace: start, change and delete nothing.", type=bool),
    VerbOption("--host", "Address to listen at; default: 127.0.0.1. Any other needs TLS, or --proxy.", "ADDRESS"),
    *TLS,
    VerbOption("--proxy", "Host name of a proxy in front that does TLS; may be repeated.", "NAME", list),
    VerbOption("--ssh", "Show a workspace on this host, by your own ssh.", "HOST"),
    VerbOption("--remote-folder", "With --ssh: working directory there; default: home.", "FOLDER"),
    VerbOption("--remote-program", "With --ssh: Paceline's program there; default: paceline.", "PROGRAM"),
    VerbOption(
        "--socket",
        "With --members: listen at this path, where the kernel names each user. Without: used by --ssh.",
        "PATH",
        section="Members",
    ),
    VerbOption("--members", "File with a role for each member: lines such as ann = admin.", "FILE"),
    VerbOption("--user-header", "Header in which a proxy names the user, at --socket.", "NAME"),
    VerbOption("--proxy-user", "User who runs this proxy; default: you.", "USER"),
    JSON,
)


_NOT_OVER_SSH = ("host", "tls_cert", "tls_key", "proxy", "socket", "members", "user_header", "proxy_user")


@takes(*UI)
def ui(**given: Any) -> int:
    """Show the workspace in a browser: runs, curves, logs, files. Ctrl-C ends it.

    The printed link has a token. Only this machine can open the page; --ssh shows a remote workspace.
    """
    remote = given["remote_folder"] or given["remote_program"]
    if given["ssh"] is not None:
        here = [name for name in _NOT_OVER_SSH if given[name]]
        if here or given["as_json"]:
            option = f"--{here[0].replace('_', '-')}" if here else "--json"
            raise UserError(f"{option} does not go with --ssh, which is reached from this machine alone.")
        from paceline.ui.ssh import watch

        words = ["--read-only"] if given["read_only"] else []
        program = given["remote_program"] or "paceline"
        return watch(given["ssh"], given["remote_folder"], program, given["port"], words, opens=given["open"])
    if remote:
        raise UserError("--remote-folder and --remote-program go with --ssh HOST.")
    if given["socket"] and not (given["members"] or given["as_json"]):
        raise UserError("--socket PATH goes with --members FILE, which names the users who may connect.")
    config = UiConfig(
        # Create the workspace if it is missing, because the server's token is stored in it.
        workspace=str(Workspace.from_config().path),
        host=given["host"] or "127.0.0.1",
        port=given["port"],
        tls_cert=_absolute(given["tls_cert"]),
        tls_key=_absolute(given["tls_key"]),
        proxies=tuple(given["proxy"] or ()),
        read_only=given["read_only"],
        opens=given["open"],
        as_json=given["as_json"],
        socket=_absolute(given["socket"]),
        members=_absolute(given["members"]),
        user_header=given["user_header"],
        proxy_user=given["proxy_user"],
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # Replace this process by the server, which frees the parser's memory.
    folder = Path(config.workspace) / "ui"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chdir(folder)
    os.execv(sys.executable, [sys.executable, "-m", "paceline.ui", config.to_json()])


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())
