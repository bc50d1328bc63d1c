"""Hook for TensorFlow's C++ writers of event files.

The files are read once a second and at the end.

Keras's TensorBoard callback and `tf.summary` use them; `summary_ops_v2.create_file_writer_v2` creates them all.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.trackers.event_file import EventFile, is_event_file
from paceline.trackers.event_writers import TRACKER
from paceline.trackers.sink import Sink, sink

_LOOK_S = 1.0
_NAME = "create_file_writer_v2"


def listen(module: ModuleType) -> None:
    """Follow the files of every writer that the module creates from now on."""
    make, found = getattr(module, _NAME), sink()
    if found is None:
        return
    follower = Follower(found)

    def create_file_writer_v2(logdir: Any, *args: Any, **options: Any) -> Any:
        writer = make(logdir, *args, **options)
        # In TensorFlow 1's graphs it is a tensor without a value yet.
        if isinstance(logdir, (str, os.PathLike)):
            follower.add(os.fspath(logdir), writer)
        return writer

    setattr(module, _NAME, create_file_writer_v2)


class Follower:
    """A thread that reads the event files that this process writes."""

    def __init__(self, to: Sink) -> None:
        self._sink = to
        self._folders: list[str] = []
        self._writers: list[weakref.ref[Any]] = []
        self._files: dict[Path, EventFile] = {}
        self._prefixes: dict[Path, str] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, folder: str, writer: Any) -> None:
        """Follow a folder. `writer` is flushed before each read."""
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
        """Read the rest and end the thread."""
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            self.look()

    def look(self) -> None:
        """Log new values."""
        with self._lock:
            writers = [writer for each in self._writers if (writer := each()) is not None]
            folders = list(self._folders)
        for writer in writers:
            # A closed writer may refuse to flush, and has written everything.
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
            for one in file.new():
                self._sink.log(TRACKER, prefix + one.tag, one.value, one.step, one.time)
        except OSError:
            pass  # the script has removed it

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.look()


def _names(folder: str) -> list[str]:
    """Return this process's event files.

    Their names hold host, pid and a number after the time.
    """
    mine = f".{os.getpid()}."
    try:
        return sorted(name for name in os.listdir(folder) if is_event_file(name) and mine in name)
    except OSError:
        return []
