"""Conditions on rows (`steps`), asked of a pandas frame."""

from __future__ import annotations

import operator
from typing import Any

from paceline.errors import DataError

_COMPARED = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne},
}


def mask(pandas: Any, table: Any, condition: tuple[Any, ...]) -> Any:
    """Which rows a condition holds for; where a value is missing, no comparison does.

    Raises:
        DataError: a column that is not there, or that can't be compared with the value.
    """
    verb, *values = condition
    if verb in ("and", "or"):
        one, other = (mask(pandas, table, each) for each in values)
        return one & other if verb == "and" else one | other
    if verb == "not":
        return ~mask(pandas, table, values[0])
    name = values[0]
    if name not in table.columns:
        raise DataError(f"filter: there is no column {name!r}; there are {[*map(str, table.columns)]}.")
    column = table[name]
    if verb == "null":
        return column.isna()
    value = values[1]
    if isinstance(value, tuple):
        # Moments are compared as such, also where the file has them as text.
        column, value = pandas.to_datetime(column, utc=True), pandas.Timestamp(value[1])
        value = value.tz_localize("UTC") if value.tzinfo is None else value.tz_convert("UTC")
    try:
        return _COMPARED[verb](column, value).fillna(False).astype(bool)
    except TypeError as error:
        raise DataError(f"filter: the column {name!r} can't be compared with {value!r}: {error}.") from error
