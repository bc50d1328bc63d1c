"""File and table datasets."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.data.datasets import steps
from paceline.data.datasets.base import AnyDataset
from paceline.data.datasets.read import format_of, read_frames
from paceline.data.datasets.sources import local_files
from paceline.data.datasets.steps import Reading, chosen, steps_from_json
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.system.files import replacing

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Self

    from paceline.data.transfer.listing import FileInfo


@dataclass(frozen=True, kw_only=True, eq=False)
class FileDataset(AnyDataset):
    """A dataset of files of any format, sorted by path.

    The attribute `reading` is empty, or has the partition format, such as {"partition_format": "/{city}/{day}.csv"}.
    """

    kind: ClassVar[str] = "file"

    def list_files(self) -> list[FileInfo]:
        return self._selected(super().list_files())

    def to_path(self) -> list[str]:
        """Return the paths of the dataset's files, each with a leading `/`."""
        return [f"/{info.relative}" for info in self.list_files()]

    def download(self, target_path: str | os.PathLike[str] | None = None, overwrite: bool = False) -> list[str]:
        """Copy the dataset's files into a folder, and return the copies' paths.

        Args:
            target_path: Destination, created if missing; a new temporary folder by default.
            overwrite: Replace existing files.

        Raises:
            DataError: There are no files, or overwrite is False and the folder has a file of this name.
            TransferError: A store can't be read, or the folder can't be written.
        """
        target = (
            Path(tempfile.mkdtemp(prefix="paceline-")) if target_path is None else Path(os.path.abspath(target_path))
        )
        with local_files(self._reference_sources(), self._workspace_dir()) as files:
            # Check all files before the first copy, so that a refusal changes nothing. `lexists`: a broken link counts as a file.
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
        # Make one source per file, because a source can't select some of the files in a folder.
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
            f"{str(source)!r} can't be copied to {str(target)!r}: {error.strerror or error}. Fix that, or give another folder."
        ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class TabularDataset(AnyDataset):
    """A dataset of table rows, read from files in order of path.

    The attribute `reading` has "format" ("delimited", "parquet" or "json_lines") and the options of that format.
    """

    kind: ClassVar[str] = "tabular"

    @classmethod
    def from_folder(cls, reference: DataReference, path: str | os.PathLike[str]) -> TabularDataset:
        """Create the dataset of a run's input (`reference`), whose files are at `path`.

        If the input has no format, the file extensions decide how the files are read.

        Raises:
            DataError: The JSON of the input's format and steps can't be read.
        """
        try:
            table = json.loads(reference.table or "{}")
            taken = steps_from_json(table.get("steps"))
        except (TypeError, ValueError, AttributeError) as error:
            # Raise a DataError, which is also a ValueError, unchanged, because it already has a clear message.
            if isinstance(error, DataError):
                raise
            raise DataError(f"input {reference.name!r}: its table={reference.table!r} is not JSON.") from error
        return replace(super().from_folder(reference, path), reading=table.get("reading") or Reading(), steps=taken)

    def to_pandas_dataframe(self) -> DataFrame:
        """Read all rows of the dataset into one pandas frame.

        Raises:
            DataError: There are no files, pandas is missing, a file can't be read, or a column of a step is missing.
            TransferError: A store can't be read.
        """
        with local_files(self.sources, self._workspace_dir()) as files:
            if not files:
                raise DataError(f"there are no files at {self._where()} to read a table from.")
            return read_frames(files, self.reading or {"format": format_of(files)}, self.steps)

    def keep_columns(self, columns: str | Sequence[str]) -> Self:
        """Return a dataset with only these columns, in this order."""
        return self._with(steps.columns_step("keep", columns))

    def drop_columns(self, columns: str | Sequence[str]) -> Self:
        """Return a dataset without these columns."""
        return self._with(steps.columns_step("drop", columns))

    def _reading(self) -> Reading:
        return self.reading

    def _reference_table(self) -> str:
        return json.dumps({"reading": self.reading, "steps": self.steps}, sort_keys=True)
