"""Read table files into one pandas frame."""

from __future__ import annotations

import gzip
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.datasets.sources import LocalFile
from paceline.data.datasets.steps import COLUMNS, Reading, Step, Steps, chosen
from paceline.errors import DataError

if TYPE_CHECKING:
    import pandas

_ENDINGS = {
    **{".csv": "delimited", ".tsv": "delimited", ".txt": "delimited"},
    **{".parquet": "parquet", ".pq": "parquet", ".jsonl": "json_lines", ".ndjson": "json_lines", ".json": "json_lines"},
}

#: Word that combines conditions -> the operator that does so for columns of pandas.
_JOINED: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "not": operator.invert}
_COMPARED = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne},
}

#: Types for `set_column_types`; a datetime may have a format: "datetime:%Y-%m-%d".
TYPES = ("str", "int", "float", "bool", "datetime")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
#: Fields of a datetime in a partition_format: text, number of digits, strptime code.
_MOMENT = (*(("yyyy", 4, "%Y"), ("MM", 2, "%m"), ("dd", 2, "%d")), *(("HH", 2, "%H"), ("mm", 2, "%M"), ("ss", 2, "%S")))


def format_of(files: Sequence[LocalFile]) -> str:
    """Return the files' format by extension: "delimited", "parquet" or "json_lines".

    Raises:
        DataError: The extensions are unknown or mixed.
    """
    # Ignore a final ".gz": the extension of "a.csv.gz" is ".csv".
    endings = {"." + file.relative.removesuffix(".gz").rpartition(".")[2].lower() for file in files}
    formats = {_ENDINGS.get(ending) for ending in endings}
    if len(formats) != 1 or None in formats:
        raise DataError(
            f"the file extensions {sorted(endings)} do not determine one table format. Select files of one format by a pattern."
        )
    return str(formats.pop())


def read_frames(files: Sequence[LocalFile], reading: Reading, steps: Steps) -> pandas.DataFrame:
    """Read all rows into one frame, and apply the dataset's steps, such as filters.

    Empty text files have no rows. If the first step is ("take", n), reading stops after the file that completes n rows.

    Raises:
        DataError: pandas is missing, a file can't be read, or a column does not exist.
    """
    try:
        import pandas
    except ImportError as error:
        raise DataError(
            "a tabular dataset is read with pandas, which is not installed: pip install 'paceline[tabular]'."
        ) from error
    # Stop reading early only if `take` is the first step: after a filter, the first files may have too few rows.
    enough = steps[0][1] if steps and steps[0][0] == "take" else None
    frames, rows = [], 0
    for frame in _frames(files, reading):
        frames.append(frame)
        rows += len(frame)
        if enough is not None and rows >= enough:
            break
    # Leave out empty frames, which would change the column types of the other frames.
    filled = [frame for frame in frames if len(frame)] or frames[:1]
    table = pandas.concat(filled, ignore_index=True) if filled else pandas.DataFrame()
    for step in steps:
        table = _after(table, step)
    return table.reset_index(drop=True)


def _frames(files: Sequence[LocalFile], reading: Reading) -> Iterator[pandas.DataFrame]:
    for file in files:
        try:
            # pandas fails on an empty CSV file. An empty Parquet file is broken: it lacks the footer.
            if file.path.stat().st_size == 0 and reading["format"] != "parquet":
                continue
            yield with_path(typed(_read(file, reading), reading), file, reading)
        except ImportError as error:
            raise DataError(
                f"{file.relative!r} needs {error.name or 'pyarrow'}: pip install 'paceline[tabular]'."
            ) from error
        # Errors of pandas and pyarrow are ValueErrors, or belong to the last three classes of this tuple.
        except (ValueError, RecursionError, OSError, TypeError, KeyError) as error:
            raise DataError(
                f"{file.relative!r} can't be read as {reading['format']}: {str(error).strip() or type(error).__name__}. "
                "Fix the file, or select files by a pattern."
            ) from error


def _read(file: LocalFile, reading: Reading) -> pandas.DataFrame:
    import pandas

    # Columns to read as they are written, so that "007" does not become 7, nor an integer beside a missing value a float.
    exact = {name for name, kind in (reading.get("types") or {}).items() if kind in ("str", "int", "bool")}
    if reading["format"] == "parquet":
        # Pass an open file: given a path, pyarrow would turn a folder name such as a=1 into a column.
        with open(file.path, "rb") as opened:
            frame = pandas.read_parquet(opened)
            names = [name for name in frame.columns if name in exact]
            frame[names] = pandas.read_parquet(opened, columns=names, dtype_backend="numpy_nullable")
            return frame
    compression = "gzip" if file.relative.endswith(".gz") else None
    encoding = reading.get("encoding", "utf-8")
    if reading["format"] == "json_lines":
        # Not by pandas.read_json, which turns the text "007" into a number, and a number in a column `*_at` into a date.
        with (gzip.open if compression else open)(file.path, "rt", encoding=encoding) as opened:
            rows = json.loads("[" + ",\n".join(filter(None, map(str.strip, opened))) + "]")
        frame = pandas.DataFrame(rows)
        names = [name for name in frame.columns if name in exact]
        frame[names] = pandas.DataFrame(rows, dtype=object)[names]
        return frame
    separator = reading.get("separator") or ("\t" if file.relative.removesuffix(".gz").endswith(".tsv") else ",")
    has_header = reading.get("header", True)
    frame = pandas.read_csv(
        file.path,
        sep=separator,
        encoding=encoding,
        compression=compression,
        header="infer" if has_header else None,
        dtype=dict.fromkeys(exact, str) if reading.get("infer_column_types", True) else str,
        keep_default_na=not reading.get("empty_as_string"),
    )
    if not has_header:
        frame.columns = [f"Column{number}" for number in range(1, len(frame.columns) + 1)]
    return frame


def _after(table: pandas.DataFrame, step: Step) -> pandas.DataFrame:
    verb = step[0]
    if verb == "filter":
        return table[mask(table, step[1])].reset_index(drop=True)
    if verb not in COLUMNS:
        return table.iloc[list(chosen(step, len(table)))]
    names = list(step[1])
    _check_columns(table, names, f"{verb}_columns")
    return table[names] if verb == "keep" else table.drop(columns=names)


def mask(table: pandas.DataFrame, condition: Step) -> pandas.Series:
    """Return a boolean column: whether each row matches a filter's condition.

    Raises:
        DataError: A column does not exist, or can't be compared with the value.
    """
    verb, *values = condition
    if verb in _JOINED:
        return _JOINED[verb](*(mask(table, each) for each in values))
    name = values[0]
    _check_columns(table, [name], "filter")
    column = table[name]
    if verb == "null":
        return column.isna()
    value = values[1]
    if isinstance(value, tuple):
        import pandas

        # Compare as datetimes, even if the column holds text.
        column, value = pandas.to_datetime(column, utc=True), pandas.Timestamp(value[1])
        value = value.tz_localize("UTC") if value.tzinfo is None else value.tz_convert("UTC")
    try:
        return _COMPARED[verb](column, value).fillna(False).astype(bool)
    except TypeError as error:
        raise DataError(f"filter: the column {name!r} can't be compared with {value!r}: {error}.") from error


def typed(frame: pandas.DataFrame, reading: Reading) -> pandas.DataFrame:
    """Convert columns to the dataset's `set_column_types`. Invalid values become missing values.

    Raises:
        DataError: A column does not exist.
    """
    import pandas

    for name, wanted in (reading.get("types") or {}).items():
        _check_columns(frame, [name], "set_column_types")
        kind, _, form = wanted.partition(":")
        if kind == "datetime":
            frame[name] = pandas.to_datetime(frame[name], format=form or None, errors="coerce")
        else:
            frame[name] = _CONVERTED[kind](frame[name])
    return frame


def _number(column: pandas.Series) -> pandas.Series:
    import pandas

    return pandas.to_numeric(column, errors="coerce", dtype_backend="numpy_nullable")


def _whole(column: pandas.Series) -> pandas.Series:
    if column.dtype.kind != "O":
        return _number(column).round().astype("Int64")
    text = column.astype(str).str.strip().str.lower().replace({"true": "1", "false": "0"})
    # Convert whole numbers on their own, because a fraction in the column would turn them into floats, which are less exact.
    whole = _number(text.where(text.str.fullmatch("[+-]?[0-9]{1,18}")))
    return whole.astype("Int64").fillna(_number(text).round().astype("Int64"))


#: Functions that convert a column, by type.
_CONVERTED: dict[str, Callable[[pandas.Series], pandas.Series]] = {
    "float": lambda column: _number(column).astype("float64"),
    # Only the nullable Int64 can hold missing integers.
    "int": _whole,
    "bool": lambda column: column.map(lambda value: _TRUTH.get(str(value).lower())).astype("boolean"),
    "str": lambda column: column.astype(str).where(column.notna()),
}


def _check_columns(frame: pandas.DataFrame, names: Sequence[str], what: str) -> None:
    if missing := [name for name in names if name not in frame.columns]:
        raise DataError(f"{what}: there is no column {missing[0]!r}; there are {[*map(str, frame.columns)]}.")


def with_path(frame: pandas.DataFrame, file: LocalFile, reading: Reading) -> pandas.DataFrame:
    """Add the columns of `include_path` and `partition_format` to a file's rows.

    The column Path has the file's path. Other columns have parts of the path, such as city and day.

    Raises:
        DataError: The path does not match the partition_format.
    """
    import pandas

    if reading.get("include_path"):
        frame.insert(0, "Path", f"/{file.relative}")
    if form := reading.get("partition_format"):
        _, moments = path_pattern(form)
        for place, (name, text) in enumerate(path_parts(form, file.relative, file.path).items()):
            frame.insert(place, name, pandas.to_datetime(text, format=moments[name]) if name in moments else text)
    return frame


def path_parts(form: str, relative: str, path: Path) -> dict[str, str]:
    """Return the text of each `{name}` of a partition_format in a file's path.

    Args:
        form: A partition_format, such as "/{city}/{day:yyyy/MM/dd}/data.csv".
        relative: The file's path below the dataset's folder.
        path: The file's full path.

    Raises:
        DataError: The path does not match the partition_format.
    """
    # `form` may begin with the dataset's folder, but a worker has the files elsewhere. So also try `form` without it.
    short = form[form.rfind("/", 0, form.find("{")) :] if "/" in form.partition("{")[0] else form
    inside = f"/{relative}"
    for pattern, text in ((form, inside), (form, path.as_posix()), (form, path.resolve().as_posix()), (short, inside)):
        if (match := re.search(path_pattern(pattern)[0], text)) is not None:
            return match.groupdict()
    raise DataError(f"/{relative} is not of partition_format={form!r}. Choose the files that are by a pattern.")


def path_pattern(form: str) -> tuple[str, dict[str, str]]:
    """Return (regular expression, name -> strptime format) for a partition_format.

    The expression matches the end of a path. In a partition_format, `{name}` stands for text within one folder name,
    `{name:yyyy/MM/dd/HH/mm/ss}` for a datetime, and `*` for any text within one folder name.

    Raises:
        DataError: The partition_format has no `{name}`.
    """
    pattern, moments = "", {}
    for literal, name, moment in re.findall(r"([^{]*)(?:\{(\w+)(?::([^}]*))?\})?", form):
        pattern += re.escape(literal).replace(r"\*", "[^/]*")
        if name and moment:
            digits, read = re.escape(moment), moment
            for word, width, code in _MOMENT:
                digits, read = digits.replace(word, rf"\d{{{width}}}"), read.replace(word, code)
            moments[name] = read
            pattern += f"(?P<{name}>{digits})"
        elif name:
            pattern += f"(?P<{name}>[^/]+?)"
    if "(?P" not in pattern:
        raise DataError(
            f"partition_format={form!r} names no column. Write one such as '/{{city}}/{{day:yyyy/MM/dd}}/data.csv'."
        )
    return f"{pattern}$", moments
