"""Log scalars from event files whose writers no Python hook can observe.

`summary_ops_v2.create_file_writer_v2` creates all of TensorFlow's C++ writers (Keras's TensorBoard callback,
`tf.summary`). A thread reads their files once a second and at the end. At the attempt's end, the supervisor reads files
of other programs, such as a Python program that a shell script starts.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

from paceline.runs.context import WorkerContext
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import placed_entries_by_name
from paceline.system.files import names_in
from paceline.trackers.event_file import EventFile, event_folders, is_event_file
from paceline.trackers.hooks import wanted
from paceline.trackers.libraries import TENSORBOARD
from paceline.trackers.sink import Sink, sink

_LOOK_S = 1.0
_NAME = "create_file_writer_v2"


class _Writer(Protocol):
    def flush(self) -> object: ...


def hear_tensorflow(module: ModuleType) -> None:
    """Hook TensorFlow's new file writers, to log their scalars as metrics."""
    make: Callable[..., _Writer] = getattr(module, _NAME)
    own = sink()
    if own is None:
        return
    follower = Follower(own)

    def create_file_writer_v2(logdir: object, *args: object, **options: object) -> _Writer:
        writer = make(logdir, *args, **options)
        # In a graph of TensorFlow 1, `logdir` may be a tensor without a known value. Then the folder can't be followed.
        if isinstance(logdir, (str, os.PathLike)):
            follower.add(os.fspath(logdir), writer)
        return writer

    setattr(module, _NAME, create_file_writer_v2)


class Follower:
    """A thread that logs the scalars of event files that this process writes."""

    def __init__(self, to: Sink) -> None:
        self._sink = to
        self._folders: list[str] = []
        self._writers: list[weakref.ref[_Writer]] = []
        self._files: dict[Path, EventFile] = {}
        self._prefixes: dict[Path, str] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, folder: str, writer: _Writer) -> None:
        """Follow a folder's event files. writer: flushed before each read of the files."""
        path = os.path.abspath(folder)
        self._sink.prefix(path)
        with self._lock:
            self._writers.append(weakref.ref(writer))
            if path not in self._folders:
                self._folders.append(path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-event-files", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def close(self) -> None:
        """End the thread, and log the event files' unread values."""
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            self.look()

    def look(self) -> None:
        """Log the new values of the followed event files."""
        with self._lock:
            writers = [writer for each in self._writers if (writer := each()) is not None]
            folders = list(self._folders)
        for writer in writers:
            # A closed writer may refuse to flush, but it has already written all values.
            try:
                writer.flush()
            except Exception:
                continue
        for folder in folders:
            for name in _names(folder):
                path = Path(folder, name)
                if path not in self._files:
                    self._files[path] = EventFile(path)
                    self._prefixes[path] = self._sink.prefix(folder)
                self._read(self._files[path])

    def _read(self, file: EventFile) -> None:
        prefix = self._prefixes[file.path]
        try:
            for scalar in file.new():
                self._sink.log(TENSORBOARD, prefix + scalar.tag, scalar.value, scalar.step, scalar.time)
        except OSError:
            pass  # the script has removed the file

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.look()


def _names(folder: str) -> list[str]:
    mine = f".{os.getpid()}."
    return [name for name in names_in(Path(folder)) if is_event_file(name) and mine in name]


def take_up(folder: RunFolder, attempt: int, *, since: float, variables: Mapping[str, str]) -> None:
    """Log scalars of event files as rank 0's metrics after an attempt.

    Skip a scalar if this attempt has logged its name at its step, or without a step. Also skip a scalar if an earlier
    attempt has logged its name, step and time, because a program may append to an earlier attempt's files.

    Args:
        folder: The run's folder.
        attempt: Number of the attempt that has ended.
        since: Skip files that were last changed before this time, in seconds since 1970.
        variables: The job's environment variables, which may select the trackers.
    """
    if TENSORBOARD not in wanted(variables):
        return
    to = Sink(WorkerContext(folder.path, 0, 1, attempt))
    there = {
        (name, number == attempt or entry.get("time"), entry.get("step"))
        for number in range(1, attempt + 1)
        for name, entries in placed_entries_by_name(folder.metrics, attempts=[number]).items()
        for entry in entries
    }
    for place in event_folders(folder):
        for path in sorted(place.iterdir()):
            if is_event_file(path.name) and path.is_file() and path.stat().st_mtime >= since:
                for tag, step, value, time_s in EventFile(path).new():
                    name = to.prefix(str(place)) + tag
                    # Skip a value that the script has also logged as a metric, perhaps without a step.
                    if not there.intersection([(name, True, step), (name, True, None), (name, round(time_s, 6), step)]):
                        to.log(TENSORBOARD, name, value, step, time_s)
