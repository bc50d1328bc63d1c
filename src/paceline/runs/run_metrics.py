"""The methods of a run that log metrics. Subclasses implement the `_write_*` methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from paceline.errors import MetricError
from paceline.runs.metrics import check_name, plain_value

if TYPE_CHECKING:
    from paceline.runs.media import Media, MediaEntry, Source


class LogsMetrics(ABC):
    """The methods of a run that log metrics. Logged values survive a SIGKILL."""

    def log(
        self, name: str | Mapping[str, object], value: object = ..., description: str = "", step: int | None = None
    ) -> None:
        """Log a value: a number, text, bool, or a numpy, torch or TensorFlow scalar.

        A dict instead of the name logs each of its values under its key: `log({"loss": 0.1, "accuracy": 0.9}, step=3)`.

        In `get_metrics`, one value under a name is a scalar, and several values are a list. Values of other types raise
        no error. Lists, tuples, ranges, generators and arrays of one dimension are stored as lists. Matplotlib figures,
        PIL images and byte arrays of H x W x 3 or 4 are stored as images, and other arrays as histograms. Pandas frames
        and lists of dicts are stored as tables. To choose the kind, wrap the value in `paceline.Image`, `Audio`,
        `Video`, `Html`, `Histogram` or `Table`. Other objects are stored as their `repr`.

        Args:
            name: Name of the metric, or a dict of name to value.
            value: The value, which may be NaN or infinite.
            description: Ignored. The Azure SDK has this argument.
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
        # Try the value as a scalar first, because nearly all values are scalars and a test of the type would cost time.
        except MetricError:
            self._log_any(name, value, step)

    def _log_any(self, name: str, value: object, step: int | None) -> None:
        from paceline.runs.media import media_of

        if (media := media_of(value)) is not None:
            self._keep(media, name, step)
            return
        # Convert a TensorFlow tensor, which has `numpy` but neither `tolist` nor `item`.
        if not hasattr(value, "tolist") and callable(to_numpy := getattr(value, "numpy", None)):
            value = to_numpy()
        if callable(listed := getattr(value, "tolist", None)):
            value = listed()  # convert an array or tensor to a Python number, or to a list that may be nested
        if isinstance(value, (list, tuple, set, frozenset, range, Iterator)):
            self._write_other("list", name, [plain_value(item) for item in value], step)
        else:
            self._write_scalar(name, plain_value(value), step)

    def _keep(self, media: Media, name: str, step: int | None) -> None:
        """Log an image or other media. An error only prints a note."""
        from paceline.runs.media import note

        check_name(name)
        try:
            self._write_entry(name, media.entry(name), step)
        # Catch every exception: an object of another library converts itself here, and may raise anything.
        except Exception as error:
            why = str(error).removeprefix(f"metric {name!r}: ")
            note(name, f"the {type(media).__name__} was not kept: {why}")

    def log_list(self, name: str, value: Iterable[object], description: str = "", step: int | None = None) -> None:
        """Log a list of scalars together; generators are consumed.

        Args:
            name: Name of the metric.
            value: The values, in order.
            description: Ignored. The Azure SDK has this argument.
            step: Training step of the values.

        Raises:
            MetricError: The value is not iterable.
        """
        # Refuse strings and mappings, which are iterable, too, but yield letters, bytes or keys.
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise MetricError(f"metric {name!r}: a {type(value).__name__} is not a list of scalars; log takes a value.")
        self._write_other("list", name, [plain_value(item) for item in value], step)

    def log_row(self, name: str, description: str | None = None, **columns: object) -> None:
        """Log one row of named scalars; several rows make a table.

        Args:
            name: Name of the metric.
            description: Ignored. The Azure SDK has this argument.
            columns: The value of each column.

        Raises:
            MetricError: There is no column.
        """
        if not columns:
            raise MetricError(f"metric {name!r}: a row without columns. Give keywords: log_row(name, x=1, y=2).")
        self._write_other("row", name, {key: plain_value(item) for key, item in columns.items()})

    def log_table(self, name: str, value: object, description: str = "", step: int | None = None) -> None:
        """Log a table: a dict of columns, a list of dicts, or a pandas frame.

        Args:
            name: Name of the metric.
            value: A dict of each column's value or list of values, a list with a dict for each row, or a pandas frame.
            description: Ignored. The Azure SDK has this argument.
            step: Training step of the table.

        Raises:
            MetricError: The value is not a table.
        """
        from paceline.runs.media import columns_of

        self._write_other("table", name, columns_of(name, value), step)

    def log_image(
        self, name: str, path: object = None, plot: object = None, description: str = "", step: int | None = None
    ) -> None:
        """Store an image; the metric's value is the file's name.

        Args:
            name: Name of the metric.
            path: An image file, or any value that `plot` accepts.
            plot: A matplotlib figure or `pyplot`, a PIL image, or an array or tensor of H x W, H x W x C or C x H x W with 1, 3
                or 4 channels: bytes, or floats from 0 to 1. Stored as PNG.
            description: Ignored. The Azure SDK has this argument.
            step: Training step of the image.

        Raises:
            MetricError: Neither or both of `path` and `plot` were given, or the plot cannot be saved.
        """
        from paceline.runs.media import image_entry

        self._write_entry(name, image_entry(name, path, plot), step)

    def _write_entry(self, name: str, entry: MediaEntry, step: int | None) -> None:
        from paceline.runs.media import file_name

        if entry.source is None:
            self._write_other(entry.kind, name, entry.value, step)
        else:
            self._write_file(entry.kind, name, file_name(name, entry), entry.source, step)

    @abstractmethod
    def _write_scalar(self, name: str, value: object, step: int | None) -> None: ...

    @abstractmethod
    def _write_other(self, kind: str, name: str, value: object, step: int | None = None) -> None: ...

    @abstractmethod
    def _write_file(self, kind: str, name: str, file_name: str, source: Source, step: int | None = None) -> None: ...
