"""The mini-batches of a step's inputs.

The first rank creates the mini-batches. Each rank reads their files and rows from its own copy of the input.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from paceline.compat.azureml.data.file_dataset import key_values
from paceline.errors import DataError

if TYPE_CHECKING:
    import pandas


#: A pair: a table, and a Series with the group number of each row. Without groups, the Series is None.
Table: TypeAlias = "tuple[pandas.DataFrame, pandas.Series | None]"


class BatchFields(TypedDict):
    """The JSON fields of a `Batch` in messages between ranks."""

    number: int
    input: str
    files: Sequence[str]
    first: int
    last: int
    group: int | None


@dataclass(frozen=True)
class Batch:
    """A mini-batch of a ParallelRunStep.

    Args:
        number: Position among the mini-batches of all inputs, from 0.
        input: Name of the step's input that has the mini-batch's files or rows.
        files: For an input of files, the paths of the mini-batch's files in the input.
        first, last: For a table, the range of rows; `last` is the first row after the range.
        group: For a table with keys, the number of the key combination that selects the rows.
    """

    number: int
    input: str
    files: tuple[str, ...] = ()
    first: int = 0
    last: int = 0
    group: int | None = None

    def __len__(self) -> int:
        return len(self.files) or self.last - self.first

    def fields(self) -> BatchFields:
        return {
            "number": self.number,
            "input": self.input,
            "files": self.files,
            "first": self.first,
            "last": self.last,
            "group": self.group,
        }

    @classmethod
    def of_fields(cls, fields: BatchFields) -> Batch:
        return cls(
            number=fields["number"],
            input=fields["input"],
            files=tuple(fields["files"]),
            first=fields["first"],
            last=fields["last"],
            group=fields["group"],
        )


def all_of(settings: ParallelRunSettings) -> list[Batch]:
    """Return all mini-batches, input by input.

    Raises:
        DataError: An input is not a table.
    """
    found: list[Batch] = []
    for name in settings.files:
        files, size = _files(folder_of(name)), settings.batch_size
        if settings.keys:
            parts = _parts(settings, name, files)
        else:
            parts = [tuple(files[start : start + size]) for start in range(0, len(files), size)]
        found += [Batch(len(found) + number, name, part) for number, part in enumerate(parts)]
    for name in settings.tables:
        frame = table_of(name)
        if settings.keys:
            counts = _groups(frame, settings.keys).value_counts()
            found += [
                Batch(len(found) + group, name, last=int(counts[group]), group=group) for group in range(len(counts))
            ]
            continue
        size = max(1, int(frame.memory_usage(index=False, deep=True).sum()))
        rows = max(1, len(frame) * settings.batch_size // size)
        for start in range(0, len(frame), rows):
            found.append(Batch(len(found), name, first=start, last=min(start + rows, len(frame))))
    return found


def content(batch: Batch, settings: ParallelRunSettings, tables: dict[str, Table]) -> list[str] | pandas.DataFrame:
    """Return the argument of the script's `run`: paths, or a data frame.

    `tables` is a cache, which maps the names of inputs to the tables that this process has read.
    """
    if batch.files:
        top = folder_of(batch.input)
        return [str(top / name) if name else str(top) for name in batch.files]
    if batch.input not in tables:
        frame = table_of(batch.input)
        tables[batch.input] = frame, _groups(frame, settings.keys) if settings.keys else None
    frame, groups = tables[batch.input]
    rows = frame.iloc[batch.first : batch.last] if batch.group is None else frame[groups == batch.group]
    return rows.reset_index(drop=True)


def values_of(batch: Batch, settings: ParallelRunSettings, given: Any) -> dict[str, object]:
    """Return a mini-batch's value of each partition key. `given` is the argument of `run`."""
    if not settings.keys:
        return {}
    if batch.files:
        return _values(settings, batch.input, batch.files[0])
    return {key: _plain(given[key]) for key in settings.keys}


def _plain(column: pandas.Series) -> object:
    """Return a column's single value as a Python value, or None if missing."""
    value = column.iloc[0]
    return None if column.isna().iloc[0] else value.item() if hasattr(value, "item") else value


def _parts(settings: ParallelRunSettings, name: str, files: list[str]) -> list[tuple[str, ...]]:
    parts: dict[tuple[object, ...], list[str]] = {}
    for file in files:
        parts.setdefault(tuple(_values(settings, name, file).values()), []).append(file)
    return [tuple(part) for part in parts.values()]


def _values(settings: ParallelRunSettings, name: str, file: str) -> dict[str, object]:
    top = folder_of(name)
    found = key_values(settings.formats[name], file or top.name, top / file)
    return {key: found[key] for key in settings.keys}


def _groups(frame: pandas.DataFrame, keys: tuple[str, ...]) -> pandas.Series:
    """Return each row's key combination as a number, counted in sorted order."""
    if missing := [key for key in keys if key not in frame.columns]:
        raise DataError(f"partition_keys: there is no column {missing[0]!r}; there are {[*map(str, frame.columns)]}.")
    return frame.groupby([*keys], sort=True, dropna=False).ngroup()


def folder_of(name: str) -> Path:
    """Return the folder where this worker reads an input or writes an output."""
    return Path(os.environ[f"AZUREML_DATAREFERENCE_{name}"])


def table_of(name: str) -> pandas.DataFrame:
    from paceline.compat.azureml.core.run import Run

    return Run.get_context().input_datasets[name].to_pandas_dataframe()


def _files(top: Path) -> list[str]:
    if top.is_file():
        return [""]
    found = (Path(folder, name) for folder, _, names in os.walk(top, followlinks=True) for name in names)
    return sorted(str(path.relative_to(top)) for path in found)


@dataclass(frozen=True, kw_only=True)
class ParallelRunSettings:
    """The settings of a ParallelRunStep.

    Args:
        entry: The user's script, relative to the working directory.
        files, tables: Names of the inputs that are files, and of the inputs that are tables.
        batch_size: Number of files, or approximate bytes of a table, in a mini-batch.
        timeout_s: Time limit for a call of run(), in seconds.
        tries: Maximum number of attempts for each mini-batch.
        error_threshold: Number of files or rows that may fail; -1 allows any number.
        failed_batches, failed_percent: Limits for failed mini-batches; -1 allows any number.
        keys: Keys whose values define the mini-batches, instead of batch_size.
        formats: Maps the name of a file input to the input's partition_format.
        output: Name of the step's output, or None without an output.
        file: Name of a file in the output, to which run()'s results are appended. None appends nothing.
    """

    entry: str
    files: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    formats: dict[str, str] = dataclasses.field(default_factory=dict)
    batch_size: int
    timeout_s: float
    tries: int
    error_threshold: int
    failed_batches: int = -1
    failed_percent: float = -1.0
    output: str | None = None
    file: str | None = None
    logging_level: str = "INFO"

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> ParallelRunSettings:
        """Parse settings from the JSON of `text`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, **{name: tuple(values[name]) for name in ("files", "tables", "keys")}})
