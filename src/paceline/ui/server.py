"""The server of the live page: its socket, its application and its printed link."""

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
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from paceline.errors import UserError
from paceline.runs.page_address import announce
from paceline.system.files import make_own
from paceline.system.listening import listen_at
from paceline.ui import render
from paceline.ui.app import make_app
from paceline.ui.config import UNIX, UiConfig, ports
from paceline.ui.guard import Token

#: Seconds for which requests may continue when the server shuts down.
_GRACE_S = 1


class _Server(uvicorn.Server):
    """A uvicorn server that exits normally after a signal."""

    closing: asyncio.Event
    exit_code = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        # A service manager stops a server by SIGTERM, so exit with 0. After Ctrl-C, exit with 130, as other commands do.
        self.exit_code = 128 + sig if sig == signal.SIGINT else self.exit_code
        self.closing.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # do nothing, because `serve` has already set the signal handlers


class _PeerProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """An HTTP protocol over a Unix socket that reports the peer's uid as client address."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Use a duplicate of the socket, because the event loop's socket object may lack getsockopt.
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as copy:
            peer = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # three 32-bit numbers: pid, uid, gid
            self.client = (UNIX, int.from_bytes(peer[4:8], sys.byteorder))


def serve(config: UiConfig) -> int:
    """Run the page's server until a signal. Return the exit code.

    Raises:
        UserError: The port is taken, or the members file has an error.
        WorkspaceError: The token can't be written.
    """
    token = Token(Path(config.workspace))
    app = make_app(config, token)
    listener = _listen(config)
    port = 0 if config.socket else listener.getsockname()[1]
    server = _Server(
        uvicorn.Config(
            app,
            http=_PeerProtocol if config.members and config.socket else "auto",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            # Ignore headers in which a proxy reports the client's address, because the server does not use that address.
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
    )
    server.closing = app.state.closing
    # Set the handlers before the address is printed, so that Ctrl-C then always leads to exit code 130.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, server.handle_exit)
    if not config.socket:
        # `announce` locks the file until this process ends. Readers ignore the address in an unlocked file.
        announce(Path(config.workspace), address(config, port))
    _say(config, token, port)
    if config.socket and not config.members:
        # If ssh has started this server, only the end of standard input shows that ssh has ended. Then end the server, too.
        threading.Thread(target=_end_with_input, daemon=True).start()
    # Let threads take turns every 0.5 ms. By default, a thread that reads a long log delays each network packet by 5 ms.
    sys.setswitchinterval(0.0005)
    threading.Thread(target=render.compile_templates, daemon=True).start()
    # Exclude all present objects, mainly those of imported modules, from garbage collection.
    gc.freeze()
    try:
        server.run(sockets=[listener])
    finally:
        if config.socket:
            with contextlib.suppress(OSError):
                os.unlink(config.socket)
                if not config.members:
                    os.rmdir(os.path.dirname(config.socket))
    return server.exit_code


def link(config: UiConfig, token: Token, port: int) -> str:
    """Return the URL of the web page, with its access token."""
    return f"{address(config, port)}/?token={token.text}"


def address(config: UiConfig, port: int) -> str:
    """Return the URL of the web page, without its access token."""
    host = config.host if config.host not in ("", "0.0.0.0", "::") else socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"{config.scheme}://{host}:{port}"


def _say(config: UiConfig, token: Token, port: int) -> None:
    if config.as_json:
        url = "" if config.socket else link(config, token, port)
        print(json.dumps({"url": url, "port": port, "token": token.text, "pid": os.getpid()}), flush=True)
        return
    if config.socket and config.members:
        after = "at http://127.0.0.1:7223 after"
        words = [f"ssh -N -L 7223:{config.socket} {socket.gethostname()}"]
        if config.user_header:
            after, words = f"for the proxy at {config.socket}:", [f"https://{name}/..." for name in config.proxies]
            words = words or ["http://127.0.0.1:PORT/..., at the proxy's PORT. --proxy NAME allows another host name"]
        print(f"The page of {config.workspace}, {after}", *words, sep="\n\n    ", end="\n\n", flush=True)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        return
    address = link(config, token, port)
    print(f"The page of {config.workspace}:\n\n    {address}\n", flush=True)
    for name in config.proxies:
        print(f"    behind the proxy: https://{name}/...?token={token.text}\n", flush=True)
    print("Ctrl-C ends it. Who has this link can see and end runs; keep it to yourself.", file=sys.stderr, flush=True)
    if config.opens:
        import webbrowser

        # Open the browser in a thread, because some browsers block until they are closed.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _listen(config: UiConfig) -> socket.socket:
    if config.socket:
        return _listen_at(config.socket, for_members=bool(config.members))
    tried = ports(config.port)
    for port in tried:
        try:
            return listen_at(config.host, port, 512)
        except OSError as error:
            # This error also means that the machine does not support the address's family, such as ::1 on a machine without IPv6.
            if isinstance(error, socket.gaierror) or error.errno == errno.EAFNOSUPPORT:
                raise UserError(
                    f"--host {config.host!r} must be an address of this machine: {error.strerror or error}."
                ) from error
            if port == tried[-1]:
                raise UserError(
                    f"can't listen at --host {config.host!r}, --port {port}: {error.strerror or error}. Choose another port, or "
                    "0 for a free one."
                ) from error
    raise AssertionError("the last port is either taken or refused")


def _listen_at(path: str, *, for_members: bool) -> socket.socket:
    """Return a Unix socket at `path`, for this user or for all members."""
    folder = Path(path).parent
    try:
        if for_members:
            folder.mkdir(mode=0o755, exist_ok=True)
            found = os.stat(folder)
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                raise PermissionError(
                    "others could put a server there. Take a folder of yours, and call chmod go-w on it"
                )
        else:
            make_own(folder)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                with contextlib.suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as other:
                    other.connect(path)
                    raise FileExistsError("another server listens there. End it, or name another --socket")
                os.unlink(path)
        made = socket.socket(socket.AF_UNIX)
        made.bind(path)
        if for_members:
            os.chmod(path, 0o666)  # all users may connect, but the server refuses users that are not members
        made.listen(512)
    except OSError as error:
        raise UserError(f"can't listen at the socket {path!r}: {error}.") from error
    return made


def _end_with_input() -> None:
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.read(4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
