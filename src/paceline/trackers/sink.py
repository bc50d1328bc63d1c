"""The common sink of all trackers: each value becomes a metric of the run once.

One value may reach several trackers: Lightning passes it to each logger, Transformers to each tracker of `report_to`,
and a script may call `run.log` too. So each metric's name has one source: `run.log` if the script calls it with this
name, else the first tracker that logs the name. The sink drops values that other trackers log under the name.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

from paceline.errors import MetricError, RunContextError
from paceline.runs.context import WorkerContext
from paceline.runs.folder import RunFolder
from paceline.runs.media import Media, file_name, put
from paceline.runs.metrics import MetricLog, logged_here, plain_scalar

#: Folders in which Keras and TensorFlow's estimators log values of a part of the data, such as the validation data.
_PARTS = ("train", "validation", "val", "eval", "test")
#: Folder names that are times: "2026-11-28", "06-20-11", "20261128_062011", "Nov28_06-20-11_host", "1795847941.25".
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d.*|\d\d[-:]\d\d[-:]\d\d|\d{8}[-_T]?\d{4,6}.*|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d.*|\d{9,}[\d.]*"
)
_OF_ATTEMPT = re.compile(rf"{_TIME.pattern}|version_\d+")


class Sink:
    """A thread-safe logger of trackers' values as metrics of this process's run."""

    def __init__(self, context: WorkerContext) -> None:
        self.folder = RunFolder(context.run_dir)
        self.context = context
        path = self.folder.metric_log(context.rank, context.attempt)
        self._log = MetricLog(path, attempt=context.attempt, of_tracker=True)
        self._owners: dict[str, str] = {}
        self._folders: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self._is_full = False

    def log(self, tracker: str, name: str, value: object, step: int | None = None, time_s: float | None = None) -> None:
        """Log a number, unless `run.log` or another tracker uses the name.

        time_s: Time of the value in seconds since 1970; default: now.
        """
        if name in logged_here or self._owners.setdefault(name, tracker) != tracker:
            return
        try:
            number = plain_scalar(name, value)
            if not isinstance(number, (str, bool)):
                self._log.scalar(name, number, None if step is None else int(step), time_s)
        except (MetricError, TypeError, ValueError):
            return  # the value is not a number, but an image, a histogram or a list
        except OSError as error:
            # Report only the first error, and go on: the tracker still has the value.
            if not self._is_full:
                self._is_full = True
                print(f"paceline: values of {tracker} are not kept as metrics: {error}", file=sys.stderr)

    def keep(self, tracker: str, name: str, media: Media, step: int | None = None) -> None:
        """Log an image, histogram, HTML or text, unless another source has logged the name."""
        if name in logged_here or self._owners.setdefault(name, tracker) != tracker:
            return
        # Ignore every exception: the objects are from the tracker's library, and the tracker still has the value.
        with contextlib.suppress(Exception):
            entry = media.entry(name)
            value = entry.value
            if entry.source is not None:
                value = file_name(name, entry)
                put(self.folder, name, str(value), entry.source)
            self._log.other(entry.kind, name, value, step)

    def claim(self, tracker: str, names: Iterable[str]) -> None:
        """Reserve metric names for a tracker, unless another tracker has them."""
        for name in names:
            self._owners.setdefault(name, tracker)

    def prefix(self, folder: str, tracker: str = "tensorboard") -> str:
        """Return the prefix for metrics of a log folder, such as "" or "fold1/validation/".

        The first folder gets no prefix. Every other folder gets the part of its path that differs from the first. A
        folder below a known folder gets the known folder's prefix and the relative path. Folder names such as `train`
        always stay in the prefix. All processes of a rank, and later attempts, use the same prefix for a folder.
        """
        path = os.path.abspath(folder)
        with self._lock:
            if (tracker, path) not in self._folders:
                self._folders[tracker, path] = self._shared_prefix(tracker, path)
            return self._folders[tracker, path]

    def _shared_prefix(self, tracker: str, path: str) -> str:
        try:
            self.folder.metrics.mkdir(parents=True, exist_ok=True)
            with open(self.folder.metric_folders(self.context.rank), "a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases the lock
                file.seek(0)
                known, before = dict[str, str](), dict[str, str]()
                for line in file:
                    with contextlib.suppress(ValueError):  # skip a line that a full disk has cut short
                        attempt, of, where, prefix = json.loads(line)
                        if of == tracker:
                            (known if attempt == self.context.attempt else before)[where] = prefix
                if path not in known:
                    known[path] = prefix_among(path, known, before)
                    file.write(json.dumps([self.context.attempt, tracker, path, known[path]]) + "\n")
                return known[path]
        except OSError:  # the disk is full: choose a prefix, even if another process chooses the same prefix
            return prefix_among(
                path, {where: prefix for (of, where), prefix in self._folders.items() if of == tracker}, {}
            )


def prefix_among(path: str, known: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Return the metric prefix for a new log folder `path` (see `Sink.prefix`).

    known: Folder -> prefix in this attempt, in order of creation.
    before: Folder -> prefix in earlier attempts, in order of creation.
    """
    above = [other for other in known if path.startswith(f"{other}{os.sep}")]
    if above:
        nearest = max(above, key=len)
        # torch's add_hparams writes into a subfolder that has a time as its name. The time must not become part of metric names.
        is_time = os.path.basename(path).replace(".", "").isdecimal()
        return known[nearest] + ("" if is_time else f"{os.path.relpath(path, nearest).replace(os.sep, '/')}/")
    root, part = _training(path)
    trainings, earlier = _trainings(known, bool(part)), _trainings(before, bool(part))
    return _of_training(root, trainings, earlier) + part


def _training(folder: str) -> tuple[str, str]:
    above, name = os.path.split(folder)
    return (above, f"{name}/") if name in _PARTS else (folder, "")


def _trainings(folders: Mapping[str, str], is_part: bool) -> dict[str, str]:
    roots: dict[str, str] = {}
    for folder, prefix in folders.items():
        root, part = _training(folder)
        if is_part or not part:
            roots.setdefault(root, prefix.removesuffix(part))
    return roots


def _of_training(root: str, known: Mapping[str, str], before: Mapping[str, str]) -> str:
    if root in known:
        return known[root]
    if root in before and before[root] not in known.values():
        return before[root]
    # A new attempt of a training logs into a new folder, such as "version_1", or a folder with another time in its name.
    for other, prefix in before.items():
        if _lasting(other, _OF_ATTEMPT) == _lasting(root, _OF_ATTEMPT) and prefix not in known.values():
            return prefix
    others = {**before, **known}
    return _difference(root, others) if known or len(set(others.values())) > 1 else ""


def _difference(root: str, others: Mapping[str, str]) -> str:
    """Return a unique prefix: the part of path `root` that others' paths lack."""
    first = next(other for other in (*(one for one in others if not others[one]), *others))
    rest = _behind_common(root.split(os.sep), first.split(os.sep))
    lasting = _behind_common(*(_lasting(one, _TIME).split(os.sep) for one in (root, first)))
    other = _behind_common(*(_lasting(one, _TIME).split(os.sep) for one in (first, root)))
    while lasting and other and lasting[-1] == other[-1]:
        lasting, other = lasting[:-1], other[:-1]
    taken = set(others.values())
    prefixes = ("/".join(words) + "/" for words in (lasting, rest, root.strip(os.sep).split(os.sep)) if words)
    return next((prefix for prefix in prefixes if prefix not in taken), f"{root}/")


def _behind_common(words: list[str], others: list[str]) -> list[str]:
    common = takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False))
    return words[sum(1 for _ in common) :]


def _lasting(path: str, passing: re.Pattern[str]) -> str:
    return os.sep.join(name for name in path.split(os.sep) if not passing.fullmatch(name))


def hear(kind: type, name: str, tell: Callable[..., None]) -> None:
    """Patch a class: each call of method `name` also calls `tell(sink, self, ...)`."""
    own, method = sink(), getattr(kind, name)
    if own is None:
        return

    @functools.wraps(method)
    def call_and_tell(self: object, *args: object, **options: object) -> object:
        result = method(self, *args, **options)
        tell(own, self, *args, **options)
        return result

    setattr(kind, name, call_and_tell)


_sink: Sink | None = None
_is_looked_for = False
_making = threading.Lock()


def sink() -> Sink | None:
    """Return the sink of this process, or None outside a run."""
    global _sink, _is_looked_for
    if not _is_looked_for:
        with _making:
            if not _is_looked_for:
                # Ignore this error: the script has changed its environment, and Paceline reports that when the script calls it.
                with contextlib.suppress(RunContextError):
                    context = WorkerContext.from_environment()
                    _sink = Sink(context) if context is not None else None
                _is_looked_for = True
    return _sink
