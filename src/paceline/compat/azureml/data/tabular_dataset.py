"""Tabular datasets (`azureml.data.tabular_dataset`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.tabulardataset
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline import data
from paceline.compat.azureml.data.file_dataset import AbstractDataset, FileDataset
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import late

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas

    from paceline.data import Step

__all__ = ["TabularDataset"]


@sdk_class
class TabularDataset(AbstractDataset, data.TabularDataset):
    """A dataset of rows. `dataset["age"] > 30` is a condition for `filter`."""

    def to_pandas_dataframe(self, on_error: str = "null", out_of_range_datetime: str = "null") -> pandas.DataFrame:
        return super().to_pandas_dataframe()

    def to_spark_dataframe(self) -> NoReturn:
        """Raise UserErrorException: Paceline has no Spark."""
        raise UserErrorException("Spark is not available. Use to_pandas_dataframe().")

    def to_csv_files(self, separator: str = ",") -> FileDataset:
        """Return a dataset of a temporary CSV file with the rows."""
        folder = Path(tempfile.mkdtemp(prefix="paceline-csv-"))
        self.to_pandas_dataframe().to_csv(folder / "part-00000.csv", sep=separator, index=False)
        return FileDataset.of(data.Dataset.File.from_files(str(folder)))

    def to_parquet_files(self) -> FileDataset:
        """Return a dataset of a temporary Parquet file with the rows."""
        folder = Path(tempfile.mkdtemp(prefix="paceline-parquet-"))
        self.to_pandas_dataframe().to_parquet(folder / "part-00000.parquet", index=False)
        return FileDataset.of(data.Dataset.File.from_files(str(folder)))

    def partition_by(
        self,
        partition_keys: str | Sequence[str],
        target: object,
        name: str | None = None,
        show_progress: bool = True,
        partition_as_file_dataset: bool = False,
    ) -> AbstractDataset:
        """Write the rows to a store as Parquet files, one for each key combination.

        `target` is (datastore, path), a DataPath, or a datastore. `name`, if given, registers the result. The result is
        a table or, with partition_as_file_dataset=True, a file dataset whose paths contain the keys.

        Raises:
            UserErrorException: The column or the datastore does not exist.
        """
        keys = [partition_keys] if isinstance(partition_keys, str) else [*partition_keys]
        frame = self.to_pandas_dataframe()
        if not keys or (missing := [key for key in keys if key not in frame.columns]):
            what = f"there is no column {missing[0]!r}; there are" if keys else "no column was named; there are"
            raise UserErrorException(f"partition_by: {what} {[*map(str, frame.columns)]}.")
        store, top = late("core.dataset", "_target")(target)
        own = "/".join(part for part in (str(top).strip("/"), str(uuid.uuid4())) if part)
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            for number, (_, rows) in enumerate(frame.groupby(keys, sort=True, dropna=False)):
                folder = Path(scratch, *(f"{key}={_as_name(rows[key])}" for key in keys))
                folder.mkdir(parents=True, exist_ok=True)
                rows.to_parquet(folder / f"part-{number:05}.parquet", index=False)
            store.upload(scratch, own, show_progress=show_progress)
        form = "/".join(["", *(f"{key}={{{key}}}" for key in keys), "*.parquet"])
        made: AbstractDataset
        if partition_as_file_dataset:
            made = FileDataset.of(data.Dataset.File.from_files((store, own), partition_format=form))
        else:
            made = TabularDataset.of(data.Dataset.Tabular.from_parquet_files((store, own)))
            made = dataclasses.replace(made, reading={**made.reading, "partition_keys": keys})
        return made.register(store.workspace, name, create_new_version=True) if name else made

    def get_partition_key_values(self, partition_keys: list[str] | None = None) -> list[dict[str, object]]:
        """Return the distinct combinations of the partition keys' values."""
        keys = self.checked_keys(partition_keys)
        if not keys:
            return []
        found: list[dict[str, object]] = self.to_pandas_dataframe()[keys].drop_duplicates().to_dict("records")
        return found

    def keep_columns(self, columns: str | Sequence[str], validate: bool = False) -> TabularDataset:
        return super().keep_columns(columns)

    def filter(self, expression: Condition) -> TabularDataset:
        """Return the rows that satisfy a condition.

        For example `dataset.filter((dataset["a"] > 1) & (dataset["b"] == "x"))`.
        """
        if not isinstance(expression, Condition):
            raise UserErrorException(f"filter({expression!r}): give a condition such as dataset['age'] > 30.")
        return self._with(("filter", expression.plain))

    def __getitem__(self, key: str) -> ColumnExpression:
        """Return a column of the dataset, for comparisons in `filter`."""
        return ColumnExpression(key)

    # --- columns of timestamps, and filters by time

    def with_timestamp_columns(
        self,
        timestamp: str | None = None,
        partition_timestamp: str | None = None,
        validate: bool = False,
        fine_grain_timestamp: str | None = None,
        **others: object,
    ) -> TabularDataset:
        """Return the dataset with `timestamp` as the column that time_before and similar methods use."""
        return dataclasses.replace(
            self, reading={**self.reading, "timestamp": timestamp or partition_timestamp or fine_grain_timestamp}
        )

    @property
    def timestamp_columns(self) -> tuple[str | None, None]:
        return (self.reading.get("timestamp"), None)

    def time_before(self, end_time: object, include_boundary: bool = True, validate: bool = True) -> TabularDataset:
        return self.filter(self._moment("<=" if include_boundary else "<", end_time))

    def time_after(self, start_time: object, include_boundary: bool = True, validate: bool = True) -> TabularDataset:
        return self.filter(self._moment(">=" if include_boundary else ">", start_time))

    def time_between(
        self, start_time: object, end_time: object, include_boundary: bool = True, validate: bool = True
    ) -> TabularDataset:
        return self.time_after(start_time, include_boundary).time_before(end_time, include_boundary)

    def time_recent(
        self, time_delta: dt.timedelta, include_boundary: bool = True, validate: bool = True
    ) -> TabularDataset:
        return self.time_after(dt.datetime.now(dt.timezone.utc) - time_delta, include_boundary)

    def _moment(self, verb: str, moment: object) -> Condition:
        column = self.reading.get("timestamp")
        if column is None:
            raise UserErrorException("the dataset has no timestamp column. Name it: with_timestamp_columns('time').")
        return ColumnExpression(column)._compared(verb, moment)


def _as_name(column: pandas.Series) -> str:
    """Return a column's single value as a folder name, as Hive writes it."""
    if column.isna().iloc[0]:
        return "__HIVE_DEFAULT_PARTITION__"
    return str(column.iloc[0]).replace("%", "%25").replace("/", "%2F")


class Condition:
    """A condition that filters a dataset's rows. `plain` is its JSON form."""

    def __init__(self, plain: Step) -> None:
        self.plain = plain

    def __and__(self, other: Condition) -> Condition:
        return Condition(("and", self.plain, other.plain))

    def __or__(self, other: Condition) -> Condition:
        return Condition(("or", self.plain, other.plain))

    def __invert__(self) -> Condition:
        return Condition(("not", self.plain))

    def __bool__(self) -> bool:
        raise UserErrorException("a condition has no truth value: join conditions with & and |, in parentheses.")


class ColumnExpression:
    """A column of a dataset. A comparison with a value returns a Condition."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _compared(self, verb: str, value: object) -> Condition:
        if isinstance(value, (dt.datetime, dt.date)):
            value = ("time", value.isoformat())
        elif hasattr(value, "item"):
            value = value.item()
        elif not isinstance(value, (str, int, float, bool)):
            raise UserErrorException(
                f"{self._name!r} can't be compared with {value!r}: the value must be a number, a string or a datetime."
            )
        return Condition((verb, self._name, value))

    def __lt__(self, value: object) -> Condition:
        return self._compared("<", value)

    def __le__(self, value: object) -> Condition:
        return self._compared("<=", value)

    def __gt__(self, value: object) -> Condition:
        return self._compared(">", value)

    def __ge__(self, value: object) -> Condition:
        return self._compared(">=", value)

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("==", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("!=", value)

    __hash__ = None  # type: ignore[assignment]

    def is_null(self) -> Condition:
        return Condition(("null", self._name))


def of_native(native: data.AnyDataset) -> FileDataset | TabularDataset:
    return TabularDataset.of(native) if isinstance(native, data.TabularDataset) else FileDataset.of(native)
