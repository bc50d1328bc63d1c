"""Folders that a run leaves in a datastore (`azureml.data.output_dataset_config`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.output_dataset_config.outputfiledatasetconfig
"""

from __future__ import annotations

import copy
import re
import uuid
from typing import Any

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.stores import real_name
from paceline.job.data_reference import DataReference, Source
from paceline.pipelines.data import NOWHERE, PendingReference

__all__ = ["OutputDatasetConfig", "OutputFileDatasetConfig"]


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

    def read_delimited_files(self, *arguments: Any, **named: Any) -> Any:
        """Raise UserErrorException: let the step that takes it read the files (pandas.read_csv)."""
        raise UserErrorException(
            "a table is not made of what a step leaves. Take the folder (as_input), and read its files in the step."
        )

    read_parquet_files = read_delimited_files

    def reference(self, workspace: Any, run_id: str) -> DataReference:
        """The reference for a job with this run id."""
        store, path = self.destination or (None, "dataset/{run-id}/{output-name}")
        path = (
            str(path or "dataset/{run-id}/{output-name}")
            .replace("{run-id}", run_id)
            .replace("{output-name}", self.name)
        )
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


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


#: Its older name.
OutputDatasetConfig = OutputFileDatasetConfig
