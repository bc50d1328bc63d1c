"""Show runs in TensorBoard: their event files, and other metrics converted to event files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UserError
from paceline.runs import series
from paceline.runs.folder import RunFolder
from paceline.runs.search.summaries import as_float
from paceline.system import processes
from paceline.system.scratch import Scratch
from paceline.trackers.event_file import EventFile, event_folders, is_event_file
from paceline.trackers.export import event_writer

#: Seconds between two updates of the files. TensorBoard reads the files every 5 s.
_LOOK_S = 2.0


class TensorBoard:
    """A TensorBoard process that shows runs, including live runs.

    Args:
        folders: Displayed name of a run -> the run's folder.
        port: Port to serve at, on this machine only.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, folders: Mapping[str, RunFolder], port: int = 6006) -> None:
        # Look for the program `tensorboard` beside this Python first, because this Python's environment may not be active.
        program = shutil.which("tensorboard", path=os.path.dirname(sys.executable)) or shutil.which("tensorboard")
        if program is None:
            raise UserError("TensorBoard is not installed: pip install 'paceline[tensorboard]'.")
        self._program, self._port = program, port
        self._top = Scratch("tensorboard")
        self._feeds = [FollowedRun(folder, self._top.path / name) for name, folder in folders.items()]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def command(self) -> list[str]:
        return [self._program, "--logdir", str(self._top.path), "--port", str(self._port), "--host", "127.0.0.1"]

    def run(self) -> int:
        """Run TensorBoard until Ctrl-C or SIGTERM, and return its exit code."""
        process = None
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            self.look()
            # Forking is safe here, because this process has not started threads that could hold a lock.
            process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                preexec_fn=processes.ends_with_parent(),  # noqa: PLW1509
            )
            self._thread.start()
            return process.wait()
        finally:
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()
            self.close()

    def look(self) -> None:
        """Write the new values of all shown runs to event files for TensorBoard."""
        for feed in self._feeds:
            feed.look()

    def close(self) -> None:
        """Stop following the runs, and remove the event files written for TensorBoard."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._top.close()

    def _feed(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.look()


class FollowedRun:
    """A run's files for TensorBoard.

    Args:
        folder: The run's folder.
        top: A folder to fill with links to the run's event folders, and with event files of the run's other metrics.
    """

    def __init__(self, folder: RunFolder, top: Path) -> None:
        self._run, self._top = folder, top
        self._links: dict[Path, Path] = {}
        self._there: dict[str, int] = {}

    def look(self) -> None:
        """Update the links and event files that TensorBoard reads."""
        tags = set[str]()
        for place in event_folders(self._run):
            # Don't link a folder if a folder above it is linked, because TensorBoard also searches subfolders.
            if place not in self._links and not any(above in place.parents for above in self._links):
                name = os.path.relpath(place, self._run.path).replace(os.sep, "_")
                self._top.mkdir(parents=True, exist_ok=True)
                self._links[place] = self._top / name
                self._links[place].symlink_to(place.absolute(), target_is_directory=True)
            tags |= _tags(place)
        write = None
        for name, metric in series.read(self._run.metrics).items():
            # Skip a metric that the event files contain: its name is a file's tag, sometimes with the file's folder before it.
            if name in tags or any(name.endswith(f"/{tag}") for tag in tags):
                continue
            numbers = [place for place in enumerate(metric) if isinstance(place[1][1], (int, float))]
            for number, (step, value, time) in numbers[self._there.get(name, 0) :]:
                write = write or event_writer(self._top / "metrics")
                write(name, number if step is None else step, as_float(value), time)
            self._there[name] = len(numbers)
        if write is not None:
            write(None, 0, 0.0, 0.0)


def _tags(place: Path) -> set[str]:
    files = filter(is_event_file, sorted(os.listdir(place)))
    return {scalar.tag for name in files for scalar in EventFile(place / name).new()}
