"""Columns of a table beside those that are in its files: of the types that were asked for, and of what the files' paths say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.data.datasets.local import LocalFile
from paceline.errors import DataError

#: What `set_column_types` takes; a moment also with its format: "datetime:%Y-%m-%d".
TYPES = ("str", "int", "float", "bool", "datetime")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
#: Of a partition_format: word, digits, and what `strptime` calls it.
_MOMENT = (
    *(("yyyy", 4, "%Y"), ("MM", 2, "%m"), ("dd", 2, "%d")),
    *(("HH", 2, "%H"), ("mm", 2, "%M"), ("ss", 2, "%S")),
)


def typed(pandas: Any, frame: Any, reading: Mapping[str, Any]) -> Any:
    """The frame with the types that were asked for; what can't be of its type is missing.

    Raises:
        DataError: a column that is not there.
    """
    for name, wanted in (reading.get("types") or {}).items():
        if name not in frame.columns:
            raise DataError(f"set_column_types: there is no column {name!r}; there are {[*map(str, frame.columns)]}.")
        column, (kind, _, form) = frame[name], wanted.partition(":")
        if kind == "datetime":
            frame[name] = pandas.to_datetime(column, format=form or None, errors="coerce")
        elif kind in ("float", "int"):
            numbers = pandas.to_numeric(column, errors="coerce")
            # Only Int64, with a capital letter, knows integers of which some are missing.
            frame[name] = numbers.astype("float64") if kind == "float" else numbers.round().astype("Int64")
        elif kind == "bool":
            frame[name] = column.map(lambda value: _TRUTH.get(str(value).lower())).astype("boolean")
        else:
            frame[name] = column.where(column.isna(), column.astype(str))
    return frame


def with_path(pandas: Any, frame: Any, file: LocalFile, reading: Mapping[str, Any]) -> Any:
    """The frame with columns of what the file's path says.

    Raises:
        DataError: the path is not of the partition_format.
    """
    if reading.get("include_path"):
        frame.insert(0, "Path", f"/{file.relative}")
    if form := reading.get("partition_format"):
        _, moments = path_pattern(form)
        for place, (name, text) in enumerate(path_parts(form, file.relative, file.path).items()):
            value = pandas.to_datetime(text, format=moments[name]) if name in moments else text
            frame.insert(place, name, value)
    return frame


def path_parts(form: str, relative: str, path: Path) -> dict[str, str]:
    """The named parts of a file's path by a partition_format. relative: below the dataset's folder; path: where it lies.

    Raises:
        DataError: the path is not of the partition_format.
    """
    # What stands before the first name may be the dataset's own folder, of which a worker sees nothing.
    short = form[form.rfind("/", 0, form.find("{")) :] if "/" in form.partition("{")[0] else form
    inside = f"/{relative}"
    for pattern, text in ((form, inside), (form, path.as_posix()), (form, path.resolve().as_posix()), (short, inside)):
        if (match := re.search(path_pattern(pattern)[0], text)) is not None:
            return match.groupdict()
    raise DataError(f"/{relative} is not of partition_format={form!r}. Choose the files that are by a pattern.")


def path_pattern(form: str) -> tuple[str, dict[str, str]]:
    """A partition_format as a regular expression of a path's end, and of those of its names that are moments how these are read.

    `{name}` is a part of the path, as text; `{name:yyyy/MM/dd/HH/mm/ss}` a moment; `*` any part.

    Raises:
        DataError: nothing is named in it.
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
