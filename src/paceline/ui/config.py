"""Configuration of the page's server: workspace, address and access."""

from __future__ import annotations

import json
import os
import pwd
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.system.listening import is_loopback

#: Default port of the server: 7223 is P-A-C-E on a telephone's keys. If the port is in use, the server tries the next ports.
PORT = 7223
#: A client that connects through a Unix socket has the address ("unix", user id of the client's process).
UNIX = "unix"
#: Number of ports to try if the user has not chosen a port.
_TRIED = 40
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,99}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class UiConfig:
    """Settings of the page's server.

    Attributes:
        port: The port; 0 for any free port, None for the first free port from the default `PORT` on.
        proxies: Host names of a proxy that handles TLS for this server.
        read_only: Whether the page shows the workspace, but offers no changes.
        opens: Whether to open the page in this machine's browser.
        socket: Path of a Unix socket to listen at instead of a port. Without `members`, the server ends at EOF on stdin.
        members: Path of the file with the members' roles.
        user_header: HTTP header in which the proxy names the visitor. The proxy runs as user `proxy_user`.

    Raises:
        UserError: A setting is invalid, or other machines could reach the server without TLS.
    """

    workspace: str
    host: str = "127.0.0.1"
    port: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    proxies: tuple[str, ...] = ()
    read_only: bool = False
    opens: bool = False
    as_json: bool = False
    socket: str | None = None
    members: str | None = None
    user_header: str | None = None
    proxy_user: str | None = None

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= 65535:
            raise UserError(f"--port {self.port}: a port must be from 0 to 65535; 0 takes a free one.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("--tls-cert and --tls-key go together: a certificate and its key, both PEM.")
        for option, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            if path is not None and not Path(path).is_file():
                raise UserError(f"{option} {path!r}: the file does not exist. Name a PEM file.")
        for name in self.proxies:
            if not _HOST_NAME.fullmatch(name):
                raise UserError(f"--proxy {name!r} must be a host name, without https:// and port: hub.example.org.")
        if not is_loopback(self.host) and self.tls_cert is None and not self.proxies:
            raise UserError(
                f"--host {self.host!r} needs TLS: other machines can reach it, and could read the token. "
                "Give --tls-cert and --tls-key, or --proxy NAME if a proxy in front does TLS. "
                "To see the page from another machine, call `paceline ui --ssh HOST` there."
            )
        if (self.user_header or self.proxy_user) and not (self.members and self.socket and self.user_header):
            raise UserError(
                "--user-header NAME and --proxy-user USER go with --members FILE and --socket PATH: at a port, any user of this "
                "machine could send the header."
            )
        if self.user_header and not _HEADER.fullmatch(self.user_header):
            raise UserError(f"--user-header {self.user_header!r} must be a header's name, such as X-Forwarded-Email.")
        self.proxy_uid  # noqa: B018 - the user must exist

    @property
    def proxy_uid(self) -> int:
        """Return the uid of the proxy's user, by default the server's own uid."""
        if self.proxy_user is None:
            return os.geteuid()
        try:
            return int(self.proxy_user) if self.proxy_user.isdecimal() else pwd.getpwnam(self.proxy_user).pw_uid
        except KeyError:
            raise UserError(f"--proxy-user {self.proxy_user!r}: this machine has no such user.") from None

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def host_names(self) -> frozenset[str]:
        """Return the host names that requests may name, in lower case, without port."""
        own = {"127.0.0.1", "localhost", "[::1]", *self.proxies}
        # Requests can't name a server by an address for all interfaces. With such an address, TLS verifies the name.
        if self.host not in ("", "0.0.0.0", "::"):
            own.add(f"[{self.host}]" if ":" in self.host else self.host)
        return frozenset(name.lower() for name in own)

    @property
    def takes_any_host(self) -> bool:
        """Return whether requests may have any Host header (only with TLS)."""
        return self.host in ("", "0.0.0.0", "::") and self.tls_cert is not None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> UiConfig:
        data = json.loads(text)
        return cls(**{**data, "proxies": tuple(data["proxies"])})


def ports(asked: int | None) -> list[int]:
    """Return the ports to try, in order; 0 means any free port."""
    return [asked] if asked is not None else [*range(PORT, PORT + _TRIED), 0]
