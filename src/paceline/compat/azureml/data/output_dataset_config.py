"""Output folders of a run (`azureml.data.output_dataset_config`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.output_dataset_config.outputfiledatasetconfig
"""

from __future__ import annotations

import copy
import re
import uuid
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.records import late
from paceline.compat.azureml.stores import real_name
from paceline.data import DataReference, Source
from paceline.pipelines import NOWHERE, PendingReference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import Workspace
    from paceline.compat.azureml.data.tabular_dataset import TabularDataset

__all__ = ["OutputDatasetConfig", "OutputFileDatasetConfig", "OutputTabularDatasetConfig"]


class Registration(TypedDict):
    """The name, description and tags with which an output becomes a dataset."""

    name: str
    description: str | None
    tags: dict[str, str] | None


class Origin:
    """An object that all copies of an output share. `producer` is its step."""

    def __init__(self) -> None:
        self.producer: Any = None


class OutputFileDatasetConfig:
    """An output folder, empty at the start and copied to `destination` at the end.

    The script receives the folder's path as an argument.

    Args:
        destination: (datastore, path). The path may contain `{run-id}` and `{output-name}`. None means
            `dataset/{run-id}/{output-name}` in the default store.

    Raises:
        UserErrorException: The destination is not valid.
    """

    def __init__(
        self,
        name: str | None = None,
        destination: object = None,
        source: str | None = None,
        partition_format: str | None = None,
    ) -> None:
        self.name = _plain(name) if name else f"output_{uuid.uuid4().hex[:8]}"
        if destination is not None and not (isinstance(destination, (tuple, list)) and len(destination) == 2):
            raise UserErrorException(f"destination={destination!r} must be a pair (datastore, path).")
        self.destination = tuple(destination) if destination is not None else None
        self.source = source
        self.overwrite = False
        self.registered: Registration | None = None
        #: All copies of this output share this object. It connects the step that writes the output with the steps that read it.
        self.origin = Origin()

    def as_upload(self, overwrite: bool = False, source_globs: object = None) -> OutputFileDatasetConfig:
        """Return the output, which is stored at the run's end. overwrite=True replaces files."""
        made = copy.copy(self)
        made.overwrite = overwrite
        return made

    def as_mount(self, disable_metadata_cache: bool = False) -> OutputFileDatasetConfig:
        """Return the output as `as_upload` does: Paceline mounts nothing for writing."""
        return copy.copy(self)

    def register_on_complete(
        self, name: str, description: str | None = None, tags: dict[str, str] | None = None
    ) -> OutputFileDatasetConfig:
        """Return the output, registered as a dataset when the run completes."""
        made = copy.copy(self)
        made.registered = {"name": name, "description": description, "tags": tags}
        return made

    def as_input(self, name: str | None = None) -> DataReference:
        """Return the output as an input of a later step.

        The later step mounts the files, or copies them after `as_download()`. `name` is the input's name in that step.
        """
        return PendingReference(name=_plain(name or self.name), sources=NOWHERE, data=self.origin)

    def read_delimited_files(
        self,
        include_path: bool = False,
        separator: str = ",",
        header: object = True,
        partition_format: str | None = None,
        path_glob: str | None = None,
        set_column_types: object = None,
    ) -> OutputTabularDatasetConfig:
        """Return the output's CSV files as a table for a later step.

        The options mean the same as in `Dataset.Tabular.from_delimited_files`.
        """
        options = {"include_path": include_path, "separator": separator, "header": header}
        options |= {"partition_format": partition_format, "set_column_types": set_column_types}
        return table_of("from_delimited_files", self.name, self.origin, options, path_glob)

    def read_parquet_files(
        self,
        include_path: bool = False,
        partition_format: str | None = None,
        path_glob: str | None = None,
        set_column_types: object = None,
    ) -> OutputTabularDatasetConfig:
        """Return the output's Parquet files as a table for a later step."""
        options = {"include_path": include_path, "partition_format": partition_format}
        return table_of(
            "from_parquet_files", self.name, self.origin, {**options, "set_column_types": set_column_types}, path_glob
        )

    def reference(self, workspace: Workspace, run_id: str) -> DataReference:
        """Return the output as a data reference for the run of this id."""
        store, given = self.destination or (None, None)
        path = str(given or "dataset/{run-id}/{output-name}")
        path = path.replace("{run-id}", run_id).replace("{output-name}", self.name)
        name = real_name(workspace, getattr(store, "name", store))
        made = DataReference(
            name=self.name,
            sources=(Source(datastore=name, path=path.strip("/")),),
            mode="upload",
            overwrite=self.overwrite,
        )
        return made if self.registered is None else made.register_on_complete(**self.registered)

    def __str__(self) -> str:
        return f"$AZUREML_DATAREFERENCE_{self.name}"


class OutputTabularDatasetConfig:
    """A table of a step's output, for a later step.

    That step calls `run.input_datasets[name].to_pandas_dataframe()`.
    """

    def __init__(self, name: str, data: object, inside: str | None, table: TabularDataset) -> None:
        self.name, self._data, self._inside, self._table = name, data, inside, table

    def keep_columns(self, columns: str | Sequence[str]) -> OutputTabularDatasetConfig:
        return self._with(self._table.keep_columns(columns))

    def drop_columns(self, columns: str | Sequence[str]) -> OutputTabularDatasetConfig:
        return self._with(self._table.drop_columns(columns))

    def random_split(
        self, percentage: float, seed: int | None = None
    ) -> tuple[OutputTabularDatasetConfig, OutputTabularDatasetConfig]:
        """Split the rows at random into two tables.

        `percentage` is the first table's share of the rows, between 0 and 1.
        """
        first, second = self._table.random_split(percentage, seed)
        return self._with(first), self._with(second)

    def as_input(self, name: str | None = None) -> DataReference:
        """Return the table as an input of a later step, under `name`."""
        return PendingReference(
            name=_plain(name or self.name),
            sources=NOWHERE,
            mode="direct",
            table=self._table.native_input("table").table,
            inside=self._inside,
            data=self._data,
        )

    as_named_input = as_input

    def as_reference(self) -> DataReference:
        return self.as_input()

    def register_on_complete(self, *arguments: object, **named: object) -> NoReturn:
        """Raise UserErrorException: a step's output can only be registered as files."""
        raise UserErrorException(
            "a table of a step's output can't be registered. Register its files: register_on_complete of the "
            "OutputFileDatasetConfig."
        )

    def _with(self, table: TabularDataset) -> OutputTabularDatasetConfig:
        return OutputTabularDatasetConfig(self.name, self._data, self._inside, table)


def table_of(
    how: str, name: str, data: object, options: dict[str, object], pattern: str | None = None, inside: str | None = None
) -> OutputTabularDatasetConfig:
    """Return a table definition for files that do not exist yet.

    Args:
        how: Name of a method of `Dataset.Tabular`.
        name: Name of the output.
        data: The output.
        options: Arguments of the method.
        pattern: Not supported: any pattern raises the error.
        inside: Path of the file or folder that the script creates, relative to the output. None means the whole output.

    Raises:
        UserErrorException: An option is wrong, or pattern is not None.
    """
    if pattern:
        raise UserErrorException(f"path_glob={pattern!r} is not supported: a table reads all of a step's files.")
    # The step has written no files yet, so use a placeholder path: the table only records how to read the files later.
    read = getattr(late("core.dataset", "Dataset").Tabular, how)
    return OutputTabularDatasetConfig(name, data, inside, read(NOWHERE[0].path, validate=False, **options))


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


#: The class's earlier name, which old programs use.
OutputDatasetConfig = OutputFileDatasetConfig
