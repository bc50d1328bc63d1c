"""Datastores: named file stores of a workspace, with the Azure SDK's methods."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.stores import record as records
from paceline.data.stores.credentials import check_credentials, check_no_secrets, hidden_url
from paceline.data.stores.filesystem import Store, check_installed, working_path
from paceline.data.stores.names import clean_path
from paceline.data.stores.record import StoreRecord
from paceline.data.transfer.cache import DataCache
from paceline.data.transfer.listing import FileInfo, list_files
from paceline.data.transfer.progress import terminal_bar
from paceline.data.transfer.transfer import download_files
from paceline.data.transfer.upload import files_below, put_files
from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source

if TYPE_CHECKING:
    from paceline.workspace import Workspace

#: The Azure SDK's name of each kind of store.
_AZURE_TYPES = {"azure": "AzureBlob", "local": "Local", "s3": "S3", "gcs": "GCS", "sftp": "SFTP", "http": "HTTP"}

__all__ = ["DataCache", "Datastore"]


class Datastore:
    """A picklable handle on a registered datastore (folder, bucket or server).

    Args:
        workspace: Workspace that the datastore is registered in.
        name: Name of the datastore. Default: the workspace's default datastore.

    Raises:
        DataError: The store does not exist; the message lists the stores that exist.

    Examples:
        >>> store = pl.Datastore.get_default(pl.Workspace("my_runs"))
        >>> reference = store.upload_files(["iris.csv"], target_path="tables")
        >>> [file.path for file in store.files("tables")]
        ['tables/iris.csv']
    """

    def __init__(self, workspace: Workspace, name: str | None = None) -> None:
        self._workspace = workspace
        self._dir = _workspace_dir(workspace)
        self._record = records.read_record(self._dir, name if name is not None else records.default_name(self._dir))

    @staticmethod
    def register(
        workspace: Workspace,
        name: str,
        url: str | os.PathLike[str],
        *,
        options: Mapping[str, object] | None = None,
        credentials: Mapping[str, str] | None = None,
        default: bool = False,
        overwrite: bool = False,
    ) -> Datastore:
        """Register a datastore in the workspace.

        Args:
            workspace: Workspace that gets the datastore.
            name: Name of the datastore.
            url: A local folder, or s3://bucket/prefix, abfs://container@account.dfs.core.windows.net/prefix,
                gs://bucket/prefix, sftp://user@host:port/folder, https://host/folder, memory://name.
            options: Options of the store's fsspec file system, such as {"endpoint_url": "http://..."}; no secrets.
            credentials: Maps an option to a place, such as {"secret": "env:LAB_SECRET"}. None: the store's library
                searches its usual places (AWS_* variables, ~/.aws, ...).
            default: Make it the default store.
            overwrite: Replace a store of this name.

        Raises:
            DataError: A value is invalid or holds a secret, the store exists already, or an extra of Paceline is not installed.
        """
        folder = _workspace_dir(workspace)
        records.check_store_name(name)
        if not isinstance(url, (str, os.PathLike)):
            raise DataError(f"url={url!r} of datastore {name!r} must be a URL or a path, such as 's3://bucket/prefix'.")
        for what, value in (("options", options), ("credentials", credentials)):
            if value is not None and not isinstance(value, Mapping):
                raise DataError(
                    f"{what}={value!r} of datastore {name!r} is not a dict, such as {{'secret': 'env:LAB_SECRET'}}."
                )
        _check_bool(default=default, overwrite=overwrite)
        settings = dict(options or {})
        # Check the user's text for secrets: `_checked_url` below turns a text that is no URL into an absolute path.
        check_no_secrets(os.fspath(url), settings)
        text = _checked_url(name, os.fspath(url))
        record = StoreRecord(
            name=name, url=text, options=_plain(settings, name), credentials=dict(credentials) if credentials else None
        )
        check_credentials(credentials, record.title)
        check_installed(record)
        if not overwrite and records.is_registered(folder, name):
            raise DataError(
                f"datastore {name!r} is registered already. Give another name, or overwrite=True (--overwrite) to replace it."
            )
        # Write the record last, so that a refused registration leaves no record.
        records.write_record(folder, record)
        if default:
            records.set_default(folder, name)
        return Datastore(workspace, name)

    @staticmethod
    def get(workspace: Workspace, name: str) -> Datastore:
        """Return the datastore of this name.

        Args:
            workspace: Workspace that the datastore is registered in.
            name: Name of the datastore.

        Raises:
            DataError: The store does not exist.
        """
        return Datastore(workspace, name)

    @staticmethod
    def get_default(workspace: Workspace) -> Datastore:
        """Return the default datastore: `<workspace>/data`, unless another one is set."""
        return Datastore(workspace)

    @staticmethod
    def list(workspace: Workspace) -> dict[str, Datastore]:
        """Return all datastores of the workspace, keyed by name."""
        return {name: Datastore(workspace, name) for name in records.record_names(_workspace_dir(workspace))}

    def __repr__(self) -> str:
        return f"Datastore({self._workspace!r}, {self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Datastore) and (other._dir, other._record) == (self._dir, self._record)

    def __hash__(self) -> int:
        return hash((self._dir, self._record.name))

    @property
    def workspace(self) -> Workspace:
        """The workspace that the datastore is registered in."""
        return self._workspace

    @property
    def name(self) -> str:
        """The name under which the datastore is registered."""
        assert self._record.name is not None
        return self._record.name

    @property
    def url(self) -> str:
        """The URL under which the datastore is registered."""
        return self._record.url

    @property
    def kind(self) -> str:
        """The kind of datastore: "local", "s3", "azure", "gcs", "sftp", "http" or "memory"."""
        return self._record.kind

    @property
    def datastore_type(self) -> str:
        """The Azure SDK's name of the kind, such as "AzureBlob"."""
        return _AZURE_TYPES.get(self.kind, self.kind.capitalize())

    @property
    def is_default(self) -> bool:
        """Whether this datastore is the workspace's default datastore."""
        return records.default_name(self._dir) == self._record.name

    @property
    def container_name(self) -> str | None:
        """The datastore's bucket or container, or None for other kinds of datastores."""
        return self._record.root.partition("/")[0] if self.kind in ("s3", "azure", "gcs") else None

    @property
    def account_name(self) -> str | None:
        """The datastore's Azure account, or None for other kinds of datastores."""
        if self.kind != "azure":
            return None
        named = self._record.options.get("account_name")
        # The host begins with the account's name: abfs://container@account.dfs.core.windows.net/prefix
        return str(named) if named else self.url.partition("@")[2].partition(".")[0] or None

    def unregister(self) -> None:
        """Remove the datastore's registration. The files stay in place."""
        records.remove_record(self._dir, str(self._record.name))

    def set_as_default(self) -> None:
        """Make this datastore the workspace's default datastore."""
        records.set_default(self._dir, str(self._record.name))

    def path(self, path: str | None = None, data_reference_name: str | None = None) -> DataReference:
        """Return a reference to a folder, file or pattern of the datastore.

        Args:
            path: Path in the store; default: its top.
            data_reference_name: Name of the reference; default: derived from the store's name and the path.
        """
        inside = clean_path(path or "", self._record.title)
        name = data_reference_name or _reference_name(self.name, inside)
        return DataReference(name=name, sources=(Source(datastore=self.name, path=inside),))

    def as_reference(self) -> DataReference:
        """Return the datastore as a job's mounted input, the default for datastores."""
        return self.as_mount()

    def as_mount(self) -> DataReference:
        """Return a job's input: the whole datastore, read in place if possible."""
        return self.path().as_mount()

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """Return a job's input that downloads the whole datastore to each node.

        Args:
            path_on_compute: Path below the script's working directory where the files also appear.
        """
        return self.path().as_download(path_on_compute)

    def as_upload(self, path_on_compute: str | None = None) -> DataReference:
        """Return a job's output that is stored at the top of the datastore.

        Args:
            path_on_compute: Path below the script's working directory where the output's folder also appears.
        """
        return self.path().as_upload(path_on_compute)

    def files(self, prefix: str | None = None) -> Sequence[FileInfo]:
        """List the files of the datastore, sorted by path.

        Args:
            prefix: A folder, file or pattern; default: all files.

        Raises:
            DataError: The store or path does not exist.
            TransferError: The store can't be read.
        """
        return list_files([Source(datastore=self._record.name, path=prefix or "")], self._dir)

    def upload(
        self,
        src_dir: str | os.PathLike[str],
        target_path: str | None = None,
        overwrite: bool = False,
        show_progress: bool = True,
    ) -> DataReference:
        """Store all files of a local folder, and return a reference to them.

        Args:
            src_dir: Local folder to upload.
            target_path: Folder of the store; default: its top.
            overwrite: Replace existing files. Otherwise, only new files are stored.
            show_progress: Show a progress bar on a terminal.

        Raises:
            DataError: The folder does not exist, or the store is read-only.
            TransferError: The store can't be written.
        """
        _check_bool(overwrite=overwrite, show_progress=show_progress)
        return self._upload(files_below(_path(src_dir)), target_path, overwrite, show_progress)

    def upload_files(
        self,
        files: Sequence[str | os.PathLike[str]],
        relative_root: str | os.PathLike[str] | None = None,
        target_path: str | None = None,
        overwrite: bool = False,
        show_progress: bool = True,
    ) -> DataReference:
        """Store these local files, and return a reference to them.

        Args:
            files: Local files to upload.
            relative_root: Folder that the stored paths are relative to; default: the deepest common folder.
            target_path: Folder of the store; default: its top.
            overwrite: Replace existing files. Otherwise, only new files are stored.
            show_progress: Show a progress bar on a terminal.
        """
        _check_bool(overwrite=overwrite, show_progress=show_progress)
        paths = [_path(file) for file in files]
        for path in paths:
            if not path.is_file():
                raise DataError(f"{str(path)!r} is not a file. Name files, or use upload() for a folder.")
        if relative_root is not None:
            root = working_path(relative_root)
        else:
            root = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path("/")
        named = []
        for path in paths:
            if root not in path.parents:
                raise DataError(f"{str(path)!r} is not below relative_root={str(root)!r}. Name a folder above it.")
            named.append((path.relative_to(root).as_posix(), path))
        return self._upload(named, target_path, overwrite, show_progress)

    def download(
        self,
        target_path: str | os.PathLike[str],
        prefix: str | None = None,
        overwrite: bool = False,
        show_progress: bool = True,
    ) -> int:
        """Copy files of the datastore into a local folder.

        Return the number of copies. A second call resumes an interrupted download.

        Args:
            target_path: Local folder that the files are copied to.
            prefix: A folder, file or pattern of the store; default: all files.
            overwrite: Replace existing files. Otherwise, existing files are not copied.
            show_progress: Show a progress bar on a terminal.

        Raises:
            DataError: The store or path does not exist.
            TransferError: A file can't be read, or the disk is full.
        """
        _check_bool(overwrite=overwrite, show_progress=show_progress)
        _path(target_path)
        infos = self.files(prefix)
        bar = terminal_bar("downloading") if show_progress else None
        with Store(self._record) as store:
            return download_files(store, infos, working_path(target_path), overwrite=overwrite, progress=bar)

    def _upload(
        self, files: Sequence[tuple[str, Path]], target_path: str | None, overwrite: bool, show_progress: bool
    ) -> DataReference:
        target = clean_path(target_path or "", self._record.title).rstrip("/")
        with Store(self._record) as store:
            # An HTTP store can't be listed for this check; `put_files` refuses the upload anyway.
            if not overwrite and files and self.kind != "http":
                there = {info.path for info in _listed(self, target)}
                files = [(name, file) for name, file in files if (f"{target}/{name}" if target else name) not in there]
            put_files(store, target, files, terminal_bar("uploading") if show_progress else None)
        return self.path(target)


def _listed(store: Datastore, path: str) -> Sequence[FileInfo]:
    try:
        return store.files(path)
    except DataError:
        return ()


def _workspace_dir(workspace: Workspace) -> Path:
    path = getattr(workspace, "path", None)
    if not isinstance(path, (str, os.PathLike)):
        raise DataError(f"{workspace!r} is not a workspace. Give Workspace.from_config(), or Workspace(folder).")
    return working_path(path)


def _checked_url(name: str, url: str) -> str:
    if "://" not in url:
        return str(working_path(url))
    if url.startswith(("file://", "local://")):
        return str(working_path(url.partition("://")[2]))
    # Create a record only to find the store's kind. Error messages show its URL, so hide the URL's secrets.
    record = StoreRecord(name=name, url=hidden_url(url))
    if record.kind != "memory" and url.partition("://")[2].partition("/")[0] == "":
        raise DataError(
            f"the URL {record.url!r} of datastore {name!r} names no bucket or host. Register it again with a whole URL."
        )
    return url


def _plain(options: dict[str, object], name: str) -> dict[str, object]:
    import json

    try:
        # Convert to JSON and back, because options that are read later come from JSON, in which tuples become lists.
        plain: dict[str, object] = json.loads(json.dumps(options))
    except (TypeError, ValueError) as error:
        raise DataError(f"options of datastore {name!r} can't be JSON: {error}. Give plain values.") from error
    return plain


def _reference_name(store: str, path: str) -> str:
    text = re.sub(r"[^A-Za-z0-9_]+", "_", f"{store}_{path}".strip("/")).strip("_")[:200]
    return text if text and not text[0].isdecimal() else f"_{text}"[:200]


def _path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise DataError(f"{path!r} is not a path.")
    return working_path(path)


def _check_bool(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise DataError(f"{name}={value!r} is not a bool. Write {name}=True or {name}=False.")
