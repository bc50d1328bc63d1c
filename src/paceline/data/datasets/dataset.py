"""Named, versioned references to files, with a fingerprint of what they held: what a run says it learned from."""

from __future__ import annotations

import json
import os
import tempfile
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
from paceline.errors import DataError, PacelineError
from paceline.job.data_reference import DataReference

if TYPE_CHECKING:
    from paceline.workspace import Workspace


__all__ = ["ContentCheck", "Dataset", "FileDataset", "TabularDataset", "opened"]


class _Files:
    """`Dataset.File`"""

    @staticmethod
    def from_files(
        path: Any,
        validate: bool = True,
        partition_format: str | None = None,
        is_file: bool = False,
        *,
        workspace: Workspace | None = None,
    ) -> FileDataset:
        """A dataset of these files.

        path: a URL, a path of this machine, (datastore, path), a `DataReference`, a `Datastore`, or a list of such; a path is
            a folder with all below it, a file, or a pattern with `*`, `?` and `**`.
        validate: look whether there are any files. is_file: accepted. workspace: whose datastores are meant, where they
            are given by name.
        partition_format: what the paths of files say: "/{city}/{day:yyyy/MM/dd}/*.jpg" describes a path's end. Kept with the
            dataset; `ParallelRunStep` (`azureml.pipeline.steps`) makes mini-batches by it.

        Raises:
            DataError: a wrong path, nothing there, or a partition_format without a name. TransferError: a store can't be read.
        """
        reading = _columns(None, False, partition_format)
        return _validated(FileDataset(**_place(path, workspace), reading=reading), validate)

    @staticmethod
    def upload_directory(
        src_dir: str | os.PathLike[str],
        target: Any,
        pattern: None = None,
        overwrite: bool = False,
        show_progress: bool = True,
    ) -> FileDataset:
        """A dataset of the files of a folder, uploaded first. target: a `Datastore`, or (datastore, path)."""
        if pattern is not None:
            raise DataError("pattern= is not supported; upload a folder that holds only what is meant.")
        store, folder = _target(target)
        store.upload(os.fspath(src_dir), folder, overwrite=overwrite, show_progress=show_progress)
        return _Files.from_files((store, folder))


class _Tables:
    """`Dataset.Tabular`"""

    @staticmethod
    def from_delimited_files(
        path: Any,
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
        """A dataset of the rows of CSV files or the like. path, validate, workspace: as for `Dataset.File.from_files`.

        header: whether each file begins with the columns' names; without, they are Column1, Column2, ...
        infer_column_types: numbers and dates as such; else all is text. empty_as_string: empty fields are "", not NaN.
        set_column_types: column -> "str", "int", "float", "bool", "datetime" or "datetime:<strptime's format>"; what can't be of
            its type is missing. include_path: a column Path, each row's file.
        partition_format: columns of what the paths of files say: "/{city}/{day:yyyy/MM/dd}/data.csv" describes a path's end.

        Raises:
            DataError: as `Dataset.File.from_files`; no such type, or a partition_format without a name.
        """
        reading = {
            "format": "delimited",
            "separator": separator,
            "header": bool(header),
            "infer_column_types": bool(infer_column_types),
            "empty_as_string": bool(empty_as_string),
            "encoding": encoding,
            **_columns(set_column_types, include_path, partition_format),
        }
        return _validated(TabularDataset(**_place(path, workspace), reading=reading), validate)

    @staticmethod
    def from_parquet_files(
        path: Any,
        validate: bool = True,
        *,
        set_column_types: Mapping[str, str] | None = None,
        include_path: bool = False,
        partition_format: str | None = None,
        workspace: Workspace | None = None,
    ) -> TabularDataset:
        """A dataset of the rows of Parquet files. Parameters: as for `from_delimited_files`."""
        reading = {"format": "parquet", **_columns(set_column_types, include_path, partition_format)}
        return _validated(TabularDataset(**_place(path, workspace), reading=reading), validate)

    @staticmethod
    def from_json_lines_files(
        path: Any,
        validate: bool = True,
        encoding: str = "utf8",
        *,
        set_column_types: Mapping[str, str] | None = None,
        include_path: bool = False,
        partition_format: str | None = None,
        workspace: Workspace | None = None,
    ) -> TabularDataset:
        """A dataset of the rows of files with a JSON object on each line. Parameters: as for `from_delimited_files`."""
        reading = {
            "format": "json_lines",
            "encoding": encoding,
            **_columns(set_column_types, include_path, partition_format),
        }
        return _validated(TabularDataset(**_place(path, workspace), reading=reading), validate)

    @staticmethod
    def register_pandas_dataframe(
        dataframe: Any,
        target: Any,
        name: str,
        description: str | None = None,
        tags: Mapping[str, str] | None = None,
        show_progress: bool = True,
    ) -> TabularDataset:
        """A new version of the dataset `name`, of this frame, stored as Parquet in a folder of its own below `target`.

        target: a `Datastore`, or (datastore, path).

        Raises:
            DataError: a wrong name or target, or a frame that Parquet can't hold. TransferError: it can't be stored.
        """
        registered.check_dataset_name(name)
        store, folder = _target(target)
        # A folder that nobody else has: to store a frame again must not change the files of an older version.
        own = "/".join(part for part in (folder.strip("/"), str(uuid.uuid4())) if part)
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            try:
                dataframe.to_parquet(Path(scratch, "part-00000.parquet"), index=False)
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
    """The entry to datasets: makes and finds them. Made: `Dataset.File.from_files(...)`, `Dataset.Tabular.from_...(...)`."""

    File = _Files
    Tabular = _Tables

    @staticmethod
    def get_by_name(workspace: Workspace, name: str, version: int | str = "latest") -> FileDataset | TabularDataset:
        """The registered dataset. version: its number, or "latest".

        Args:
            workspace: Workspace that the dataset is registered in.
            name: Name that the dataset was registered under.

        Raises:
            DataError: there is none; those that there are are named.
        """
        folder = workspace_dir_of(workspace)
        return _made(folder, registered.load(folder, name, version))

    @staticmethod
    def get_by_id(workspace: Workspace, id: str) -> FileDataset | TabularDataset:
        """The registered dataset with this `dataset.id`.

        Args:
            workspace: Workspace that the dataset is registered in.

        Raises:
            DataError: there is none.
        """
        folder = workspace_dir_of(workspace)
        return _made(folder, registered.load_id(folder, id))

    @staticmethod
    def get_all(workspace: Workspace) -> dict[str, FileDataset | TabularDataset]:
        """Name -> the latest version, of all that are registered.

        Args:
            workspace: Workspace that the datasets are registered in.
        """
        folder = workspace_dir_of(workspace)
        return {name: Dataset.get_by_name(workspace, name) for name in registered.names(folder)}


def opened(reference: DataReference, path: str | os.PathLike[str]) -> FileDataset | TabularDataset:
    """The dataset, with its steps, that a script gets in a worker for a direct input whose files lie at `path`."""
    data = reference.to_json()
    return (TabularDataset if data.get("table") else FileDataset).from_folder(data, path)


def _columns(types: Mapping[str, str] | None, include_path: bool, partition_format: str | None) -> dict[str, Any]:
    """What a reading says of columns; nothing where nothing was asked for, so that such data is the same as before."""
    for name, kind in (types or {}).items():
        if str(kind).partition(":")[0] not in TYPES:
            raise DataError(
                f"set_column_types: {name!r} is to be of type {kind!r}, which is none of {', '.join(TYPES)}."
            )
    if partition_format is not None:
        path_pattern(partition_format)
    given = {"types": dict(types or {}), "include_path": bool(include_path), "partition_format": partition_format}
    return {name: value for name, value in given.items() if value}


def _made(folder: Path, record: registered.DatasetRecord) -> FileDataset | TabularDataset:
    for kind in (FileDataset, TabularDataset):
        if record.kind == kind.kind:
            reading = record.reading or {}
            made = kind(sources=record.sources, steps=record.steps, workspace_dir=folder, reading=reading)
            return made._of(record)
    raise DataError(f"dataset {record.name!r} is of kind {record.kind!r}, which this version does not know.")


def _place(path: Any, workspace: Workspace | None) -> dict[str, Any]:
    sources, folder = sources_of(path)
    return {"sources": sources, "workspace_dir": folder if workspace is None else workspace_dir_of(workspace)}


def _validated(dataset: D, validate: bool) -> D:
    """The same; with `validate`, once it is seen that there are files, where it is known whose datastores are meant."""
    # Where only the run will say whose datastores are meant, there is nothing to look into yet.
    known = dataset.workspace_dir is not None or all(source.datastore is None for source in dataset.sources)
    if validate and known and not dataset.list_files():
        raise DataError(f"there are no files at {dataset._where()}. Give validate=False if there will be.")
    return dataset


def _target(target: Any) -> tuple[Any, str]:
    store, folder = target if isinstance(target, tuple) and len(target) == 2 else (target, "")
    if not hasattr(store, "upload") or not hasattr(store, "workspace"):
        raise DataError(f"target={target!r}: give a Datastore, or (datastore, path).")
    return store, os.fspath(folder)


def check_wish(reference: DataReference) -> None:
    """Raises:
    DataError: the name under which an output is to be registered can't be one.
    """
    if reference.registered is not None:
        check_dataset_name(json.loads(reference.registered)["name"])


def register_outputs(references: Sequence[DataReference], workspace_dir: Path) -> tuple[dict[str, str], list[str]]:
    """Register the outputs that are to be; output -> "name:version", and a sentence for each that could not be."""
    made: dict[str, str] = {}
    said: list[str] = []
    for reference in references:
        if reference.registered is None:
            continue
        wish, source = json.loads(reference.registered), reference.sources[0]
        # All that a dataset asks of a workspace is its folder; the class stands above this layer.
        workspace: Any = SimpleNamespace(path=workspace_dir)
        try:
            found = Dataset.File.from_files((source.datastore, source.path), validate=False, workspace=workspace)
            version = found.register(
                workspace, wish["name"], wish["description"], wish["tags"], create_new_version=True
            ).version
            made[reference.name] = f"{wish['name']}:{version}"
        except PacelineError as error:
            said.append(f"The output {reference.name!r} is stored, but not registered as {wish['name']!r}: {error}")
    return made, said
