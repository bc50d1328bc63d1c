"""`paceline ui --ssh HOST`: run the server on another host, and forward a port to it.

One ssh connection starts the server and forwards the browser's requests. The server listens at a Unix socket in a
private folder, so no other user of the host can reach the server. The server ends with the connection.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence

from paceline.errors import TargetError, UserError
from paceline.system.listening import listen_at
from paceline.ui.config import ports

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")
_DESTINATION = re.compile(r"[^\s-][^\s]*")


def watch(host: str, folder: str | None, program: str, port: int | None, words: Sequence[str], *, opens: bool) -> int:
    """Show a workspace's page from another host until Ctrl-C. Return the exit code.

    host: The destination for ssh. folder: Working directory on the host; by default the user's home. program: The command
    `paceline` on the host. words: Further options of the remote server.

    Raises:
        UserError: The host's name is invalid, or the port is taken.
        TargetError: This machine has no ssh, or the remote server does not start.
    """
    if not _DESTINATION.fullmatch(host):
        raise UserError(f"--ssh {host!r} must be a host as ssh takes it: a name of ~/.ssh/config, or user@host.")
    ssh = shutil.which("ssh")
    if ssh is None:
        raise TargetError("there is no program 'ssh' on this machine's PATH. Install the package openssh-client.")
    here = _free_port(port)
    running = subprocess.Popen(
        command(ssh, host, folder, program, here, words, place=secrets.token_hex(8)),
        # The remote server ends when this pipe closes, which happens at any end of this process.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert running.stdin is not None, "it is a pipe"
    assert running.stdout is not None, "it is a pipe"
    # End ssh at SIGTERM and when the terminal closes, because a local server ends in these cases, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        token = _token_of(running.stdout)
        if token is None:
            running.wait()
            raise TargetError(
                f"no server started on {host}; the lines above are ssh's. `{program} ui` must work there: "
                "pip install 'paceline[ui]', and give --remote-program if it is not on the PATH of a non-login shell."
            )
        address = f"http://127.0.0.1:{here}/?token={token}"
        print(f"The page of {host}{':' + folder if folder else ''}:\n\n    {address}\n", flush=True)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        if opens:
            import webbrowser

            webbrowser.open(address)
        code = running.wait()
        print(f"paceline: the connection to {host} has ended (ssh exited with {code}).", file=sys.stderr)
        return 1
    finally:
        running.stdin.close()
        try:
            running.wait(5)
        except subprocess.TimeoutExpired:
            running.terminate()


def command(
    ssh: str, host: str, folder: str | None, program: str, port: int, words: Sequence[str], *, place: str
) -> list[str]:
    """Return the ssh command that starts the server and forwards `port` to it.

    port: The local port. place: A random text. The server listens at the Unix socket /tmp/paceline-ui-<place>/socket.
    """
    path = f"/tmp/paceline-ui-{place}/socket"
    # Insert the user's command without quotes, so that the shell expands `~`. Quote the arguments that Paceline adds.
    asked = f"{program} ui --socket {path} --json {shlex.join(words)}".rstrip()
    there = f"cd {_quoted(folder)} && exec {asked}" if folder else f"exec {asked}"
    options = (
        *("ExitOnForwardFailure=yes", "ControlMaster=no", "ControlPath=none", "RemoteCommand=none", "RequestTTY=no"),
        *("ServerAliveInterval=15", "ServerAliveCountMax=4", "ForwardX11=no", "EscapeChar=none"),
    )
    given = [word for option in options for word in ("-o", option)]
    return [ssh, *given, "-L", f"127.0.0.1:{port}:{path}", "--", host, there]


def _quoted(folder: str) -> str:
    # Leave `~` without quotes, because a shell expands it only there.
    if folder == "~" or folder.startswith("~/"):
        return "~/" + shlex.quote(folder[2:]) if len(folder) > 2 else "~"
    return shlex.quote(folder)


def _token_of(lines: Iterable[str]) -> str | None:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        token = found.get("token") if isinstance(found, dict) else None
        # Check the token's characters, because the token becomes part of a URL that is shown in a terminal.
        if isinstance(token, str) and _TOKEN.fullmatch(token):
            return token
    return None


def _free_port(port: int | None) -> int:
    for one in ports(port):
        with contextlib.suppress(OSError), listen_at("127.0.0.1", one, 1) as tried:
            return int(tried.getsockname()[1])
    raise UserError(f"--port {port} is taken on this machine. Take another, or 0 for a free one.")
