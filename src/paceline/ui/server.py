"""The server: a socket, the application on it, and the link that is printed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn

from paceline.errors import UserError
from paceline.runs.page_address import announce
from paceline.system.files import make_own
from paceline.system.listening import listen_at
from paceline.ui.app import make_app
from paceline.ui.config import UiConfig, ports
from paceline.ui.guard import Token

#: Streams have no end of their own; what else goes on at the end has so long.
_GRACE_S = 1


class _Server(uvicorn.Server):
    """Ends at a signal, and then as this program's own end: uvicorn would send itself the signal a second time."""

    closing: asyncio.Event

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.closing.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.handle_exit)
        yield


def serve(config: UiConfig) -> int:
    """Serve until a signal says to end; the exit code.

    Raises:
        UserError: the port is taken. WorkspaceError: the token can't be written.
    """
    token = Token(Path(config.workspace))
    app = make_app(config, token)
    listener = _listen(config)
    port = 0 if config.socket else listener.getsockname()[1]
    server = _Server(
        uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            # Who a request comes from is never asked, so a proxy's word on it is not needed.
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
    )
    server.closing = app.state.closing
    if not config.socket:
        # Held, and never closed, until this process ends.
        announce(Path(config.workspace), address(config, port))
    _say(config, token, port)
    if config.socket:
        # Started through ssh: its end is seen by nothing else than this.
        threading.Thread(target=_end_with_input, daemon=True).start()
    # While a long log is read on a thread, the loop must not wait five milliseconds for each packet that it sends.
    sys.setswitchinterval(0.0005)
    # What was imported stays; looking through it again and again takes time and touches memory.
    gc.freeze()
    try:
        server.run(sockets=[listener])
    finally:
        if config.socket:
            with contextlib.suppress(OSError):
                os.unlink(config.socket)
                os.rmdir(os.path.dirname(config.socket))
    return 0


def link(config: UiConfig, token: Token, port: int) -> str:
    """The address with the token in it."""
    return f"{address(config, port)}/?token={token.text}"


def address(config: UiConfig, port: int) -> str:
    """Where the page is."""
    host = config.host if config.host not in ("", "0.0.0.0", "::") else socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"{config.scheme}://{host}:{port}"


def _say(config: UiConfig, token: Token, port: int) -> None:
    if config.as_json:
        url = "" if config.socket else link(config, token, port)
        print(json.dumps({"url": url, "port": port, "token": token.text, "pid": os.getpid()}), flush=True)
        return
    address = link(config, token, port)
    print(f"The page of {config.workspace}:\n\n    {address}\n", flush=True)
    for name in config.proxies:
        print(f"    behind the proxy: https://{name}/...?token={token.text}\n", flush=True)
    print("Ctrl-C ends it. Who has this link can see and end runs; keep it to yourself.", file=sys.stderr, flush=True)
    if config.opens:
        import webbrowser

        # In a thread: some browsers do not come back before they are closed.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _listen(config: UiConfig) -> socket.socket:
    if config.socket:
        return _listen_at(config.socket)
    tried = ports(config.port)
    for port in tried:
        try:
            return listen_at(config.host, port, 512)
        except OSError as error:
            # Also an address of a kind that this machine has not, such as ::1 where there is no IPv6.
            if isinstance(error, socket.gaierror) or error.errno == errno.EAFNOSUPPORT:
                raise UserError(
                    f"--host {config.host!r} is no address of this machine: {error.strerror or error}."
                ) from error
            if port == tried[-1]:
                raise UserError(
                    f"can't listen at --host {config.host!r}, --port {port}: {error.strerror or error}. Take another port, or 0 "
                    "for a free one."
                ) from error
    raise AssertionError("the last port is either taken or refused")


def _listen_at(path: str) -> socket.socket:
    """A socket of the file system, in a folder for this user alone: nobody else on the host can reach it."""
    folder = Path(path).parent
    try:
        make_own(folder)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        made = socket.socket(socket.AF_UNIX)
        made.bind(path)
        made.listen(512)
    except OSError as error:
        raise UserError(f"can't listen at the socket {path!r}: {error}.") from error
    return made


def _end_with_input() -> None:
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.read(4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
