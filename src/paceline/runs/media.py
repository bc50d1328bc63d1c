"""Pictures, sounds, videos, pages, histograms and tables as values of `run.log`.

This module does not import numpy, torch, pandas, PIL or matplotlib, but calls methods of the given objects. Files go
into the run's folders `images`, `audio`, `video` and `html`.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
import wave
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import MetricError
from paceline.runs import artifacts
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import plain_file_name, plain_value
from paceline.system.scratch import Scratch

#: The source of a media file: its path, or a function that writes the file at a given path.
Source: TypeAlias = "str | Callable[[Path], object]"

#: Number of an image's channels -> number of PNG's color type for them.
_COLOR = {1: 0, 3: 2, 4: 6}
_AUDIO = (".wav", ".mp3", ".ogg", ".oga", ".flac", ".m4a", ".opus")
_VIDEO = (".mp4", ".webm", ".gif", ".ogv", ".mov", ".m4v")
#: Maximum size in bytes of a file that a script logs.
_MOST_BYTES = 100 << 20
_MOST_ROWS, _MOST_BINS = 10_000, 1000
_ENCODER_S = 600


@dataclass(frozen=True)
class MediaEntry:
    """A metric's value as a run stores it: JSON, or a file."""

    kind: str
    value: object = None
    source: Source | None = None
    ending: str = ""


class Media(ABC):
    """A value of `run.log` that is not a number, such as an image."""

    @abstractmethod
    def entry(self, name: str) -> MediaEntry:
        """Return the value as a run stores it.

        Raises:
            MetricError: The value cannot be converted.
        """


class Image(Media):
    """An image as a value of `run.log`.

    Args:
        image: A matplotlib figure, a PIL image, a file's path, or an array or tensor of H x W, H x W x C or C x H x W with 1, 3
            or 4 channels: bytes, or floats from 0 to 1.

    Examples:
        >>> import numpy
        >>> run = paceline.init()
        >>> paceline.log({"noise": paceline.Image(numpy.random.rand(8, 8, 3))}, step=1)
        >>> [name.partition("_")[0] for name in run.get_file_names()]
        ['images/noise']
        >>> paceline.finish()
    """

    def __init__(self, image: object) -> None:
        self._image = image

    def entry(self, name: str) -> MediaEntry:
        return image_entry(name, self._image, None)


class Audio(Media):
    """A sound as a value of `run.log`.

    Args:
        audio: A file's path, or an array or tensor of 16-bit integers or of floats from -1 to 1. An array's shape is
            [samples], [samples, channels] or [channels, samples].
        rate: The number of samples in a second, for an array.

    Examples:
        >>> import numpy
        >>> run = paceline.init()
        >>> paceline.log({"beep": paceline.Audio(numpy.sin(numpy.arange(8000) / 3), rate=8000)})
        >>> [name.partition("_")[0] for name in run.get_file_names()]
        ['audio/beep']
        >>> paceline.finish()
    """

    def __init__(self, audio: object, rate: int = 44_100) -> None:
        self._audio, self._rate = audio, rate

    def entry(self, name: str) -> MediaEntry:
        if isinstance(self._audio, (str, os.PathLike)):
            return _file_entry("audio", name, self._audio, _AUDIO)
        array = _array(name, self._audio)
        if array.ndim == 2 and array.shape[0] < array.shape[1]:
            array = array.T
        is_sound = array.ndim in (1, 2) and array.size and (array.ndim == 1 or array.shape[1] <= 8)
        _require(is_sound, name, f"an array of shape {array.shape} is no sound. Give samples x channels.")
        is_rate = isinstance(self._rate, int) and self._rate > 0
        _require(is_rate, name, f"rate={self._rate!r} must be a whole number of samples a second.")
        if array.dtype.kind == "f":
            array = _clipped(array, -1) * 32767
        samples = array.clip(-32768, 32767).astype("<i2")
        channels = 1 if array.ndim == 1 else array.shape[1]

        def write(path: Path) -> None:
            with wave.open(str(path), "wb") as file:
                file.setnchannels(channels)
                file.setsampwidth(2)
                file.setframerate(self._rate)
                file.writeframes(samples.tobytes())

        return MediaEntry("audio", source=write, ending=".wav")


class Video(Media):
    """A video as a value of `run.log`.

    Args:
        video: A file's path, or an array or tensor of T x H x W x C or T x C x H x W with 1 or 3 channels of bytes. An array
            needs the program `ffmpeg`.
        fps: The number of pictures in a second, for an array.

    Examples:
        >>> import pathlib
        >>> _ = pathlib.Path("episode.webm").write_bytes(b"...")
        >>> run = paceline.init()
        >>> paceline.log({"episode": paceline.Video("episode.webm")}, step=1)
        >>> [name.partition("_")[0] for name in run.get_file_names()]
        ['video/episode']
        >>> paceline.finish()
    """

    def __init__(self, video: object, fps: float = 10) -> None:
        self._video, self._fps = video, fps

    def entry(self, name: str) -> MediaEntry:
        if isinstance(self._video, (str, os.PathLike)):
            return _file_entry("video", name, self._video, _VIDEO)
        array = _array(name, self._video)
        if array.ndim == 4 and array.shape[3] not in (1, 3) and array.shape[1] in (1, 3):
            array = array.transpose(0, 2, 3, 1)
        is_video = array.ndim == 4 and array.shape[3] in (1, 3) and array.size and array.dtype == "uint8"
        why = "is no video. Give bytes (uint8) of T x H x W x C with 1 or 3 channels."
        _require(is_video, name, f"an array of shape {array.shape} and type {array.dtype} {why}")
        encoder = shutil.which("ffmpeg") or ""
        _require(encoder, name, "a video of an array needs ffmpeg. Install it, or give a video file.")
        pixels, size = ("rgb24", "gray")[array.shape[3] == 1], f"{array.shape[2]}x{array.shape[1]}"
        form = ["-f", "rawvideo", "-pix_fmt", pixels, "-s", size, "-r", f"{self._fps:g}", "-i", "-"]

        def write(path: Path) -> None:
            command = [encoder, "-v", "error", "-y", *form, "-pix_fmt", "yuv420p", str(path)]
            done = subprocess.run(command, input=array.tobytes(), capture_output=True, check=False, timeout=_ENCODER_S)
            _require(done.returncode == 0, name, f"ffmpeg failed: {done.stderr.decode(errors='replace')[-500:]}")

        return MediaEntry("video", source=write, ending=".webm")


class Html(Media):
    """HTML as a value of `run.log`.

    The live page shows the HTML without scripts and without the network.

    Args:
        html: The text, or a `pathlib.Path` of a file.

    Examples:
        >>> run = paceline.init()
        >>> paceline.log({"report": paceline.Html("<h1>Epoch 1</h1>")}, step=1)
        >>> [name.partition("_")[0] for name in run.get_file_names()]
        ['html/report']
        >>> paceline.finish()
    """

    def __init__(self, html: str | os.PathLike[str]) -> None:
        self._html = html

    def entry(self, name: str) -> MediaEntry:
        if isinstance(self._html, os.PathLike):
            return MediaEntry("html", source=os.fspath(self._html), ending=".html")
        if isinstance(text := self._html, str):
            return MediaEntry("html", source=lambda path: path.write_text(text, "utf-8", "replace"), ending=".html")
        raise MetricError(f"metric {name!r}: a {type(self._html).__name__} is no HTML. Give a text or a path.")


class Histogram(Media):
    """A histogram as a value of `run.log`.

    The run keeps counts and edges, not the values.

    Args:
        values: An array, a tensor or numbers. NaN and infinities are counted separately.
        bins: Number of bins.

    Examples:
        >>> run = paceline.init()
        >>> paceline.log({"weights": paceline.Histogram([0.0, 0.1, 0.2, 1.0], bins=2)}, step=1)
        >>> run.get_metrics()["weights"]
        {'counts': [3, 1], 'edges': [0.0, 0.5, 1.0]}
        >>> paceline.finish()
    """

    def __init__(self, values: object, bins: int = 64) -> None:
        self._values, self._bins = values, bins

    def entry(self, name: str) -> MediaEntry:
        is_right = type(self._bins) is int and 1 <= self._bins <= _MOST_BINS
        _require(is_right, name, f"bins={self._bins!r} must be a whole number from 1 to {_MOST_BINS}.")
        given = self._values
        if isinstance(given, Iterable) and not _is_array(given):
            given = _numbers(name, given)
        counts, edges, left_out = _counted(name, given, self._bins)
        value = {"counts": counts, "edges": edges} | ({"not_finite": left_out} if left_out else {})
        return MediaEntry("histogram", value)


class Table(Media):
    """A table as a value of `run.log`.

    The run keeps the first 10,000 rows.

    Args:
        rows: A pandas frame, a list of dicts, or a dict of column name to list.

    Examples:
        >>> run = paceline.init()
        >>> paceline.log({"samples": paceline.Table([{"text": "a", "score": 1}, {"text": "b", "score": 2}])})
        >>> run.get_metrics()["samples"]
        {'text': ['a', 'b'], 'score': [1, 2]}
        >>> paceline.finish()
    """

    def __init__(self, rows: object) -> None:
        self._rows = rows

    def entry(self, name: str) -> MediaEntry:
        columns = columns_of(name, self._rows)
        longest = max((len(column) for column in columns.values() if isinstance(column, list)), default=0)
        if longest > _MOST_ROWS:
            note(name, f"the first {_MOST_ROWS:,} of {longest:,} rows are kept")
            columns = {key: item[:_MOST_ROWS] if isinstance(item, list) else item for key, item in columns.items()}
        return MediaEntry("table", columns)


def media_of(value: object) -> Media | None:
    """Return an image, a table or an array as `Media`; None for other values."""
    if isinstance(value, Media):
        return value
    if callable(getattr(value, "savefig", None)) or _is_pil(value):
        return Image(value)
    if _is_frame(value) or (isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)):
        return Table(value)
    shape: Sequence[object] = getattr(value, "shape", ())
    if not _is_array(value) or len(shape) < 2:
        return None
    # Show an array of bytes with three or four channels as an image. Any other array may be weights: show a histogram.
    is_picture = len(shape) == 3 and shape[2] in (3, 4) and str(getattr(value, "dtype", "")).endswith("uint8")
    return Image(value) if is_picture else Histogram(value)


_noted: set[tuple[str, str]] = set()


def note(name: str, text: str) -> None:
    """Print a remark on a metric to stderr; the same remark only once."""
    if len(_noted) < 100 and (name, text) not in _noted:
        _noted.add((name, text))
        print(f"paceline: metric {name!r}: {text}", file=sys.stderr)


def file_name(name: str, entry: MediaEntry) -> str:
    """Return the file name for a metric's value, such as `images/confusion_1795238004123456789.png`."""
    folder = {"image": "images"}.get(entry.kind, entry.kind)
    return f"{folder}/{plain_file_name(name)}_{time.time_ns()}{entry.ending}"


def put(folder: RunFolder, metric: str, name: str, source: Source) -> None:
    """Copy or write a metric's file to `name` in the run.

    Raises:
        MetricError: The file is too large.
        UserError: The source is not a file.
    """
    with Scratch("media") as made:
        path = source if isinstance(source, str) else os.path.join(made, os.path.basename(name))
        if not isinstance(source, str):
            source(Path(path))
        size = (os.path.isfile(path) and os.path.getsize(path)) or 0
        why = f"at most {_MOST_BYTES >> 20} MiB are logged. Make it smaller, or keep it with upload_file."
        _require(size <= _MOST_BYTES, metric, f"the file has {size >> 20:,} MiB; {why}")
        artifacts.put(folder, name, path)


def image_entry(name: str, path: object, plot: object) -> MediaEntry:
    """Return an image, from a path or a plot, as a run stores it.

    Raises:
        MetricError: As for `image_source`.
    """
    source = image_source(name, path, plot)
    return MediaEntry("image", source=source, ending=_ending(source) if isinstance(source, str) else ".png")


def image_source(name: str, path: object, plot: object) -> Source:
    """Return an image's path, or a function that saves the image.

    Raises:
        MetricError: Neither or both of `path` and `plot` were given, or one is not an image.
    """
    is_one = (path is None) != (plot is None)
    _require(is_one, name, "give log_image either the path of an image or a plot.")
    if isinstance(path, (str, os.PathLike)):
        return os.fspath(path)
    given: Any = path if plot is None else plot
    if callable(getattr(given, "savefig", None)):
        return lambda target: given.savefig(target, format="png")
    if _is_pil(given):
        return lambda target: given.save(target, format="PNG")
    if _is_array(given):
        pixels = _pixels(name, given)
        return lambda target: target.write_bytes(_png(pixels))
    raise MetricError(
        f"metric {name!r}: a {type(given).__name__} is not an image. Give a path, a matplotlib figure or pyplot, a PIL image or "
        "an array."
    )


def columns_of(name: str, rows: object) -> dict[str, object]:
    """Return a table's columns as {name: list of values}; a lone value stays as it is.

    Raises:
        MetricError: The value is neither a dict, a list of dicts nor a frame.
    """
    columns: Iterable[tuple[object, object]]
    match rows:
        case list() if rows and all(isinstance(row, Mapping) for row in rows):
            names = dict.fromkeys(key for row in rows for key in row)
            columns = [(key, [row.get(key) for row in rows]) for key in names]
        case Mapping():
            columns = rows.items()
        case _ if _is_frame(rows):
            columns = [(key, list(rows[key])) for key in rows.columns]  # type: ignore[index,attr-defined]
        case _:
            raise MetricError(f"metric {name!r}: a {type(rows).__name__} is not a table. Give a dict column -> list.")
    return {str(key): _column(item) for key, item in columns}


def _column(value: object) -> object:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        return [plain_value(item) for item in value]
    return plain_value(value)


def _require(is_right: object, name: str, why: str) -> None:
    if not is_right:
        raise MetricError(f"metric {name!r}: {why}")


def _is_pil(value: object) -> bool:
    return callable(getattr(value, "save", None)) and hasattr(value, "mode")


def _is_frame(value: object) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_dict")


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and (hasattr(value, "__array__") or hasattr(value, "detach"))


def _array(name: str, value: object) -> Any:
    _require(_is_array(value), name, f"a {type(value).__name__} is no array. Give an array, a tensor or a path.")
    given: Any = value
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        # Convert floats to float32, since numpy has no bfloat16.
        given = given.float() if given.is_floating_point() else given
    return given.__array__()


def _clipped(array: Any, low: int) -> Any:
    # numpy is loaded already, because `array` comes from numpy.
    return sys.modules["numpy"].nan_to_num(array).clip(low, 1)


def _file_entry(kind: str, name: str, given: str | os.PathLike[str], endings: tuple[str, ...]) -> MediaEntry:
    path = os.fspath(given)
    ending = _ending(path)
    _require(ending in endings, name, f"{path!r} must end with one of {', '.join(endings)}.")
    return MediaEntry(kind, source=path, ending=ending)


def _ending(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _numbers(name: str, values: Iterable[Any]) -> list[float]:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise MetricError(f"metric {name!r}: a histogram takes an array, a tensor or numbers: {error}.") from error


def _counted(name: str, values: object, bins: int) -> tuple[list[int], list[float], int]:
    if isinstance(values, list):
        finite = [value for value in values if value - value == 0]
        low, high = _range(min(finite, default=0.0), max(finite, default=1.0))
        counts = [0] * bins
        for value in finite:
            counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
        edges = [low + (high - low) * number / bins for number in range(bins + 1)]
        return counts, edges, len(values) - len(finite)
    array = _array(name, values).ravel()
    is_numeric = array.dtype.kind in "fiub"
    _require(is_numeric, name, f"an array of type {array.dtype} has no numbers for a histogram.")
    array = array.astype("float64")
    kept = array[abs(array) < float("inf")]
    low, high = _range(float(kept.min()), float(kept.max())) if kept.size else (0.0, 1.0)
    found, edges = sys.modules["numpy"].histogram(kept, bins, (low, high))
    return found.tolist(), edges.tolist(), int(array.size - kept.size)


def _range(low: float, high: float) -> tuple[float, float]:
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _pixels(name: str, given: Any) -> Any:
    array = _array(name, given)
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and array.shape[2] not in _COLOR and array.shape[0] in _COLOR:
        array = array.transpose(1, 2, 0)
    is_image = array.ndim == 3 and array.shape[2] in _COLOR and array.size
    why = "is not an image. Give H x W, H x W x C or C x H x W with 1, 3 or 4 channels."
    _require(is_image, name, f"an array of shape {tuple(given.shape)} {why}")
    if array.dtype.kind == "f":
        array = _clipped(array, 0) * 255
    elif array.dtype.kind == "b":
        array = array * 255
    return array.round().clip(0, 255).astype("uint8")


def _png(pixels: Any) -> bytes:
    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOR[channels], 0, 0, 0)
    # In PNG, each row begins with the number of its filter. Filter 0 leaves the row's bytes unchanged.
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, part in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        data += struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
    return data
