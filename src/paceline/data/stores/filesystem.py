"""Open stores as fsspec file systems, with their registered options and credentials.

fsspec is imported only when a store other than a local folder is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.data.stores.credentials import Secrets, hidden_url, resolve
from paceline.data.stores.failures import cause_of, translated
from paceline.data.stores.record import StoreRecord, read_record
from paceline.errors import DataError
from paceline.job.data_reference import Source

#: Kind of store -> (fsspec protocol, required module, extra of Paceline that installs the module)
_ENGINES = {
    "s3": ("s3", "s3fs", "s3"),
    "azure": ("abfs", "adlfs", "azure"),
    "gcs": ("gs", "gcsfs", "gcs"),
    "sftp": ("sftp", "paramiko", "sftp"),
    "http": ("http", "aiohttp", "http"),
    "memory": ("memory", "fsspec", ""),
}
_CONNECT_TIMEOUT_S = 15
_READ_TIMEOUT_S = 60


class Store:
    """An open datastore or URL. Do not pickle it or share it between processes."""

    def __init__(self, record: StoreRecord) -> None:
        self.record = record
        self.kind = record.kind
        check_installed(record)
        self.secrets: Secrets = resolve(record.credentials, record.title)
        self._fs: Any = None

    def __repr__(self) -> str:
        return f"Store({self.record.title})"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def title(self) -> str:
        return self.record.title

    def full(self, path: str) -> str:
        """Return the full path that fsspec takes for a path in the store."""
        root = self.record.root
        if self.kind != "http":
            path = path.strip("/")
        elif self.record.name is not None:
            # Percent-encode the path, which is a plain name in a datastore. A URL without a datastore is encoded already.
            path = quote(path)
        return f"{root}/{path}" if path else (root or "/")

    def local(self, path: str) -> Path:
        """Return the local path of a path in a store of kind "local"."""
        return Path(self.record.root or "/", path.strip("/"))

    @property
    def fs(self) -> Any:
        """The fsspec file system through which Paceline uses the store.

        Raises:
            TransferError: The store can't be reached, or refuses the credentials.
        """
        if self._fs is None:
            with self.translating("opening it"):
                self._fs = self._open()
        return self._fs

    @contextlib.contextmanager
    def translating(self, what: str) -> Iterator[None]:
        """Translate library errors of the `with` block. what: the action, such as "reading 'a.bin'"."""
        try:
            yield
        except Exception as error:
            own_error = translated(error, self.record, self.secrets, what)
            if own_error is error:
                raise
            raise own_error from error

    def close(self) -> None:
        """Close the store's connections that would stay open until the process ends."""
        client = getattr(self._fs, "client", None)
        if self.kind == "sftp" and client is not None:
            client.close()
        self._fs = None

    def _open(self) -> Any:
        import fsspec

        options: dict[str, Any] = {**self.record.options, **self.secrets.options(), "skip_instance_cache": True}
        # Set `skip_instance_cache`: otherwise fsspec keeps each file system with its secrets for the life of the process, and
        # returns it to any caller with equal options.
        if self.kind == "local":
            return fsspec.filesystem("file")
        if self.kind == "s3":
            config = {
                "connect_timeout": _CONNECT_TIMEOUT_S,
                "read_timeout": _READ_TIMEOUT_S,
                "retries": {"max_attempts": 1},
            }
            fs = fsspec.filesystem("s3", **{**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}})
            # Paceline's own code retries, because it knows which bytes have arrived. The nested retry loops of botocore and s3fs
            # would try to reach a dead store for minutes.
            fs.retries = 2
            return fs
        if self.kind == "http":
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S)
            client_options = options.pop("client_kwargs", {})
            # Copy the headers: the token is added to them below, and must not get into the record's headers.
            headers = dict(client_options.get("headers", {}))
            options |= {"client_kwargs": {"timeout": timeout, **client_options, "headers": headers}}
            # fsspec's HTTP has no option for a user or token, so pass them to aiohttp, which fsspec uses.
            user, password = options.pop("username", None), options.pop("password", None)
            if password is not None:
                options["client_kwargs"]["auth"] = aiohttp.BasicAuth(user or "", password)
            if token := options.pop("token", None):
                headers["Authorization"] = f"Bearer {token}"
        if self.kind == "sftp":
            from paceline.data.stores.sftp import open_sftp

            return open_sftp(self.record, options)
        if self.kind == "gcs":
            return _open_gcs(options)
        # adlfs needs the account as an option of its own. In the URL, the host begins with the account.
        if self.kind == "azure" and "@" in self.record.url and "account_name" not in options:
            options["account_name"] = self.record.url.partition("@")[2].partition(".")[0]
        fs = fsspec.filesystem(_ENGINES[self.kind][0], **options)
        if self.kind == "azure":
            # As for S3, retry once only. The library would wait for minutes before it reports a dead host.
            policy = fs.service_client._config.retry_policy
            policy.total_retries, policy.initial_backoff, policy.random_jitter_range = 1, 1, 1
        return fs


def _open_gcs(options: dict[str, Any]) -> Any:
    """Open Google Cloud Storage or an emulator (`endpoint_url`, STORAGE_EMULATOR_HOST)."""
    import aiohttp
    import gcsfs

    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint and not endpoint.startswith("https://"):
        options.setdefault("token", "anon")  # without TLS it is an emulator, which must not get credentials of Google
    # gcsfs's default class asks a gRPC service for the bucket's type, which refuses users without credentials.
    base: Any = gcsfs.core.GCSFileSystem if options.get("token") == "anon" else gcsfs.GCSFileSystem

    class FileSystem(base):  # type: ignore[misc]
        async def _request(self, *args: Any, **keywords: Any) -> Any:
            # As for S3, retry once only. gcsfs's decorator retries for half a minute, and logs a traceback.
            request = gcsfs.core.GCSFileSystem._request.__wrapped__
            try:
                return await request(self, *args, **keywords)
            except Exception as error:
                if cause_of(error) != "transient":
                    raise
                await asyncio.sleep(1)
                return await request(self, *args, **keywords)

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S)
    return FileSystem(**{"requests_timeout": timeout, **options})


def place_of(source: Source, workspace_dir: Path) -> tuple[StoreRecord, str]:
    """Return the store that contains a data source, and the path in it.

    For an absolute path, the store is the folder `/`; for a URL, it is the URL's host or bucket.

    Raises:
        DataError: The datastore does not exist, the path is neither a URL nor absolute, or the URL has a password.
    """
    if source.datastore is not None:
        return read_record(workspace_dir, source.datastore), source.path
    path = source.path.removeprefix("file://")
    if path.startswith("/"):
        return StoreRecord(name=None, url="/"), path.lstrip("/")
    if "://" not in path:
        raise DataError(f"{path!r} must be a URL, an absolute path, or a path in a datastore: ds.path(...).")
    # Refuse only a URL with a password: a presigned URL may keep its parameters, although these contain a signature.
    if hidden_url(path) != path and "***@" in hidden_url(path):
        raise DataError(
            f"the URL {hidden_url(path)!r} has a password in it. Register a datastore, and say in credentials= where the "
            "password is found."
        )
    scheme, _, rest = path.partition("://")
    host, _, inside = rest.partition("/")
    record = StoreRecord(name=None, url=f"{scheme}://{host}")
    # Reading the property `kind` raises an error for an unknown scheme.
    assert record.kind
    return record, inside


def check_installed(record: StoreRecord) -> None:
    """Raise DataError if the store's library is not installed."""
    if record.kind not in _ENGINES:
        return
    _, module, extra = _ENGINES[record.kind]
    if importlib.util.find_spec(module) is None:
        raise DataError(
            f"{record.title} needs {module}, which is not installed. Install it with `pip install 'paceline[{extra}]'`."
        )


def working_path(path: str | os.PathLike[str]) -> Path:
    """Return a user's path as an absolute path, with `~` expanded."""
    return Path(os.path.abspath(os.path.expanduser(path)))
