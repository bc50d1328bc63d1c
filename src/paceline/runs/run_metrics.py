"""The part of a run that logs metrics, on whatever `_write_*` the run has."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.errors import MetricError
from paceline.runs.metrics import plain_value


class LogsMetrics(ABC):
    """The logging calls. Each returns once its value would survive a SIGKILL of this process."""

    def log(self, name: str, value: object, description: str = "", step: int | None = None) -> None:
        """Log a scalar: int, float, str, bool, or a numpy or torch scalar. NaN and the infinities are kept as they are.

        The first value under a name is a scalar in `get_metrics`, more make a list. Whatever is no scalar never ends the
        script: lists, tuples, ranges, generators, arrays and tensors are kept as lists, None as None, all else as its `repr`.

        Raises:
            MetricError: the name is no text, or empty.
            OSError: the disk is full.
        """
        try:
            self._write_scalar(name, value, step)
        # Tried first and not asked about: nearly all that is logged is a scalar.
        except MetricError:
            self._log_any(name, value, step)

    def _log_any(self, name: str, value: object, step: int | None) -> None:
        if callable(listed := getattr(value, "tolist", None)):
            value = listed()  # of an array or a tensor, in which lists may lie in lists
        if isinstance(value, (list, tuple, set, frozenset, range, Iterator)):
            self._write_other("list", name, [plain_value(item) for item in value])
        else:
            self._write_scalar(name, plain_value(value), step)

    def log_list(self, name: str, value: Iterable[object], description: str = "") -> None:
        """Log a list of scalars at once; generators are read to their end.

        Raises:
            MetricError: not iterable.
        """
        # Each of these can be gone through as well, by letters, numbers or keys.
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise MetricError(
                f"metric {name!r}: a {type(value).__name__} is not a list of scalars. Use log for one value."
            )
        self._write_other("list", name, [plain_value(item) for item in value])

    def log_row(self, name: str, description: str | None = None, **columns: object) -> None:
        """Log one row of named scalars; several rows of one name make a table, a dict of lists.

        Raises:
            MetricError: no column.
        """
        if not columns:
            raise MetricError(
                f"metric {name!r}: a row without columns. Give each as a keyword: log_row(name, x=1, y=2)."
            )
        self._write_other("row", name, {key: plain_value(item) for key, item in columns.items()})

    def log_table(self, name: str, value: Mapping[str, object], description: str = "") -> None:
        """Log a table: a dict of column name -> scalar or list of scalars.

        Raises:
            MetricError: not a dict.
        """
        if not isinstance(value, Mapping):
            raise MetricError(
                f"metric {name!r}: a {type(value).__name__} is not a table. Give a dict of column -> list."
            )
        self._write_other("table", name, {str(key): _column(item) for key, item in value.items()})

    def log_image(self, name: str, path: str | None = None, plot: Any = None, description: str = "") -> None:
        """Keep an image file, or a matplotlib figure or `pyplot` as PNG; the metric's value is the file's name.

        Raises:
            MetricError: neither or both of `path` and `plot`, or a plot that can't be saved.
        """
        if (path is None) == (plot is None):
            raise MetricError(f"metric {name!r}: give log_image either the path of an image or a plot.")
        if plot is not None and not callable(getattr(plot, "savefig", None)):
            raise MetricError(
                f"metric {name!r}: a {type(plot).__name__} has no savefig. Give a matplotlib figure or pyplot."
            )
        ending = os.path.splitext(path)[1] if path is not None else ".png"
        self._write_image(name, f"images/{plain_file_name(name)}_{time.time_ns()}{ending}", path, plot)

    @abstractmethod
    def _write_scalar(self, name: str, value: object, step: int | None) -> None: ...

    @abstractmethod
    def _write_other(self, kind: str, name: str, value: object) -> None: ...

    @abstractmethod
    def _write_image(self, name: str, file_name: str, path: str | None, plot: Any) -> None: ...


def plain_file_name(metric: object) -> str:
    """A metric's name as part of a file's: it may be `val/loss` or `..`, and its image must not lie in another folder for it."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in str(metric))


def _column(value: object) -> object:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        return [plain_value(item) for item in value]
    return plain_value(value)
