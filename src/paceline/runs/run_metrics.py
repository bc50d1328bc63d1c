"""The methods of a run that log metrics, for any class with the `_write_*` methods."""

from __future__ import annotations

import os
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.errors import MetricError
from paceline.runs.metrics import plain_value


class LogsMetrics(ABC):
    """The logging calls. When a call returns, its value survives a SIGKILL of this process."""

    def log(
        self, name: str | Mapping[str, object], value: object = ..., description: str = "", step: int | None = None
    ) -> None:
        """Log a scalar: int, float, str, bool, or a numpy or torch scalar, also NaN or infinite.

        A dict instead of the name logs each of its values under its key: `log({"loss": 0.1, "accuracy": 0.9}, step=3)`.

        The first value under a name is a scalar in `get_metrics`, more make a list. Other types never end the script: lists,
        tuples, ranges, generators, arrays and tensors are stored as lists, None as None, other values as their `repr`.

        Args:
            name: Name of the metric, or a dict of name to value.
            value: The value.
            description: Ignored; the Azure SDK has it.
            step: Training step of the value.

        Raises:
            MetricError: The name is empty or not a string, or there is no value.
            OSError: The disk is full.
        """
        if isinstance(name, Mapping):
            if value is not ...:
                raise MetricError(f"log got a dict of metrics and the value {value!r} too. Give the dict alone.")
            for key, item in name.items():
                self.log(key, item, description, step)
            return
        if value is ...:
            raise MetricError(f"metric {name!r}: log got no value. Write log({name!r}, value) or log({{name: value}}).")
        try:
            self._write_scalar(name, value, step)
        # Catch the error instead of testing the type first: nearly all values are scalars.
        except MetricError:
            self._log_any(name, value, step)

    def _log_any(self, name: str, value: object, step: int | None) -> None:
        if callable(listed := getattr(value, "tolist", None)):
            value = listed()  # an array or a tensor, perhaps with nested lists
        if isinstance(value, (list, tuple, set, frozenset, range, Iterator)):
            self._write_other("list", name, [plain_value(item) for item in value], step)
        else:
            self._write_scalar(name, plain_value(value), step)

    def log_list(self, name: str, value: Iterable[object], description: str = "", step: int | None = None) -> None:
        """Log a list of scalars at once; generators are consumed.

        Args:
            name: Name of the metric.
            value: The values, in order.
            description: Ignored; the Azure SDK has it.
            step: Training step of the values.

        Raises:
            MetricError: The value is not iterable.
        """
        # These types are iterable too (letters, numbers or keys), but they are not lists of scalars.
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise MetricError(f"metric {name!r}: a {type(value).__name__} is not a list of scalars; log takes a value.")
        self._write_other("list", name, [plain_value(item) for item in value], step)

    def log_row(self, name: str, description: str | None = None, **columns: object) -> None:
        """Log one row of named scalars; several rows of one name make a table, a dict of lists.

        Args:
            name: Name of the metric.
            description: Ignored; the Azure SDK has it.
            columns: Column to value.

        Raises:
            MetricError: There is no column.
        """
        if not columns:
            raise MetricError(f"metric {name!r}: a row without columns. Give keywords: log_row(name, x=1, y=2).")
        self._write_other("row", name, {key: plain_value(item) for key, item in columns.items()})

    def log_table(self, name: str, value: Mapping[str, object], description: str = "", step: int | None = None) -> None:
        """Log a table: a dict of column name to scalar or list of scalars.

        Args:
            name: Name of the metric.
            value: Column to value, or to a list of values.
            description: Ignored; the Azure SDK has it.
            step: Training step of the table.

        Raises:
            MetricError: The value is not a dict.
        """
        if not isinstance(value, Mapping):
            raise MetricError(f"metric {name!r}: a {type(value).__name__} is not a table. Give a dict column -> list.")
        self._write_other("table", name, {str(key): _column(item) for key, item in value.items()}, step)

    def log_image(
        self, name: str, path: object = None, plot: object = None, description: str = "", step: int | None = None
    ) -> None:
        """Store an image; the metric's value is the file's name.

        Args:
            name: Name of the metric.
            path: An image file, or any value that `plot` accepts.
            plot: A matplotlib figure or `pyplot`, a PIL image, or an array or tensor of H x W, H x W x C or C x H x W with 1, 3
                or 4 channels: bytes, or floats from 0 to 1. Stored as PNG.
            description: Ignored; the Azure SDK has it.
            step: Training step of the image.

        Raises:
            MetricError: Neither or both of `path` and `plot` were given, or the plot cannot be saved.
        """
        path, plot = self._image(name, path, plot)
        ending = os.path.splitext(path)[1] if path is not None else ".png"
        self._write_image(name, f"images/{plain_file_name(name)}_{time.time_ns()}{ending}", path, plot, step)

    def _image(self, name: str, path: Any, plot: Any) -> tuple[str | None, Any]:
        """Return (path, None), or (None, something with `savefig`)."""
        if (path is None) == (plot is None):
            raise MetricError(f"metric {name!r}: give log_image either the path of an image or a plot.")
        if isinstance(path, (str, os.PathLike)):
            return os.fspath(path), None
        given = path if plot is None else plot
        if callable(getattr(given, "savefig", None)):
            return None, given
        if callable(getattr(given, "save", None)) and hasattr(given, "mode"):
            return None, _Saved(given)
        if hasattr(given, "shape") and (hasattr(given, "__array__") or hasattr(given, "detach")):
            return None, _Pixels(name, given)
        raise MetricError(
            f"metric {name!r}: a {type(given).__name__} is not an image. Give a path, a matplotlib figure or pyplot, "
            "a PIL image or "
            "an array."
        )

    @abstractmethod
    def _write_scalar(self, name: str, value: object, step: int | None) -> None: ...

    @abstractmethod
    def _write_other(self, kind: str, name: str, value: object, step: int | None = None) -> None: ...

    @abstractmethod
    def _write_image(self, name: str, file_name: str, path: str | None, plot: Any, step: int | None = None) -> None: ...


def plain_file_name(metric: object) -> str:
    """Return a metric's name as a file name: `val/loss` or `..` must not name another folder."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in str(metric))


def _column(value: object) -> object:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        return [plain_value(item) for item in value]
    return plain_value(value)


#: Channels of an image -> PNG's number for the kind of color.
_COLOR = {1: 0, 3: 2, 4: 6}


class _Saved:
    """A PIL image with the `savefig` method of a matplotlib figure."""

    def __init__(self, image: Any) -> None:
        self._image = image

    def savefig(self, path: Any, format: str) -> None:
        self._image.save(path, format=format)


class _Pixels:
    """An array or a tensor as a PNG file, which needs neither PIL nor matplotlib."""

    def __init__(self, name: str, given: Any) -> None:
        # Convert a torch tensor to an array. The copy is changed below, and the caller's data is not.
        array = (given.detach().cpu() if hasattr(given, "detach") else given).__array__().copy()
        if array.ndim == 2:
            array = array[:, :, None]
        elif array.ndim == 3 and array.shape[2] not in _COLOR and array.shape[0] in _COLOR:
            array = array.transpose(1, 2, 0)
        if array.ndim != 3 or array.shape[2] not in _COLOR or not array.size:
            raise MetricError(
                f"metric {name!r}: an array of shape {tuple(given.shape)} is not an image. Give H x W, H x W x C or "
                "C x H x W with "
                "1, 3 or 4 channels."
            )
        if array.dtype.kind == "f":
            array[~(array >= 0)] = 0  # NaN too
            array = array.clip(0, 1) * 255
        elif array.dtype.kind == "b":
            array = array * 255
        self._array = array.round().clip(0, 255).astype("uint8")

    def savefig(self, path: Any, format: str) -> None:
        height, width, channels = self._array.shape
        head = struct.pack(">IIBBBBB", width, height, 8, _COLOR[channels], 0, 0, 0)
        # Each row begins with the number of its filter, 0 for none.
        rows = b"".join(b"\0" + row.tobytes() for row in self._array)
        with open(path, "wb") as file:
            file.write(b"\x89PNG\r\n\x1a\n")
            for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
                file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
