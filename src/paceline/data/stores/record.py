"""Records of registered datastores: URL, options and places of credentials, no secrets.

    <workspace>/datastores/<name>.json     {"url": ..., "options": {...}, "credentials": {"secret": "env:LAB_SECRET"}}
    <workspace>/datastores/.default        the name of the default store, unless it is "default"

The store "default" exists without registration: the folder `<workspace>/data`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import DataError
from paceline.system.files import write_whole
from paceline.system.names import did_you_mean, name_rule
from paceline.system.registry import Documents

DEFAULT_NAME = "default"
_NAME = name_rule("_-", 255)

#: URL scheme -> kind of store.
KINDS = {
    **{"file": "local", "local": "local", "s3": "s3", "s3a": "s3"},
    **{"az": "azure", "abfs": "azure", "abfss": "azure", "gs": "gcs", "gcs": "gcs"},
    **{"sftp": "sftp", "ssh": "sftp", "http": "http", "https": "http", "memory": "memory"},
}


@dataclass(frozen=True, kw_only=True)
class StoreRecord:
    """A datastore's URL, options and places of credentials.

    Attributes:
        name: Name of the registered store. None for a URL or path that is not registered.
        url: A URL, or the absolute path of a local folder.
        options: Options of the store's fsspec file system.
        credentials: Maps an option to a place ("env:...", "keyring:...", "file:..."). None: the library's own search.
    """

    name: str | None
    url: str
    options: Mapping[str, object] = field(default_factory=dict)
    credentials: Mapping[str, str] | None = None

    @property
    def kind(self) -> str:
        """The datastore's kind: "local", "s3", "azure", "gcs", "sftp", "http" or "memory".

        Raises:
            DataError: The scheme of the URL is unknown.
        """
        if self.url.startswith("/"):
            return "local"
        scheme = self.url.partition("://")[0].lower()
        if "://" not in self.url or scheme not in KINDS:
            raise DataError(
                f"the URL {self.url!r} is of no kind that is known. Give an absolute path of this machine, or a URL that "
                f"begins with {', '.join(f'{scheme}://' for scheme in KINDS)}."
            )
        return KINDS[scheme]

    @property
    def root(self) -> str:
        """The prefix of every path in the datastore, without a trailing `/`.

        The prefix is bucket and folder for "s3", "azure" and "gcs", the whole URL for "http", else an absolute folder.
        """
        if self.kind == "http" or self.url.startswith("/"):
            return self.url.rstrip("/")
        # Don't split off a fragment: the key of an object may contain a "#".
        parts = urlsplit(self.url, allow_fragments=False)
        host = parts.netloc.rpartition("@")[2]
        if self.kind in ("s3", "gcs"):
            return f"{host}{parts.path}".rstrip("/")
        if self.kind == "azure":
            # The URL is abfs://container@account.dfs.core.windows.net/path or az://container/path.
            return f"{parts.username or host}{parts.path}".rstrip("/")
        if self.kind == "memory":
            return f"/{host}{parts.path}".rstrip("/")
        return parts.path.rstrip("/")

    @property
    def title(self) -> str:
        """The datastore's name and URL for messages; an unregistered datastore has no name."""
        return f"datastore {self.name!r} ({self.url})" if self.name is not None else repr(self.url)

    @property
    def identity(self) -> str:
        """A string that identifies the datastore in cache keys."""
        # Include the options: a bucket of the same name at another endpoint holds other files.
        return json.dumps([self.kind, self.url.rstrip("/"), self.options], sort_keys=True, default=str)

    def to_json(self) -> dict[str, object]:
        """Return the datastore's JSON form, with places of credentials and no secrets."""
        credentials = dict(self.credentials) if self.credentials else None
        return {"url": self.url, "options": dict(self.options), "credentials": credentials}

    @classmethod
    def from_json(cls, name: str | None, data: Mapping[str, Any]) -> StoreRecord:
        """Create a datastore's record from its name and JSON form."""
        return cls(name=name, url=data["url"], options=data.get("options") or {}, credentials=data.get("credentials"))


def check_store_name(name: str) -> str:
    """Return a datastore's name, or raise DataError if it breaks the naming rule."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DataError(
            f"the datastore name {name!r}: give letters, digits, '_' and '-', beginning with a letter or a digit."
        )
    return name


def read_record(workspace_dir: Path, name: str) -> StoreRecord:
    """Return the record of a registered datastore.

    Raises:
        DataError: The record does not exist or can't be read; the message lists the known stores.
    """
    registry = _registry(workspace_dir)
    data, path = registry.read(check_store_name(name)), registry.path(name)
    if isinstance(data, dict) and isinstance(data.get("url"), str):
        return StoreRecord.from_json(name, data)
    if path.exists():
        raise DataError(f"{str(path)!r} can't be read as a datastore. Register {name!r} again, with overwrite=True.")
    if name == DEFAULT_NAME:
        return StoreRecord(name=name, url=str(workspace_dir / "data"))
    known = list(record_names(workspace_dir))
    raise DataError(
        f"there is no datastore {name!r} in the workspace {str(workspace_dir)!r}.{did_you_mean(name, known)} There are: "
        f"{', '.join(known)}. Register it with `paceline data add {name} URL`."
    )


def is_registered(workspace_dir: Path, name: str) -> bool:
    """Return whether a datastore's record file exists, readable or not."""
    return _registry(workspace_dir).path(check_store_name(name)).exists()


def write_record(workspace_dir: Path, record: StoreRecord) -> None:
    """Register a datastore, replacing a datastore of the same name."""
    registry = _registry(workspace_dir)
    try:
        registry.put(check_store_name(str(record.name)), record.to_json())
    except OSError as error:
        raise DataError(
            f"datastore {record.name!r} can't be registered in {str(registry.folder)!r}: {error.strerror}. Fix that."
        ) from error


def remove_record(workspace_dir: Path, name: str) -> None:
    """Remove the datastore's registration. The files stay in place."""
    # Call `read_record` because it raises an error if the store does not exist.
    read_record(workspace_dir, name)
    # Remove the file `.default` first, so that it never names a missing store.
    if default_name(workspace_dir) == name:
        _default_path(workspace_dir).unlink(missing_ok=True)
    _registry(workspace_dir).remove(name)


def record_names(workspace_dir: Path) -> list[str]:
    """Return the names of the workspace's datastores, sorted. "default" is always included."""
    return sorted({DEFAULT_NAME, *_registry(workspace_dir).names()})


def default_name(workspace_dir: Path) -> str:
    """Return the name of the workspace's default datastore."""
    try:
        name = _default_path(workspace_dir).read_text().strip()
    except OSError:
        return DEFAULT_NAME
    return name if _NAME.fullmatch(name) else DEFAULT_NAME


def set_default(workspace_dir: Path, name: str) -> None:
    """Make this datastore the workspace's default datastore."""
    read_record(workspace_dir, name)
    path = _default_path(workspace_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, name + "\n")


def _registry(workspace_dir: Path) -> Documents:
    return Documents(workspace_dir / "datastores", _NAME)


def _default_path(workspace_dir: Path) -> Path:
    return _registry(workspace_dir).folder / ".default"
