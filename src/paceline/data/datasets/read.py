"""Files of a table -> one pandas frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.data.datasets import columns, conditions
from paceline.data.datasets.local import LocalFile
from paceline.data.datasets.steps import COLUMNS, Steps, chosen
from paceline.errors import DataError

_ENDINGS = {
    **{".csv": "delimited", ".tsv": "delimited", ".txt": "delimited"},
    **{".parquet": "parquet", ".pq": "parquet", ".jsonl": "json_lines", ".ndjson": "json_lines", ".json": "json_lines"},
}


def format_of(files: Sequence[LocalFile]) -> str:
    """ "delimited", "parquet" or "json_lines", by the endings of the files' names.

    Raises:
        DataError: they say nothing, or several things.
    """
    # "a.csv.gz" counts as .csv.
    endings = {"." + file.relative.removesuffix(".gz").rpartition(".")[2].lower() for file in files}
    found = {_ENDINGS.get(ending) for ending in endings}
    if len(found) != 1 or None in found:
        raise DataError(f"files that end with {sorted(endings)}: how they are read as a table can't be told.")
    return str(found.pop())


def read_frames(files: Sequence[LocalFile], reading: Mapping[str, Any], steps: Steps) -> Any:
    """The rows of all files, after the steps.

    Files of no bytes have no rows. Rows beyond a leading `take` are not read, file by file.

    Raises:
        DataError: pandas is missing, a file that can't be read, columns that are not there.
    """
    pandas = _pandas()
    # Only a `take` in the first place says how many rows are needed: what stands before it needs more.
    enough = steps[0][1] if steps and steps[0][0] == "take" else None
    frames, rows = [], 0
    for frame in _frames(pandas, files, reading):
        frames.append(frame)
        rows += len(frame)
        if enough is not None and rows >= enough:
            break
    # An empty frame among others would change their types.
    filled = [frame for frame in frames if len(frame)] or frames[:1]
    table = pandas.concat(filled, ignore_index=True) if filled else pandas.DataFrame()
    for step in steps:
        table = _after(pandas, table, step)
    return table.reset_index(drop=True)


def _frames(pandas: Any, files: Sequence[LocalFile], reading: Mapping[str, Any]) -> Iterator[Any]:
    for file in files:
        try:
            # An empty text file means no rows, though pandas fails on such a CSV file. A Parquet file has a footer, so an empty
            # one is broken.
            if file.path.stat().st_size == 0 and reading["format"] != "parquet":
                continue
            frame = columns.typed(pandas, _read(pandas, file, reading), reading)
            yield columns.with_path(pandas, frame, file, reading)
        except ImportError as error:
            raise DataError(
                f"{file.relative!r} needs {error.name or 'pyarrow'}: pip install 'paceline[tabular]'."
            ) from error
        # pandas and pyarrow raise their own kinds, all of them ValueErrors but the last three.
        except (ValueError, OSError, TypeError, KeyError) as error:
            raise DataError(
                f"{file.relative!r} can't be read as {reading['format']}: {str(error).strip() or type(error).__name__}. "
                "Mend the file, or name the files that are meant by a pattern."
            ) from error


def _read(pandas: Any, file: LocalFile, reading: Mapping[str, Any]) -> Any:
    if reading["format"] == "parquet":
        # pyarrow would take a folder's name such as a=1 for a column if it was given the path.
        with open(file.path, "rb") as opened:
            return pandas.read_parquet(opened)
    compression = "gzip" if file.relative.endswith(".gz") else None
    encoding = reading.get("encoding", "utf-8")
    if reading["format"] == "json_lines":
        return pandas.read_json(file.path, lines=True, encoding=encoding, compression=compression)
    separator = reading.get("separator") or ("\t" if file.relative.removesuffix(".gz").endswith(".tsv") else ",")
    options: dict[str, Any] = {"sep": separator, "encoding": encoding, "compression": compression}
    if not reading.get("header", True):
        options["header"] = None
    if not reading.get("infer_column_types", True):
        options["dtype"] = str
    elif texts := [name for name, kind in (reading.get("types") or {}).items() if kind in ("str", "bool")]:
        # As they stand in the file: 007 is no 7.
        options["dtype"] = dict.fromkeys(texts, str)
    if reading.get("empty_as_string"):
        options["keep_default_na"] = False
    frame = pandas.read_csv(file.path, **options)
    if not reading.get("header", True):
        frame.columns = [f"Column{number}" for number in range(1, len(frame.columns) + 1)]
    return frame


def _after(pandas: Any, table: Any, step: tuple[Any, ...]) -> Any:
    verb = step[0]
    if verb == "filter":
        return table[conditions.mask(pandas, table, step[1])].reset_index(drop=True)
    if verb not in COLUMNS:
        return table.iloc[list(chosen(step, len(table)))]
    names = list(step[1])
    if missing := [name for name in names if name not in table.columns]:
        raise DataError(f"{verb}_columns: there is no column {missing[0]!r}; there are {[*map(str, table.columns)]}.")
    return table[names] if verb == "keep" else table.drop(columns=names)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise DataError(
            "a tabular dataset is read with pandas, which is not installed: pip install 'paceline[tabular]'."
        ) from error
    return pandas
