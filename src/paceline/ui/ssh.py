"""`paceline ui --ssh HOST`: the server runs beside a workspace elsewhere, and this machine leads its browser there.

One connection of the user's own ssh carries both. On the host the server listens at a socket in a folder that its user alone may
enter, so no port is taken there and no other user of the host can reach it; it ends when the connection does.
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
    """Show the page of a workspace on a host until Ctrl-C; the exit code.

    host: as for ssh. folder: on the host, where `paceline` would be called; default: its user's home. program: how Paceline is
    called there. words: further options for the server there.

    Raises:
        UserError: what is no host, or a port that is taken. TargetError: no ssh, or no server there.
    """
    if not _DESTINATION.fullmatch(host):
        raise UserError(f"--ssh {host!r} is no host. Give what you give to ssh: a name of ~/.ssh/config, or user@host.")
    ssh = shutil.which("ssh")
    if ssh is None:
        raise TargetError(
            "there is no program 'ssh' on this machine's PATH. Install OpenSSH's client (package openssh-client)."
        )
    here = _free_port(port)
    running = subprocess.Popen(
        command(ssh, host, folder, program, here, words, place=secrets.token_hex(8)),
        # Its end is the server's end, whatever becomes of this process.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert running.stdin is not None, "it is a pipe"
    assert running.stdout is not None, "it is a pipe"
    # As Ctrl-C ends it: a terminal that is closed, and who is asked to end.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        token = _token_of(running.stdout)
        if token is None:
            running.wait()
            raise TargetError(
                f"no server has begun on {host}; what ssh has said stands above. There `{program} ui` must be possible: "
                "pip install 'paceline[ui]', and --remote-program where it is not on the PATH of a shell that nobody logs in to."
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
    except KeyboardInterrupt:
        return 0
    finally:
        running.stdin.close()
        try:
            running.wait(5)
        except subprocess.TimeoutExpired:
            running.terminate()


def command(
    ssh: str, host: str, folder: str | None, program: str, port: int, words: Sequence[str], *, place: str
) -> list[str]:
    """The command line of ssh. place: of the socket's folder; nobody can guess it."""
    path = f"/tmp/paceline-ui-{place}/socket"
    # The program's own words are the user's, with `~` and all; ours are quoted.
    asked = f"{program} ui --socket {path} --json {shlex.join(words)}".rstrip()
    there = f"cd {_quoted(folder)} && exec {asked}" if folder else f"exec {asked}"
    options = (
        *("ExitOnForwardFailure=yes", "ControlMaster=no", "ControlPath=none", "RemoteCommand=none", "RequestTTY=no"),
        *("ServerAliveInterval=15", "ServerAliveCountMax=4", "ForwardX11=no", "EscapeChar=none"),
    )
    given = [word for option in options for word in ("-o", option)]
    return [ssh, *given, "-L", f"127.0.0.1:{port}:{path}", "--", host, there]


def _quoted(folder: str) -> str:
    # A shell knows what `~` is only where it is not quoted.
    if folder == "~" or folder.startswith("~/"):
        return "~/" + shlex.quote(folder[2:]) if len(folder) > 2 else "~"
    return shlex.quote(folder)


def _token_of(lines: Iterable[str]) -> str | None:
    """The token in the server's first line; lines before it are a login's greeting."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        token = found.get("token") if isinstance(found, dict) else None
        # It goes into an address that a terminal shows.
        if isinstance(token, str) and _TOKEN.fullmatch(token):
            return token
    return None


def _free_port(port: int | None) -> int:
    """A port of this machine on which nobody listens.

    Raises:
        UserError: the one that was asked for is taken.
    """
    for one in ports(port):
        with contextlib.suppress(OSError), listen_at("127.0.0.1", one, 1) as tried:
            return int(tried.getsockname()[1])
    raise UserError(f"--port {port} is taken on this machine. Take another, or 0 for a free one.")
