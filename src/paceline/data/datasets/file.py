"""A dataset of files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.data.datasets import steps
from paceline.data.datasets.base import AnyDataset, fields_of
from paceline.data.datasets.read import format_of, read_frames
from paceline.data.datasets.sources import local_files
from paceline.data.datasets.steps import chosen, steps_from_json
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import Source
from paceline.system.files import replacing

if TYPE_CHECKING:
    from paceline.data.transfer.listing import FileInfo


@dataclass(frozen=True, kw_only=True, eq=False)
class FileDataset(AnyDataset):
    """Files as they are. take, skip and random_split choose among them in the order of their paths.

    reading: what the files' paths say: {"partition_format": "/{city}/{day}.csv"}, or nothing.
    """

    kind: ClassVar[str] = "file"

    @classmethod
    def from_folder(cls, reference: Mapping[str, Any], path: str | os.PathLike[str]) -> FileDataset:
        """The dataset of a direct input whose files lie at `path`. reference: `DataReference.to_json()`."""
        return cls(**fields_of(reference, path))

    def list_files(self) -> list[FileInfo]:
        return self._selected(super().list_files())

    def to_path(self) -> list[str]:
        """The files' paths below the dataset's folder, each beginning with `/`."""
        return [f"/{info.relative}" for info in self.list_files()]

    def download(self, target_path: str | os.PathLike[str] | None = None, overwrite: bool = False) -> list[str]:
        """The paths of the copies.

        target_path: a folder, made if need be; a new one below the system's temporary folder if not given.
        overwrite: replace files that are there.

        Raises:
            DataError: no files, or one is there already. TransferError: a store can't be read, or the folder not written.
        """
        target = (
            Path(tempfile.mkdtemp(prefix="paceline-")) if target_path is None else Path(os.path.abspath(target_path))
        )
        with local_files(self._reference_sources(), self._workspace_dir()) as files:
            # All of them before the first copy, so that a refusal leaves the folder as it was. A link that leads nowhere counts
            # as being there.
            if not overwrite and (there := [file for file in files if os.path.lexists(target / file.relative)]):
                raise DataError(
                    f"{str(target / there[0].relative)!r} is there already ({len(there)} of {len(files)} files are). "
                    "Give an empty folder, or overwrite=True."
                )
            for file in files:
                _copy(file.path, target / file.relative)
            return [str(target / file.relative) for file in files]

    def _selected(self, files: list[FileInfo]) -> list[FileInfo]:
        for step in self.steps:
            files = [files[number] for number in chosen(step, len(files))]
        return files

    def _reference_sources(self) -> tuple[Source, ...]:
        if not self.steps:
            return self.sources
        files = self.list_files()
        if not files:
            raise DataError(f"take, skip and random_split left no file of those at {self._where()}.")
        # Each one on its own: a reference knows folders, files and patterns, and no choice among them.
        seen: dict[str, str] = {}
        for info in files:
            name = info.path.rpartition("/")[2]
            if name in seen:
                raise DataError(
                    f"{info.path!r} and {seen[name]!r} would be one file {name!r} of the folder that a run gets: files "
                    "chosen by take, skip or random_split lie there without their folders. Choose by patterns instead."
                )
            seen[name] = info.path
        return tuple(Source(datastore=info.datastore, path=info.path) for info in files)


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as beside:
            shutil.copyfile(source, beside)
    except OSError as error:
        raise TransferError(
            f"{str(source)!r} can't be copied to {str(target)!r}: {error.strerror or error}. Mend that, or give another folder."
        ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class TabularDataset(AnyDataset):
    """Rows of files, one file after the other in the order of their paths.

    reading: {"format": "delimited", "parquet" or "json_lines", ...}, and the options with which that is read.
    """

    kind: ClassVar[str] = "tabular"

    @classmethod
    def from_folder(cls, reference: Mapping[str, Any], path: str | os.PathLike[str]) -> TabularDataset:
        """The dataset of a direct input whose files lie at `path`. reference: `DataReference.to_json()`.

        How they are read comes from the reference; where it does not say, from the files' endings.

        Raises:
            DataError: the reference's `table` can't be read.
        """
        try:
            table = json.loads(reference.get("table") or "{}")
            taken = steps_from_json(table.get("steps"))
        except (TypeError, ValueError, AttributeError) as error:
            # A DataError is a ValueError too, and it has its message already.
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"input {reference.get('name')!r}: its table={reference.get('table')!r} is not JSON."
            ) from error
        return cls(**fields_of(reference, path), reading=table.get("reading") or {}, steps=taken)

    def to_pandas_dataframe(self) -> Any:
        """All rows, as a pandas frame with its rows numbered from 0.

        Raises:
            DataError: pandas is not installed, a file can't be read as what it should be, or has not the columns to keep.
            TransferError: a store can't be read.
        """
        with local_files(self.sources, self._workspace_dir()) as files:
            if not files:
                raise DataError(f"there are no files at {self._where()} to read a table from.")
            reading = self.reading or {"format": format_of(files)}
            return read_frames(files, reading, self.steps)

    def keep_columns(self, columns: str | Sequence[str]) -> TabularDataset:
        """These columns alone, in this order."""
        return self._with(steps.columns_step("keep", columns))

    def drop_columns(self, columns: str | Sequence[str]) -> TabularDataset:
        """All columns but these."""
        return self._with(steps.columns_step("drop", columns))

    def _reading(self) -> Mapping[str, Any]:
        return dict(self.reading)

    def _reference_reading(self) -> Mapping[str, Any]:
        return {"reading": self._reading(), "steps": self.steps}
