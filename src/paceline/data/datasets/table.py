"""A dataset of rows and columns, in files that pandas reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.data.datasets import steps
from paceline.data.datasets.base import AnyDataset, fields_of
from paceline.data.datasets.local import local_files
from paceline.data.datasets.read import format_of, read_frames
from paceline.data.datasets.steps import steps_from_json
from paceline.errors import DataError


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
