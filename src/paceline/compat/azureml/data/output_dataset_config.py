"""Folders that a run leaves in a datastore (`azureml.data.output_dataset_config`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.output_dataset_config.outputfiledatasetconfig
"""

from __future__ import annotations

import copy
import re
import uuid
from typing import Any

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.records import late
from paceline.compat.azureml.stores import real_name
from paceline.job.data_reference import DataReference, Source
from paceline.pipelines.data import NOWHERE, PendingReference

__all__ = ["OutputDatasetConfig", "OutputFileDatasetConfig", "OutputTabularDatasetConfig"]


class Origin:
    """Stands for what a step leaves. producer: the step."""

    def __init__(self) -> None:
        self.producer: Any = None


class OutputFileDatasetConfig:
    """An empty folder for the script, by its path in the arguments; what is in it at the end goes to `destination`.

    destination: (datastore, path); default: the default store, `dataset/{run-id}/{output-name}`. Both words may stand in a path.

    Raises:
        UserErrorException: a destination that is none.
    """

    def __init__(
        self,
        name: str | None = None,
        destination: Any = None,
        source: str | None = None,
        partition_format: str | None = None,
    ) -> None:
        self.name = _plain(name) if name else f"output_{uuid.uuid4().hex[:8]}"
        if destination is not None and not (isinstance(destination, (tuple, list)) and len(destination) == 2):
            raise UserErrorException(f"destination={destination!r} is no pair (datastore, path).")
        self.destination = tuple(destination) if destination is not None else None
        self.source = source
        self.overwrite = False
        self.registered: dict[str, Any] | None = None
        #: What all copies of this have in common, by which a step that takes it is told from the one that leaves it.
        self.origin = Origin()

    def as_upload(self, overwrite: bool = False, source_globs: Any = None) -> OutputFileDatasetConfig:
        """The same, stored at the run's end. overwrite: files that are there may be replaced."""
        made = copy.copy(self)
        made.overwrite = overwrite
        return made

    def as_mount(self, disable_metadata_cache: bool = False) -> OutputFileDatasetConfig:
        """As `as_upload`: nothing is mounted for writing."""
        return copy.copy(self)

    def register_on_complete(
        self, name: str, description: str | None = None, tags: dict[str, str] | None = None
    ) -> OutputFileDatasetConfig:
        """The same, registered as a dataset once the run is Completed."""
        made = copy.copy(self)
        made.registered = {"name": name, "description": description, "tags": tags}
        return made

    def as_input(self, name: str | None = None) -> DataReference:
        """The same for a later step of a pipeline, which finds what this one's has left: a mount; `as_download()` is a copy.

        name: under which the step finds it.
        """
        return PendingReference(name=_plain(name or self.name), sources=NOWHERE, data=self.origin)

    def read_delimited_files(
        self,
        include_path: bool = False,
        separator: str = ",",
        header: Any = True,
        partition_format: str | None = None,
        path_glob: str | None = None,
        set_column_types: Any = None,
    ) -> OutputTabularDatasetConfig:
        """The same as a table for a later step: its files are CSV. Options as of `Dataset.Tabular.from_delimited_files`."""
        options = {"include_path": include_path, "separator": separator, "header": header}
        options |= {"partition_format": partition_format, "set_column_types": set_column_types}
        return table_of("from_delimited_files", self.name, self.origin, options, path_glob)

    def read_parquet_files(
        self,
        include_path: bool = False,
        partition_format: str | None = None,
        path_glob: str | None = None,
        set_column_types: Any = None,
    ) -> OutputTabularDatasetConfig:
        """The same, of Parquet files."""
        options = {"include_path": include_path, "partition_format": partition_format}
        return table_of(
            "from_parquet_files", self.name, self.origin, {**options, "set_column_types": set_column_types}, path_glob
        )

    def reference(self, workspace: Any, run_id: str) -> DataReference:
        """The reference for a job with this run id."""
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
    """A table of what a step leaves: `run.input_datasets[name].to_pandas_dataframe()` in the step that takes it."""

    def __init__(self, name: str, data: Any, inside: str | None, table: Any) -> None:
        self.name, self._data, self._inside, self._table = name, data, inside, table

    def keep_columns(self, columns: Any) -> OutputTabularDatasetConfig:
        """These columns alone."""
        return self._with(self._table.keep_columns(columns))

    def drop_columns(self, columns: Any) -> OutputTabularDatasetConfig:
        """All columns but these."""
        return self._with(self._table.drop_columns(columns))

    def random_split(
        self, percentage: float, seed: int | None = None
    ) -> tuple[OutputTabularDatasetConfig, OutputTabularDatasetConfig]:
        """Two parts of the rows; percentage: the first one's share, between 0 and 1."""
        first, second = self._table.random_split(percentage, seed)
        return self._with(first), self._with(second)

    def as_input(self, name: str | None = None) -> DataReference:
        """The input of a later step, by which it gets the table. name: under which it finds it."""
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
        """What the table itself means as an input."""
        return self.as_input()

    def register_on_complete(self, *arguments: Any, **named: Any) -> Any:
        """Raise UserErrorException: what a step leaves is registered as files."""
        raise UserErrorException(
            "a table of what a step leaves can't be registered. Register its files: register_on_complete of the "
            "OutputFileDatasetConfig."
        )

    def _with(self, table: Any) -> OutputTabularDatasetConfig:
        return OutputTabularDatasetConfig(self.name, self._data, self._inside, table)


def table_of(
    how: str, name: str, data: Any, options: dict[str, Any], pattern: str | None = None, inside: str | None = None
) -> OutputTabularDatasetConfig:
    """How files that are not there yet will be read.

    how: a method of `Dataset.Tabular`, with its options. inside: as of `DataReference`.

    Raises:
        UserErrorException: an option is wrong, or a pattern is given.
    """
    if pattern:
        raise UserErrorException(f"path_glob={pattern!r} is not here: all files that the step leaves are read.")
    # Of any place: only how its files are read is taken.
    read = getattr(late("core.dataset", "Dataset").Tabular, how)
    return OutputTabularDatasetConfig(name, data, inside, read(NOWHERE[0].path, validate=False, **options))


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


#: Its older name.
OutputDatasetConfig = OutputFileDatasetConfig
