"""Datasets of tables by the SDK's parameters (`azureml.data.tabular_dataset`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.tabulardataset
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import tempfile
import uuid
from pathlib import Path
from typing import Any

from paceline.compat.azureml.data.abstract_dataset import AbstractDataset
from paceline.compat.azureml.data.file_dataset import FileDataset
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import late
from paceline.data.datasets import dataset, file

__all__ = ["TabularDataset"]


@sdk_class
class TabularDataset(AbstractDataset, file.TabularDataset):
    """`paceline`'s dataset of rows. `dataset["age"] > 30` is a condition for `filter`."""

    def to_pandas_dataframe(self, on_error: str = "null", out_of_range_datetime: str = "null") -> Any:
        """All rows as a pandas frame."""
        return super().to_pandas_dataframe()

    def to_spark_dataframe(self) -> Any:
        """Raise UserErrorException: there is no Spark."""
        raise UserErrorException("there is no Spark here. Take to_pandas_dataframe().")

    def to_csv_files(self, separator: str = ",") -> FileDataset:
        """The rows as a dataset of one CSV file, in a temporary folder."""
        folder = Path(tempfile.mkdtemp(prefix="paceline-csv-"))
        self.to_pandas_dataframe().to_csv(folder / "part-00000.csv", sep=separator, index=False)
        return FileDataset.of(dataset.Dataset.File.from_files(str(folder)))

    def to_parquet_files(self) -> FileDataset:
        """The rows as a dataset of one Parquet file, in a temporary folder."""
        folder = Path(tempfile.mkdtemp(prefix="paceline-parquet-"))
        self.to_pandas_dataframe().to_parquet(folder / "part-00000.parquet", index=False)
        return FileDataset.of(dataset.Dataset.File.from_files(str(folder)))

    def partition_by(
        self,
        partition_keys: Any,
        target: Any,
        name: str | None = None,
        show_progress: bool = True,
        partition_as_file_dataset: bool = False,
    ) -> Any:
        """The rows as Parquet files, one for each combination of these columns' values, in a folder of their own in a store.

        target: (datastore, path), DataPath, or a datastore. name: registers what is made. partition_as_file_dataset: as files
        by whose paths they are told apart, in the place of a table.

        Raises:
            UserErrorException: no such column, or no datastore.
        """
        keys = [partition_keys] if isinstance(partition_keys, str) else [*partition_keys]
        frame = self.to_pandas_dataframe()
        if not keys or (missing := [key for key in keys if key not in frame.columns]):
            what = f"there is no column {missing[0]!r}; there are" if keys else "no column is named; there are"
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
        made: Any
        if partition_as_file_dataset:
            made = FileDataset.of(dataset.Dataset.File.from_files((store, own), partition_format=form))
        else:
            made = TabularDataset.of(dataset.Dataset.Tabular.from_parquet_files((store, own)))
            made = dataclasses.replace(made, reading={**made.reading, "partition_keys": keys})
        return made.register(store.workspace, name, create_new_version=True) if name else made

    def get_partition_key_values(self, partition_keys: list[str] | None = None) -> list[dict[str, Any]]:
        """Each combination of the keys' values that a row has."""
        keys = self.checked_keys(partition_keys)
        if not keys:
            return []
        found: list[dict[str, Any]] = self.to_pandas_dataframe()[keys].drop_duplicates().to_dict("records")
        return found

    def keep_columns(self, columns: Any, validate: bool = False) -> TabularDataset:
        """These columns alone."""
        return super().keep_columns(columns)  # type: ignore[return-value]

    def filter(self, expression: Condition) -> TabularDataset:
        """The rows for which a condition holds: `dataset.filter((dataset["a"] > 1) & (dataset["b"] == "x"))`."""
        if not isinstance(expression, Condition):
            raise UserErrorException(f"filter({expression!r}): give a condition such as dataset['age'] > 30.")
        return self._with(("filter", expression.plain))

    def __getitem__(self, key: str) -> ColumnExpression:
        """A column, to be compared."""
        return ColumnExpression(key)

    # --- moments

    def with_timestamp_columns(
        self,
        timestamp: str | None = None,
        partition_timestamp: str | None = None,
        validate: bool = False,
        **others: Any,
    ) -> TabularDataset:
        """The dataset with a column by which time_before and the others choose."""
        return dataclasses.replace(
            self,
            reading={
                **self.reading,
                "timestamp": timestamp or partition_timestamp or others.get("fine_grain_timestamp"),
            },
        )

    @property
    def timestamp_columns(self) -> tuple[str | None, None]:
        """The column that with_timestamp_columns has named."""
        return (self.reading.get("timestamp"), None)

    def time_before(self, end_time: Any, include_boundary: bool = True, validate: bool = True) -> TabularDataset:
        """The rows up to a moment."""
        return self.filter(self._moment("<=" if include_boundary else "<", end_time))

    def time_after(self, start_time: Any, include_boundary: bool = True, validate: bool = True) -> TabularDataset:
        """The rows from a moment on."""
        return self.filter(self._moment(">=" if include_boundary else ">", start_time))

    def time_between(
        self, start_time: Any, end_time: Any, include_boundary: bool = True, validate: bool = True
    ) -> TabularDataset:
        """The rows between two moments."""
        return self.time_after(start_time, include_boundary).time_before(end_time, include_boundary)

    def time_recent(
        self, time_delta: dt.timedelta, include_boundary: bool = True, validate: bool = True
    ) -> TabularDataset:
        """The rows of the last so much time."""
        return self.time_after(dt.datetime.now(dt.timezone.utc) - time_delta, include_boundary)

    def _moment(self, verb: str, moment: Any) -> Condition:
        column = self.reading.get("timestamp")
        if column is None:
            raise UserErrorException("the dataset has no timestamp column. Name it: with_timestamp_columns('time').")
        return ColumnExpression(column)._compared(verb, moment)


def _as_name(column: Any) -> str:
    """The one value of a column in a folder's name, as Hive has it where it is missing."""
    if column.isna().iloc[0]:
        return "__HIVE_DEFAULT_PARTITION__"
    return str(column.iloc[0]).replace("%", "%25").replace("/", "%2F")


class Condition:
    """plain: as the steps of a dataset have it."""

    def __init__(self, plain: tuple[Any, ...]) -> None:
        self.plain = plain

    def __and__(self, other: Condition) -> Condition:
        return Condition(("and", self.plain, other.plain))

    def __or__(self, other: Condition) -> Condition:
        return Condition(("or", self.plain, other.plain))

    def __invert__(self) -> Condition:
        return Condition(("not", self.plain))

    def __bool__(self) -> bool:
        raise UserErrorException(
            "a condition is neither true nor false by itself: join several by & and |, in brackets."
        )


class ColumnExpression:
    """A column of a dataset; compared, it is a condition."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _compared(self, verb: str, value: Any) -> Condition:
        if isinstance(value, (dt.datetime, dt.date)):
            value = ("time", value.isoformat())
        elif hasattr(value, "item"):
            value = value.item()
        elif not isinstance(value, (str, int, float, bool)):
            raise UserErrorException(
                f"{self._name!r} can't be compared with {value!r}: give a number, a text or a moment."
            )
        return Condition((verb, self._name, value))

    def __lt__(self, value: Any) -> Condition:
        return self._compared("<", value)

    def __le__(self, value: Any) -> Condition:
        return self._compared("<=", value)

    def __gt__(self, value: Any) -> Condition:
        return self._compared(">", value)

    def __ge__(self, value: Any) -> Condition:
        return self._compared(">=", value)

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("==", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("!=", value)

    __hash__ = None  # type: ignore[assignment]

    def is_null(self) -> Condition:
        """Where nothing is."""
        return Condition(("null", self._name))


def of_native(native: Any) -> Any:
    """A dataset of Paceline's with the SDK's calls; anything else, such as a path, as it is."""
    if isinstance(native, AbstractDataset):
        return native
    if isinstance(native, file.TabularDataset):
        return TabularDataset.of(native)
    return FileDataset.of(native) if isinstance(native, dataset.FileDataset) else native
