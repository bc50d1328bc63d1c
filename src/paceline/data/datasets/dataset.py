"""The public entry to datasets: create, find and register them."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline.data.datasets import registered
from paceline.data.datasets.base import D
from paceline.data.datasets.file import FileDataset, TabularDataset
from paceline.data.datasets.read import TYPES, path_pattern
from paceline.data.datasets.registered import ContentCheck, check_dataset_name
from paceline.data.datasets.sources import sources_of, workspace_dir_of
from paceline.data.datasets.steps import Reading
from paceline.errors import DataError, PacelineError
from paceline.job.data_reference import DataReference
from paceline.system.scratch import Scratch

if TYPE_CHECKING:
    from paceline.workspace import Workspace


__all__ = ["ContentCheck", "Dataset", "FileDataset", "TabularDataset", "opened"]


class _Files:
    @staticmethod
    def from_files(
        path: object,
        validate: bool = True,
        partition_format: str | None = None,
        is_file: bool = False,
        *,
        workspace: Workspace | None = None,
    ) -> FileDataset:
        """Create a dataset of files.

        Args:
            path: A URL, a local path, (datastore, path), a `DataReference`, a `Datastore`, or a list of these. A path is a
                folder with everything below it, a file, or a pattern with `*`, `?` and `**`.
            validate: Check that there is at least one file.
            partition_format: A pattern for the end of each path, with named parts: "/{city}/{day:yyyy/MM/dd}/*.jpg".
                `ParallelRunStep` (`azureml.pipeline.steps`) groups files into mini-batches by the named parts.
            is_file: Accepted for compatibility, without effect.
            workspace: Workspace of the datastores that `path` names. None: the workspace of the run that uses the dataset.

        Raises:
            DataError: The path is invalid, there are no files, or partition_format has no `{name}`.
            TransferError: A store can't be read.
        """
        return _new(FileDataset, path, workspace, _columns(None, False, partition_format), validate)

    @staticmethod
    def upload_directory(
        src_dir: str | os.PathLike[str],
        target: Any,
        pattern: None = None,
        overwrite: bool = False,
        show_progress: bool = True,
    ) -> FileDataset:
        """Upload a folder and create a dataset of its files.

        Args:
            src_dir: Folder to upload.
            target: A `Datastore`, or (datastore, path).
            pattern: Must be None.
            overwrite: Replace existing files. Otherwise, only new files are uploaded.
            show_progress: Show a progress bar on a terminal.
        """
        if pattern is not None:
            raise DataError("pattern= is not supported. Upload a folder that holds only the files of the dataset.")
        store, folder = _target(target)
        store.upload(os.fspath(src_dir), folder, overwrite=overwrite, show_progress=show_progress)
        return _Files.from_files((store, folder))


class _Tables:
    @staticmethod
    def from_delimited_files(
        path: object,
        validate: bool = True,
        infer_column_types: bool = True,
        separator: str = ",",
        header: bool = True,
        empty_as_string: bool = False,
        encoding: str = "utf8",
        *,
        set_column_types: Mapping[str, str] | None = None,
        include_path: bool = False,
        partition_format: str | None = None,
        workspace: Workspace | None = None,
    ) -> TabularDataset:
        """Create a dataset of the rows of CSV or similar files.

        Args:
            path: A URL, a local path or pattern, (datastore, path), a `Datastore`, or a list of these.
            validate: Check that there is at least one file.
            infer_column_types: Parse numbers and dates; otherwise all values are text.
            separator: Text between two fields.
            header: True if each file begins with column names. Otherwise the columns are Column1, Column2, ...
            empty_as_string: Read empty fields as "" instead of NaN.
            encoding: Encoding of the files.
            set_column_types: Maps a column to "str", "int", "float", "bool", "datetime" or "datetime:<strptime format>".
                Values that can't be converted become missing values.
            include_path: Add a column Path with the path of each row's file.
            partition_format: A path pattern whose names become columns, such as "/{city}/{day:yyyy/MM/dd}/data.csv".
            workspace: Workspace of the datastores that `path` names. None: the workspace of the run that uses the dataset.

        Raises:
            DataError: The path or partition_format is invalid, there are no files, or a column type is unknown.
        """
        reading: Reading = {
            "format": "delimited",
            "separator": separator,
            "header": bool(header),
            "infer_column_types": bool(infer_column_types),
            "empty_as_string": bool(empty_as_string),
            "encoding": encoding,
            **_columns(set_column_types, include_path, partition_format),
        }
        return _new(TabularDataset, path, workspace, reading, validate)

    @staticmethod
    def from_parquet_files(
        path: object,
        validate: bool = True,
        *,
        set_column_types: Mapping[str, str] | None = None,
        include_path: bool = False,
        partition_format: str | None = None,
        workspace: Workspace | None = None,
    ) -> TabularDataset:
        """Create a dataset of the rows of Parquet files."""
        reading: Reading = {"format": "parquet", **_columns(set_column_types, include_path, partition_format)}
        return _new(TabularDataset, path, workspace, reading, validate)

    @staticmethod
    def from_json_lines_files(
        path: object,
        validate: bool = True,
        encoding: str = "utf8",
        *,
        set_column_types: Mapping[str, str] | None = None,
        include_path: bool = False,
        partition_format: str | None = None,
        workspace: Workspace | None = None,
    ) -> TabularDataset:
        """Create a dataset of the rows of JSON lines files."""
        reading: Reading = {
            "format": "json_lines",
            "encoding": encoding,
            **_columns(set_column_types, include_path, partition_format),
        }
        return _new(TabularDataset, path, workspace, reading, validate)

    @staticmethod
    def register_pandas_dataframe(
        dataframe: Any,
        target: Any,
        name: str,
        description: str | None = None,
        tags: Mapping[str, str] | None = None,
        show_progress: bool = True,
    ) -> TabularDataset:
        """Store a pandas frame as Parquet, and register it as the dataset `name`.

        Each call stores the frame in a new folder below `target`.

        Args:
            dataframe: Frame to store.
            target: A `Datastore`, or (datastore, path).
            name: Name of the dataset.
            description: Description of the version.
            tags: Tags of the version.
            show_progress: Show a progress bar on a terminal.

        Raises:
            DataError: The name or target is invalid, or Parquet can't hold the frame.
            TransferError: The frame can't be stored.
        """
        registered.check_dataset_name(name)
        store, folder = _target(target)
        # Use a unique folder, because storing a frame again must not change the files of an older version.
        own = "/".join(part for part in (folder.strip("/"), str(uuid.uuid4())) if part)
        with Scratch("data") as scratch:
            try:
                dataframe.to_parquet(scratch / "part-00000.parquet", index=False)
            except ImportError as error:
                raise DataError(
                    "a frame is stored with pyarrow, which is not installed: pip install 'paceline[tabular]'."
                ) from error
            except (AttributeError, ValueError, TypeError) as error:
                raise DataError(f"a {type(dataframe).__name__} can't be stored as Parquet: {error}.") from error
            store.upload(scratch, own, show_progress=show_progress)
        made = _Tables.from_parquet_files((store, own))
        return made.register(store.workspace, name, description, tags, create_new_version=True)


class Dataset:
    """The entry to datasets, such as `Dataset.File.from_files(...)`.

    Examples:
        >>> store = pl.Datastore.get_default(pl.Workspace("my_runs"))
        >>> table = pl.Dataset.Tabular.from_delimited_files(store.path("iris.csv"))
    """

    File = _Files
    Tabular = _Tables

    @staticmethod
    def get_by_name(workspace: Workspace, name: str, version: int | str = "latest") -> FileDataset | TabularDataset:
        """Return a registered dataset.

        Args:
            workspace: Workspace that the dataset is registered in.
            name: Name of the dataset.
            version: Version number, or "latest".

        Raises:
            DataError: The dataset or version does not exist; the message lists the names or versions that exist.
        """
        folder = workspace_dir_of(workspace)
        return _made(folder, registered.load(folder, name, version))

    @staticmethod
    def get_by_id(workspace: Workspace, id: str) -> FileDataset | TabularDataset:
        """Return the registered dataset with this `dataset.id`.

        Args:
            workspace: Workspace that the dataset is registered in.
            id: The id of a registered version.

        Raises:
            DataError: No version has this id.
        """
        folder = workspace_dir_of(workspace)
        return _made(folder, registered.load_id(folder, id))

    @staticmethod
    def get_all(workspace: Workspace) -> dict[str, FileDataset | TabularDataset]:
        """Return the latest version of every registered dataset, keyed by name.

        Args:
            workspace: Workspace that the datasets are registered in.
        """
        return {name: Dataset.get_by_name(workspace, name) for name in registered.names(workspace_dir_of(workspace))}


def opened(reference: DataReference, path: str | os.PathLike[str]) -> FileDataset | TabularDataset:
    """Return the dataset of a run's input (`reference`), whose files are at `path`."""
    return (TabularDataset if reference.table else FileDataset).from_folder(reference, path)


def _columns(types: Mapping[str, str] | None, include_path: bool, partition_format: str | None) -> Reading:
    for name, kind in (types or {}).items():
        if str(kind).partition(":")[0] not in TYPES:
            raise DataError(f"set_column_types: the type {kind!r} of {name!r} must be one of {', '.join(TYPES)}.")
    reading = Reading()
    if types:
        reading["types"] = dict(types)
    if include_path:
        reading["include_path"] = True
    if partition_format is not None:
        path_pattern(partition_format)
        reading["partition_format"] = partition_format
    return reading


def _made(folder: Path, record: registered.DatasetRecord) -> FileDataset | TabularDataset:
    for kind in (FileDataset, TabularDataset):
        if record.kind == kind.kind:
            reading = record.reading or {}
            made = kind(sources=record.sources, steps=record.steps, workspace_dir=folder, reading=reading)
            return made._of(record)
    raise DataError(f"dataset {record.name!r} is of kind {record.kind!r}, which this version does not know.")


def _new(kind: type[D], path: object, workspace: Workspace | None, reading: Reading, validate: bool) -> D:
    sources, folder = sources_of(path)
    folder = folder if workspace is None else workspace_dir_of(workspace)
    dataset = kind(sources=sources, workspace_dir=folder, reading=reading)
    # Without a workspace the datastores are unknown until the run, so nothing can be listed.
    is_known = folder is not None or all(source.datastore is None for source in sources)
    if validate and is_known and not dataset.list_files():
        raise DataError(f"there are no files at {dataset._where()}. Give validate=False if there will be.")
    return dataset


def _target(target: Any) -> tuple[Any, str]:
    store, folder = target if isinstance(target, tuple) and len(target) == 2 else (target, "")
    if not hasattr(store, "upload") or not hasattr(store, "workspace"):
        raise DataError(f"target={target!r}: give a Datastore, or (datastore, path).")
    return store, os.fspath(folder)


def check_registration(reference: DataReference) -> None:
    """Raise DataError if an output would be registered under an invalid name."""
    if reference.registered is not None:
        check_dataset_name(json.loads(reference.registered)["name"])


def register_outputs(references: Sequence[DataReference], workspace_dir: Path) -> tuple[dict[str, str], list[str]]:
    """Register a run's outputs as datasets where `register_on_complete` requests this.

    Returns:
        A dict from output name to "dataset:version", and a sentence for each output that could not be registered.
    """
    made: dict[str, str] = {}
    errors: list[str] = []
    for reference in references:
        if reference.registered is None:
            continue
        request, source = json.loads(reference.registered), reference.sources[0]
        # A dataset needs only the `path` of a workspace. This module can't import `Workspace`, so pass an object with a `path`.
        workspace: Any = SimpleNamespace(path=workspace_dir)
        try:
            dataset = Dataset.File.from_files((source.datastore, source.path), validate=False, workspace=workspace)
            version = dataset.register(
                workspace, request["name"], request["description"], request["tags"], create_new_version=True
            ).version
            made[reference.name] = f"{request['name']}:{version}"
        except PacelineError as error:
            errors.append(
                f"The output {reference.name!r} is stored, but not registered as {request['name']!r}: {error}"
            )
    return made, errors
