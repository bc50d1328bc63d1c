"""Send a run's new and changed files to the supervisor, in a thread of the agent.

Logs, metrics, reports and notes are sent several times a second, and before the exit of their command is reported.
Checkpoints and outputs have a lower priority, and are sent once they are unchanged for two seconds.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.remote.agent.send_queue import BULK, LIVE, SendQueue
from paceline.remote.replica.changes import (
    DRIVER_LOG,
    LIVE_LOGS,
    NODE_FILES,
    NOTES,
    QUIET_S,
    WORK,
    Changes,
    small_names,
)
from paceline.remote.wire import Frame, Header
from paceline.system.gaps import Keeper

#: LOOK_S: seconds between checks for new lines of logs. SURVEY_S: seconds between checks for changed checkpoints and outputs.
LOOK_S, SURVEY_S = 0.2, 2.0
#: If a file does not fit on the supervisor's disk, it is sent again after at most this many seconds.
_LONGEST_S = 60.0
#: Names of files to which several nodes and the supervisor append lines.
_SHARED = (NOTES, DRIVER_LOG)


class Mirror(threading.Thread):
    """A thread that sends a run's new and changed files to the supervisor.

    have: File name -> [size, mtime in ns, inode] of the version that the supervisor has.
    takes_files: Whether to send checkpoints and outputs. Only one of the nodes that share a folder sends them.
    log_limit: Bytes of each worker's log to keep; 0 for no limit.
    """

    def __init__(
        self,
        run_dir: str,
        attempt: int,
        have: dict[str, list[int]],
        takes_files: bool,
        out: SendQueue,
        log_limit: int = 0,
    ) -> None:
        super().__init__(name="paceline-mirror", daemon=True)
        self.top, self._out = run_dir, out
        self.attempt, self.takes_files = attempt, takes_files
        self._jobs: collections.deque[Header] = collections.deque()
        # This condition guards `_jobs` and `_closed`, which the agent's main thread changes too.
        self._changed = threading.Condition()
        self._closed = False
        self._changes = Changes(run_dir, have, shared=_SHARED)
        self._changes.skip(_SHARED)
        #: The remaining frames of the current pass over checkpoints and outputs. None stands for a pause.
        self._files: Iterator[Frame | None] = iter(())
        #: _busy: the current pass is unfinished. _look_at: when to look for new logs. _survey_at: when to begin the next pass.
        self._busy, self._look_at, self._survey_at = False, 0.0, 0.0
        #: Name of a file -> time at which to send the file again.
        self._again: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self.has_failed = False
        self._log_limit = log_limit
        self._keepers: dict[str, Keeper] = {}

    def tell(self, header: Header) -> None:
        """Send the supervisor a message, after new logs and other small files.

        header: The message's header. If it has the key `all`, send checkpoints and outputs before the message. If it has
            `last` too, clean up the script's working directory, and send the remaining files.
        """
        with self._changed:
            self._jobs.append(header)
            self._changed.notify_all()

    def send_again(self, name: str) -> None:
        """Send a file again after a backoff, because the supervisor could not store it."""
        if name in self._again:
            return
        tries = self._tries[name] = self._tries.get(name, 0) + 1
        self._again[name] = time.monotonic() + min(QUIET_S * 2 ** (tries - 1), _LONGEST_S)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        try:
            self._run()
        except BrokenPipeError:
            pass  # the link is closed, and the agent itself detects this
        except BaseException:
            # Make the agent exit, because without this thread the supervisor would get no report of a command's exit.
            self.has_failed = True
            raise

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                if not self._jobs and not (self._busy and self._out.has_room(BULK)):
                    # While files are being sent, check every 0.01 s whether the queue has room for the next piece.
                    self._changed.wait(0.01 if self._busy else LOOK_S)
            self.step()

    def step(self) -> None:
        """Send new log lines, the messages given to `tell`, and a piece of a large file."""
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
        now = time.monotonic()
        if jobs or now >= self._look_at:
            self._look()
            self._look_at = now + LOOK_S
        for job in jobs:
            is_last = job.pop("last", False)
            if job.pop("all", False):
                self._send_all(is_last)
                self._busy = False
                self._out.put(job, kind=BULK)
            else:
                self._out.put(job, kind=LIVE)
        if not self._busy and self.takes_files and now >= self._survey_at:
            self._files, self._busy = self._changes.large(), True
        if self._busy and self._out.has_room(BULK):
            try:
                # Send only one piece of a file, so that new lines of logs don't wait long.
                self._put([next(self._files)], BULK)
            except StopIteration:
                self._busy, self._survey_at = False, time.monotonic() + SURVEY_S

    def _put(self, frames: Iterable[Frame | None], kind: int) -> None:
        for found in frames:
            if found is not None:
                self._out.put({"op": "file", **found[0]}, found[1], kind=kind, wait=True)

    def _send_left(self) -> None:
        from paceline.runs import work_dir  # imported late, for a fast start
        from paceline.runs.folder import RunFolder

        folder = RunFolder(Path(self.top))
        with contextlib.suppress(OSError):  # on a full disk, send the files that exist
            work_dir.rescue_outputs(folder)
        # Send the outputs before calling `clean`: outputs may link to files in the working directory, which `clean` deletes.
        self._put(self._changes.large(final=True), BULK)
        work_dir.clean(folder)
        self._put(self._changes.large(True, (WORK,)), BULK)

    def _look(self) -> None:
        self._take_back(time.monotonic())
        self._keep_limits()
        self._put(self._changes.small(self._live_names(f"attempts/{self.attempt}"), skip_empty=True), LIVE)

    def _take_back(self, now: float) -> None:
        for name, due in list(self._again.items()):
            if now >= due:
                del self._again[name]
                if name not in _SHARED:
                    self._changes.known.pop(name, None)

    def _keep_limits(self) -> None:
        if not self._log_limit:
            return
        folder = os.path.join(self.top, "attempts", str(self.attempt))
        try:
            logs = [name for name in os.listdir(folder) if name.startswith("rank_") and name.endswith(".log")]
        except OSError:
            return
        for name in logs:
            path = os.path.join(folder, name)
            keeper = self._keepers.setdefault(path, Keeper(path, self._log_limit))
            was_told = keeper.trouble is not None
            keeper.look()
            if keeper.trouble is not None and not was_told:
                rank = name[len("rank_") : -len(".log")]
                self._say(
                    f"rank {rank}'s log is kept whole on its node: the file system there can't leave anything out of it "
                    f"({keeper.trouble})"
                )

    def _say(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        try:
            with open(os.path.join(self.top, "logs", "driver.log"), "a", encoding="utf-8") as file:
                file.write(f"{stamp}Z {text}\n")
        except OSError:
            pass  # the disk may be full, and the supervisor reports this itself

    def _live_names(self, attempts: str) -> Iterator[str]:
        # `hidden=()` includes the output of `paceline exec`: the command's client reads it from the supervisor's copy of the run.
        names = small_names(self.top, (attempts, "metrics", "prepared", "logs"), NODE_FILES, hidden=())
        return (name for name in names if not name.startswith(LIVE_LOGS))

    def _send_all(self, is_last: bool) -> None:
        self._put(self._files, BULK)  # send the rest of a file that the current pass has begun
        self._take_back(math.inf)
        if self.takes_files and is_last:
            self._send_left()
        elif self.takes_files:
            self._put(self._changes.large(final=True), BULK)
        self._put(self._changes.small(self._live_names("attempts")), LIVE)
