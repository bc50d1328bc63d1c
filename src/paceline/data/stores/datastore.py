"""Datastores: named places of files, with the Azure SDK's calls.

`Datastore(workspace, "lab")` is a handle on what is registered; it holds neither connection nor secret, so it may be
pickled and printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

#: kind -> what the Azure SDK calls such a store, where it knows it.
_AZURE_TYPES = {"azure": "AzureBlob", "local": "Local", "s3": "S3", "gcs": "GCS", "sftp": "SFTP", "http": "HTTP"}

__all__ = ["DataCache", "Datastore"]


class Datastore:
    """The store that is registered under this name; without a name, the default one.

    workspace: a `Workspace`.

    Raises:
        DataError: there is no such store; the known ones are named.
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
        options: Mapping[str, Any] | None = None,
        credentials: Mapping[str, str] | None = None,
        default: bool = False,
        overwrite: bool = False,
    ) -> Datastore:
        """The store, registered in the workspace.

        url: a folder of this machine, or s3://bucket/prefix, abfs://container@account.dfs.core.windows.net/prefix,
            gs://bucket/prefix, sftp://user@host:port/folder, https://host/folder, memory://name.
        options: as the store's fsspec file system takes them, such as {"endpoint_url": "http://..."}; no secrets.
        credentials: option -> place, such as {"secret": "env:LAB_SECRET"}; None leaves them to the store's own library
            (AWS_* variables, ~/.aws, ...).
        default: make it the default store. overwrite: replace one of this name.

        Raises:
            DataError: a wrong value, a secret in the clear, a store that is there already, or a missing extra.
        """
        folder = _workspace_dir(workspace)
        records.check_store_name(name)
        if not isinstance(url, (str, os.PathLike)):
            raise DataError(
                f"url={url!r} of datastore {name!r} is no URL and no path. Give one, such as 's3://bucket/prefix'."
            )
        for what, value in (("options", options), ("credentials", credentials)):
            if value is not None and not isinstance(value, Mapping):
                raise DataError(
                    f"{what}={value!r} of datastore {name!r} is not a dict, such as {{'secret': 'env:LAB_SECRET'}}."
                )
        _check_bool(default=default, overwrite=overwrite)
        given = dict(options or {})
        # As it was given: a folder's absolute path would begin with "/".
        check_no_secrets(os.fspath(url), given)
        text = _checked_url(name, os.fspath(url))
        record = StoreRecord(
            name=name, url=text, options=_plain(given, name), credentials=dict(credentials) if credentials else None
        )
        check_credentials(credentials, record.title)
        check_installed(record)
        if not overwrite and records.is_registered(folder, name):
            raise DataError(
                f"datastore {name!r} is registered already. Give another name, or overwrite=True (--overwrite) to replace it."
            )
        # Last, so that whatever is refused leaves no record behind.
        records.write_record(folder, record)
        if default:
            records.set_default(folder, name)
        return Datastore(workspace, name)

    @staticmethod
    def get(workspace: Workspace, name: str) -> Datastore:
        """The store of this name.

        Args:
            workspace: Workspace that the datastore is registered in.

        Raises:
            DataError: there is none.
        """
        return Datastore(workspace, name)

    @staticmethod
    def get_default(workspace: Workspace) -> Datastore:
        """The default store: `<workspace>/data`, unless another was made it."""
        return Datastore(workspace)

    @staticmethod
    def list(workspace: Workspace) -> dict[str, Datastore]:
        """Name -> store, for all of the workspace."""
        return {name: Datastore(workspace, name) for name in records.record_names(_workspace_dir(workspace))}

    def __repr__(self) -> str:
        return f"Datastore({self._workspace!r}, {self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Datastore) and (other._dir, other._record) == (self._dir, self._record)

    def __hash__(self) -> int:
        return hash((self._dir, self._record.name))

    @property
    def workspace(self) -> Workspace:
        """The workspace that knows it."""
        return self._workspace

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        assert self._record.name is not None
        return self._record.name

    @property
    def url(self) -> str:
        """Where its files lie, as it was registered."""
        return self._record.url

    @property
    def kind(self) -> str:
        """ "local", "s3", "azure", "gcs", "sftp", "http" or "memory"."""
        return self._record.kind

    @property
    def datastore_type(self) -> str:
        """The kind as the Azure SDK writes it, such as "AzureBlob"."""
        return _AZURE_TYPES.get(self.kind, self.kind.capitalize())

    @property
    def is_default(self) -> bool:
        """Whether it is the workspace's default store."""
        return records.default_name(self._dir) == self._record.name

    @property
    def container_name(self) -> str | None:
        """The bucket or container; None for stores without."""
        return self._record.root.partition("/")[0] if self.kind in ("s3", "azure", "gcs") else None

    @property
    def account_name(self) -> str | None:
        """The Azure account; None elsewhere."""
        if self.kind != "azure":
            return None
        named = self._record.options.get("account_name")
        # abfs://container@account.dfs.core.windows.net/prefix
        return str(named) if named else self.url.partition("@")[2].partition(".")[0] or None

    def unregister(self) -> None:
        """Forget the store; its files stay where they are."""
        records.remove_record(self._dir, str(self._record.name))

    def set_as_default(self) -> None:
        """Make it the workspace's default store."""
        records.set_default(self._dir, str(self._record.name))

    def path(self, path: str | None = None, data_reference_name: str | None = None) -> DataReference:
        """A reference to a folder, a file or a pattern (`*`, `?`, `**`) of the store, for a script's arguments.

        data_reference_name: default: from the store's name and the path.
        """
        inside = clean_path(path or "", self._record.title)
        name = data_reference_name or _reference_name(self.name, inside)
        return DataReference(name=name, sources=(Source(datastore=self.name, path=inside),))

    def as_reference(self) -> DataReference:
        """The reference that the store itself means as an argument or an input: its content as a folder, `as_mount`."""
        return self.as_mount()

    def as_mount(self) -> DataReference:
        """A reference to the whole store, as `DataReference.as_mount`."""
        return self.path().as_mount()

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """A reference to the whole store, as `DataReference.as_download`.

        Args:
            path_on_compute: Path below the script's working directory at which the files appear too.
        """
        return self.path().as_download(path_on_compute)

    def as_upload(self, path_on_compute: str | None = None) -> DataReference:
        """A reference to the whole store, as `DataReference.as_upload`.

        Args:
            path_on_compute: Path below the script's working directory at which the folder appears too.
        """
        return self.path().as_upload(path_on_compute)

    def files(self, prefix: str | None = None) -> Sequence[FileInfo]:
        """The files of the store, or of one folder, file or pattern, sorted by path.

        Args:
            prefix: Only files whose path begins with this.

        Raises:
            DataError, TransferError: as `list_files`.
        """
        return list_files([Source(datastore=self._record.name, path=prefix or "")], self._dir)

    def upload(
        self,
        src_dir: str | os.PathLike[str],
        target_path: str | None = None,
        overwrite: bool = False,
        show_progress: bool = True,
    ) -> DataReference:
        """Store all files of a folder; a reference to where they are.

        target_path: folder of the store, default its top. overwrite: replace files that are there; else they stay, and
        only new ones are stored. show_progress: a bar on a terminal.

        Args:
            src_dir: Folder of this machine whose files are stored.

        Raises:
            DataError: no such folder, or a store that can only be read. TransferError: it can't be written.
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
        """Store these files; a reference to where they are.

        relative_root: the folder below which their paths are kept; default: the deepest that holds all of them.
        Otherwise, and in what is raised, as `upload`.

        Args:
            target_path: Folder of the store; default: its top.
            overwrite: Replace files that are there.
            show_progress: Draw a progress bar on a terminal.
        """
        _check_bool(overwrite=overwrite, show_progress=show_progress)
        paths = [_path(file) for file in files]
        for path in paths:
            if not path.is_file():
                raise DataError(f"{str(path)!r} is no file. Name files, or use upload() for a folder.")
        if relative_root is not None:
            root = working_path(relative_root)
        else:
            root = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path("/")
        named = []
        for path in paths:
            if root not in path.parents:
                raise DataError(
                    f"{str(path)!r} does not lie below relative_root={str(root)!r}. Name a folder above it."
                )
            named.append((path.relative_to(root).as_posix(), path))
        return self._upload(named, target_path, overwrite, show_progress)

    def download(
        self,
        target_path: str | os.PathLike[str],
        prefix: str | None = None,
        overwrite: bool = False,
        show_progress: bool = True,
    ) -> int:
        """Copy files of the store into a folder, under their paths in the store; how many were copied.

        prefix: a folder, a file or a pattern of the store; default all. overwrite: replace files that are there; else they
        stay. A download that broke off goes on where it was.

        Args:
            target_path: Folder of this machine that the files are copied to.
            show_progress: Draw a progress bar on a terminal.

        Raises:
            DataError, TransferError: as `list_files`; a file that can't be read, or no room.
        """
        _check_bool(overwrite=overwrite, show_progress=show_progress)
        _path(target_path)
        infos = self.files(prefix)
        bar = terminal_bar("downloading") if show_progress else None
        with Store(self._record) as store:
            return download_files(store, infos, working_path(target_path), overwrite=overwrite, progress=bar)

    def _upload(
        self,
        files: Sequence[tuple[str, Path]],
        target_path: str | None,
        overwrite: bool,
        show_progress: bool,
    ) -> DataReference:
        target = clean_path(target_path or "", self._record.title).rstrip("/")
        with Store(self._record) as store:
            # Nothing is listed for HTTP, where nothing can be stored: `put_files` says so.
            if not overwrite and files and self.kind != "http":
                there = {info.path for info in _listed(self, target)}
                files = [(name, file) for name, file in files if (f"{target}/{name}" if target else name) not in there]
            put_files(store, target, files, terminal_bar("uploading") if show_progress else None)
        return self.path(target)


def _listed(store: Datastore, path: str) -> Sequence[FileInfo]:
    """The files there; none where there is nothing yet."""
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
    """The URL, a local folder as an absolute path."""
    if "://" not in url:
        return str(working_path(url))
    if url.startswith(("file://", "local://")):
        return str(working_path(url.partition("://")[2]))
    # For its kind alone. Messages show this URL, so it has lost what may be secret.
    record = StoreRecord(name=name, url=hidden_url(url))
    if record.kind != "memory" and url.partition("://")[2].partition("/")[0] == "":
        raise DataError(f"the URL {record.url!r} of datastore {name!r} names no bucket or host. Give one.")
    return url


def _plain(options: dict[str, Any], name: str) -> dict[str, Any]:
    import json

    try:
        # There and back, so that what is kept now is what will be read: tuples are lists then, and keys are texts.
        plain: dict[str, Any] = json.loads(json.dumps(options))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"options of datastore {name!r} can't be written as JSON: {error}. Give plain values."
        ) from error
    return plain


def _reference_name(store: str, path: str) -> str:
    text = re.sub(r"[^A-Za-z0-9_]+", "_", f"{store}_{path}".strip("/")).strip("_")[:200]
    return text if text and not text[0].isdigit() else f"_{text}"[:200]


def _path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise DataError(f"{path!r} is not a path.")
    return working_path(path)


def _check_bool(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise DataError(f"{name}={value!r} is not a bool. Write {name}=True or {name}=False.")
