"""Where the values of all trackers of this process arrive: in the metrics of the run, each value once.

A script may tell one value to several trackers: Lightning gives it to each of its loggers, Transformers to each report, and a
script may call `run.log` besides. So each name belongs to one of them, to the script's own calls if it makes any, else to the
first that logged it; what another tracker says under that name is passed over.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from paceline.errors import MetricError, RunContextError
from paceline.runs.context import WorkerContext
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog, logged_here, plain_scalar

#: Folders that say which part of the data values are of, by the custom of Keras and of TensorFlow's estimators.
_PARTS = ("train", "validation", "val", "eval", "test")


class Sink:
    """The trackers' way into the metrics of this process's run. Safe to call from several threads."""

    def __init__(self, context: WorkerContext) -> None:
        self.folder = RunFolder(context.run_dir)
        self.context = context
        path = self.folder.metric_log(context.rank, context.attempt)
        self._log = MetricLog(path, attempt=context.attempt, of_tracker=True)
        self._owners: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._lock = threading.Lock()
        self._is_full = False

    def log(self, tracker: str, name: str, value: object, step: int | None = None, time_s: float | None = None) -> None:
        """Log a number of this tracker's, unless its name belongs to another. What is no number is passed over.

        time_s: when it was logged, in seconds since 1970; default now.
        """
        if name in logged_here or self._owners.setdefault(name, tracker) != tracker:
            return
        try:
            number = plain_scalar(name, value)
            if isinstance(number, (str, bool)):
                return
            self._log.scalar(name, number, None if step is None else int(step), time_s)
        except (MetricError, TypeError, ValueError):
            return  # an image, a histogram, a list
        except OSError as error:
            # The tracker keeps the value where it always does, and the script must not end for the second copy.
            if not self._is_full:
                self._is_full = True
                print(f"paceline: values of {tracker} are not kept as metrics: {error}", file=sys.stderr)

    def claim(self, tracker: str, names: Iterable[str]) -> None:
        """Let these names belong to the tracker, unless they belong to another already."""
        for name in names:
            self._owners.setdefault(name, tracker)

    def prefix(self, folder: str) -> str:
        """What stands before the tags of event files in this folder: "" or such as "validation/".

        The first folder has nothing before its tags. One below another that is known has the rest of its path, as TensorBoard
        shows it; one beside it, its own name. `train`, `validation` and so on always stand there.
        """
        path = os.path.abspath(folder)
        with self._lock:
            if path not in self._folders:
                self._folders[path] = prefix_among(path, self._folders)
            return self._folders[path]


def prefix_among(path: str, known: dict[str, str]) -> str:
    """The prefix of a folder, where these have one already: folder -> prefix, in the order in which they came."""
    name = os.path.basename(path)
    above = [other for other in known if path.startswith(f"{other}{os.sep}")]
    if above:
        nearest = max(above, key=len)
        # Where torch's add_hparams writes: a folder by the time.
        if name.replace(".", "").isdigit():
            return known[nearest]
        return f"{known[nearest]}{os.path.relpath(path, nearest).replace(os.sep, '/')}/"
    if name in _PARTS:
        return f"{name}/"
    # By its own name, and not by a number: the next attempt of the run may open them in another order.
    return f"{name}/" if any(os.path.basename(other) not in _PARTS for other in known) else ""


def hear(kind: Any, name: str, tell: Callable[..., None]) -> None:
    """Let each call of a class's method also be told, once it has returned: `tell(sink, self, *args, **options)`."""
    found, method = sink(), getattr(kind, name)
    if found is None:
        return

    @functools.wraps(method)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        tell(found, self, *args, **options)
        return result

    setattr(kind, name, told)


_sink: Sink | None = None
_is_looked_for = False
_making = threading.Lock()


def sink() -> Sink | None:
    """The sink of this process; None outside a run."""
    global _sink, _is_looked_for
    if not _is_looked_for:
        with _making:
            if not _is_looked_for:
                try:
                    context = WorkerContext.from_environment()
                except RunContextError:
                    context = None  # a process whose environment was changed; the script's own calls say what is wrong
                _sink = Sink(context) if context is not None else None
                _is_looked_for = True
    return _sink
