"""Paceline's datasets behind the SDK's signatures (`azureml.core.dataset`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.dataset.dataset
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import paceline
from paceline.compat.azureml.core.datastore import Datastore
from paceline.compat.azureml.data.data_reference import DataPath, SdkDataReference
from paceline.compat.azureml.data.file_dataset import FileDataset
from paceline.compat.azureml.data.tabular_dataset import TabularDataset, of_native
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import NamedObjects, late
from paceline.compat.azureml.stores import ARTIFACTS
from paceline.data import PATH_VARIABLES

if TYPE_CHECKING:
    from paceline import Workspace
    from paceline.compat.azureml.data.file_dataset import AbstractDataset

__all__ = ["DataType", "Dataset", "FileDatasetFactory", "PromoteHeadersBehavior", "TabularDatasetFactory"]


@sdk_class
class FileDatasetFactory:
    """Functions that create datasets of files: `Dataset.File`."""

    @staticmethod
    def from_files(
        path: object,
        validate: bool = True,
        partition_format: str | None = None,
        is_file: bool = False,
        **others: object,
    ) -> FileDataset:
        """Return a dataset of files.

        `path` is a URL, a local path, (datastore, path), datastore.path(...), a DataPath, or a list of these.
        `partition_format`, such as "/{user}/{day:yyyy/MM/dd}/*.wav", names parts of the files' paths. In this example
        the dataset's partition_keys become "user" and "day".
        """
        return FileDataset.of(paceline.Dataset.File.from_files(_place(path), validate, partition_format))

    @staticmethod
    def upload_directory(
        src_dir: str, target: object, pattern: str | None = None, overwrite: bool = False, show_progress: bool = True
    ) -> FileDataset:
        _none("pattern", pattern)
        store, folder = _target(target)
        return FileDataset.of(
            paceline.Dataset.File.upload_directory(src_dir, (store, folder), None, overwrite, show_progress)
        )


@sdk_class
class TabularDatasetFactory:
    """Functions that create datasets of rows: `Dataset.Tabular`."""

    @staticmethod
    def from_delimited_files(
        path: object,
        validate: bool = True,
        include_path: bool = False,
        infer_column_types: bool = True,
        set_column_types: Mapping[str, str] | None = None,
        separator: str = ",",
        header: object = True,
        partition_format: str | None = None,
        support_multi_line: bool = False,
        empty_as_string: bool = False,
        encoding: str = "utf8",
        **others: object,
    ) -> TabularDataset:
        """Return a dataset of the rows of CSV files.

        `header` is True, False, or a PromoteHeadersBehavior. A quoted value may contain line breaks even if
        support_multi_line is False.
        """
        has_header = header if isinstance(header, bool) else "NO_HEADERS" not in str(header).upper()
        return TabularDataset.of(
            paceline.Dataset.Tabular.from_delimited_files(
                _place(path),
                validate,
                infer_column_types,
                separator,
                has_header,
                empty_as_string,
                encoding,
                set_column_types=set_column_types,
                include_path=include_path,
                partition_format=partition_format,
            )
        )

    @staticmethod
    def from_parquet_files(
        path: object,
        validate: bool = True,
        include_path: bool = False,
        set_column_types: Mapping[str, str] | None = None,
        partition_format: str | None = None,
        **others: object,
    ) -> TabularDataset:
        return TabularDataset.of(
            paceline.Dataset.Tabular.from_parquet_files(
                _place(path),
                validate,
                set_column_types=set_column_types,
                include_path=include_path,
                partition_format=partition_format,
            )
        )

    @staticmethod
    def from_json_lines_files(
        path: object,
        validate: bool = True,
        include_path: bool = False,
        set_column_types: Mapping[str, str] | None = None,
        partition_format: str | None = None,
        invalid_lines: str = "error",
        encoding: str = "utf8",
    ) -> TabularDataset:
        """Return a dataset of rows from files with one JSON object per line."""
        return TabularDataset.of(
            paceline.Dataset.Tabular.from_json_lines_files(
                _place(path),
                validate,
                encoding,
                set_column_types=set_column_types,
                include_path=include_path,
                partition_format=partition_format,
            )
        )

    @staticmethod
    def register_pandas_dataframe(
        dataframe: object,
        target: object,
        name: str,
        description: str | None = None,
        tags: Mapping[str, str] | None = None,
        show_progress: bool = True,
        **others: object,
    ) -> TabularDataset:
        """Store a data frame at `target` as a dataset's new version. Return this version."""
        return TabularDataset.of(
            paceline.Dataset.Tabular.register_pandas_dataframe(
                dataframe, _target(target), name, description, tags, show_progress
            )
        )

    @staticmethod
    def from_sql_query(*arguments: object, **named: object) -> NoReturn:
        """Raise UserErrorException: query the database, and register a data frame instead."""
        raise UserErrorException(
            "Dataset.Tabular.from_sql_query is not supported. Query the database, then call register_pandas_dataframe."
        )


@sdk_class
class Dataset:
    """Functions that create and find datasets.

    Raises:
        UserErrorException: A path is wrong or empty, or no dataset has this name.
    """

    class Scenario:
        """The purposes of a model's dataset, such as training."""

        TRAINING = "training"
        VALIDATION = "validation"
        INFERENCING = "inferencing"

    File = FileDatasetFactory
    Tabular = TabularDatasetFactory

    @staticmethod
    def get_by_name(workspace: Workspace, name: str, version: int | str = "latest") -> FileDataset | TabularDataset:
        return of_native(paceline.Dataset.get_by_name(workspace, name, version))

    @staticmethod
    def get_by_id(workspace: Workspace, id: str, **others: object) -> FileDataset | TabularDataset:
        """Return a registered dataset by its id.

        In a run, `id` may also be the command-line argument that the script received in place of a dataset.
        """
        if os.path.isabs(str(id)):
            found = late("core.run", "Run").get_context().input_datasets
            if names := [name for name in found if os.environ.get(f"{PATH_VARIABLES[1]}{name}") == id]:
                # `id` is the folder in which the run received this dataset. The script expects a dataset, so convert the folder.
                one: str | FileDataset | TabularDataset = found[names[0]]
                return FileDatasetFactory.from_files(one) if isinstance(one, str) else one
        return of_native(paceline.Dataset.get_by_id(workspace, id))

    @staticmethod
    def get_all(workspace: Workspace) -> NamedObjects[AbstractDataset]:
        return NamedObjects({name: of_native(one) for name, one in paceline.Dataset.get_all(workspace).items()})

    @staticmethod
    def get(workspace: Workspace, name: str | None = None, id: str | None = None) -> FileDataset | TabularDataset:
        """Return a registered dataset by its name or id (SDK before 1.0.60)."""
        return Dataset.get_by_id(workspace, id) if id else Dataset.get_by_name(workspace, str(name))


def _place(path: object) -> Any:
    if isinstance(path, list):
        return [_place(one) for one in path]
    if isinstance(path, DataPath):
        path = (path.datastore, path.path_on_datastore or "")
    if isinstance(path, tuple) and len(path) == 2:
        if isinstance(path[0], Datastore) and path[0].name == ARTIFACTS:
            return _place(path[0].path(path[1]))
        return (_store(path[0]), path[1])
    if isinstance(path, SdkDataReference) and path.sources[0].datastore is None:
        return path.sources[0].path  # the reference is to files of a run, not of a datastore
    if isinstance(path, SdkDataReference) and path.store is not None:
        # Return the store together with the path, because two stores may contain equal paths.
        return (path.store, path.path_on_datastore)
    return _store(path)


def _store(store: object) -> Any:
    # Unwrap the SDK's Datastore, because a dataset's record names Paceline's own store.
    return store._real if isinstance(store, Datastore) else store


def _target(target: object) -> tuple[Any, str]:
    place = _place(target)
    if isinstance(place, SdkDataReference):
        raise UserErrorException(f"target={target!r} is not in a datastore.")
    return place if isinstance(place, tuple) else (place, "")


def _none(name: str, value: object) -> None:
    if value is not None:
        raise UserErrorException(f"{name}={value!r} is not supported. Read the files unchanged, then change the frame.")


class DataType:
    """Column types for `set_column_types`."""

    @staticmethod
    def to_string() -> str:
        return "str"

    @staticmethod
    def to_long() -> str:
        return "int"

    @staticmethod
    def to_float(decimal_mark: str = ".") -> str:
        return "float"

    @staticmethod
    def to_bool() -> str:
        return "bool"

    @staticmethod
    def to_datetime(formats: object = None) -> str:
        """Return the column type of dates. Only the first of the strptime `formats` counts."""
        first = formats if isinstance(formats, (str, type(None))) else next(iter(formats), None)  # type: ignore[call-overload]
        return f"datetime:{first}" if first else "datetime"


class PromoteHeadersBehavior(enum.Enum):
    """Values for `header=` of `Dataset.Tabular.from_delimited_files`.

    NO_HEADERS means header=False. All other values mean header=True.
    """

    NO_HEADERS = 0
    ONLY_FIRST_FILE_HAS_HEADERS = 1
    COMBINE_ALL_FILES_HEADERS = 2
    ALL_FILES_HAVE_SAME_HEADERS = 3
