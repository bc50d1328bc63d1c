"""SFTP through fsspec and paramiko, with host keys checked against the known hosts.

fsspec's own file system accepts every unknown host key, so it would also connect to an impostor.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from fsspec.implementations.sftp import SFTPFileSystem

from paceline.data.stores.record import StoreRecord

_CONNECT_TIMEOUT_S = 15


class KnownHostsSftp(SFTPFileSystem):  # type: ignore[misc]
    """An SFTP file system that refuses unknown hosts.

    Args:
        host: Name of the server.
        known_hosts: A file of host keys; default: the user's and the system's files.
        options: Other options of fsspec's SFTPFileSystem. The default of `host_key_policy` is "reject".
    """

    # Turn off fsspec's cache, which returns this object and its connection to any caller that has the same options.
    cachable = False

    def __init__(self, host: str, known_hosts: str | None = None, **options: Any) -> None:
        self._known_hosts = known_hosts
        super().__init__(host, **{"host_key_policy": "reject", **options})

    def _connect(self) -> None:
        import paramiko

        self.client = paramiko.SSHClient()
        if self._known_hosts is not None:
            self.client.load_host_keys(os.path.expanduser(self._known_hosts))
        else:
            # Without a path, this call reads the user's ~/.ssh/known_hosts.
            self.client.load_system_host_keys()
            if os.path.exists("/etc/ssh/ssh_known_hosts"):
                self.client.load_system_host_keys("/etc/ssh/ssh_known_hosts")
        self.client.set_missing_host_key_policy(self.host_key_policy)
        try:
            self.client.connect(self.host, **self.ssh_kwargs)
            self.ftp = self.client.open_sftp()
        except BaseException:
            # Close after any error: otherwise paramiko's thread keeps the connection open.
            self.client.close()
            raise


def open_sftp(record: StoreRecord, options: dict[str, Any]) -> KnownHostsSftp:
    """Open a store's SFTP file system. Options: `username`, `port`, `password`, `key_filename`, `known_hosts`."""
    # Remove this option, which is for fsspec's cache: all other options go to paramiko's `connect`, which would refuse it.
    options.pop("skip_instance_cache", None)
    timeouts = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), _CONNECT_TIMEOUT_S)
    settings = {**timeouts, **_from_url(record), **options}
    if "key_filename" in settings:
        settings["key_filename"] = os.path.expanduser(settings["key_filename"])
    if "port" in settings:
        settings["port"] = int(settings["port"])
    # If a password or key is given, try no further keys, because a server disconnects after a few failed attempts.
    if "password" in settings or "key_filename" in settings:
        settings = {"allow_agent": False, "look_for_keys": False, **settings}
    return KnownHostsSftp(settings.pop("host"), **settings)


def walk_sftp(fs: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Yield (path below root, paramiko's attributes) of each file, following links without cycles."""
    waiting: list[tuple[str, tuple[str, ...]]] = [("", (fs.ftp.normalize(root),))]
    while waiting:
        folder, above = waiting.pop()
        for entry in fs.ftp.listdir_attr(f"{root}/{folder}".rstrip("/") or "/"):
            path = f"{folder}/{entry.filename}" if folder else entry.filename
            full, target = f"{root}/{path}", entry
            # SFTP listings describe a link itself, so stat the link's target.
            if stat.S_ISLNK(entry.st_mode or 0):
                try:
                    target = fs.ftp.stat(full)
                except FileNotFoundError:
                    continue
            if stat.S_ISDIR(target.st_mode or 0):
                real = fs.ftp.normalize(full)
                if real not in above:
                    waiting.append((path, (*above, real)))
            elif stat.S_ISREG(target.st_mode or 0):
                yield path, target


def _from_url(record: StoreRecord) -> dict[str, object]:
    parts = urlsplit(record.url)
    optional = {"port": parts.port, "username": unquote(parts.username or "")}
    return {"host": parts.hostname or "", **{name: value for name, value in optional.items() if value}}
