"""Keeps the supervisor's copy of a run's folder up to date while the run goes on, in a thread of its own.

Live, several times a second and before any command's end is told: logs, metrics, reports of workers, notes. Behind
them, whenever the link has nothing else to carry: checkpoints and outputs that have not changed for two seconds.
"""

from __future__ import annotations

import collections
import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline.remote.agent.send_queue import BULK, LIVE, SendQueue
from paceline.remote.agent.sender import Sender, names_below, stamp_of
from paceline.system.gaps import Keeper
from paceline.system.links import Entry, entries

#: How often to look for new lines, for files to send, and how long a file must have been left alone.
LOOK_S, SURVEY_S, QUIET_S = 0.2, 2.0, 2.0
#: How long to wait at most before a file is sent again for which there was no room.
_LONGEST_S = 60.0
#: The stream of a run's files.
STREAM = 0

_BULK = ("checkpoints", "outputs", "artifacts", "uploads")
_GROW = (".log", ".jsonl", ".txt")
#: Others append to these as well, on other nodes and at the supervisor's.
_SHARED = ("notes.jsonl", os.path.join("logs", "driver.log"))


class Mirror(threading.Thread):
    """Mirrors one run's folder.

    have: what the supervisor has already, name -> [size, time of change].
    takes_files: whether this node sends checkpoints and outputs; of nodes that see one folder, one does.
    log_limit: bytes that are kept of each worker's log; 0 for no limit.
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
        self.top = run_dir
        self._sender, self._out = Sender(run_dir, STREAM, out), out
        self.attempt, self.takes_files = attempt, takes_files
        self._jobs: collections.deque[dict[str, Any]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._grown = {name: [_inode(run_dir, name), stamp[0]] for name, stamp in have.items()}
        for name in _SHARED:
            found = stamp_of(os.path.join(run_dir, name))
            self._grown[name] = [_inode(run_dir, name), found[0] if found else 0]
        self._sent = dict(have)
        self._seen: dict[str, tuple[list[int], float]] = {}
        #: name -> when to send it again
        self._again: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self.has_failed = False
        self._log_limit = log_limit
        self._keepers: dict[str, Keeper] = {}

    def tell(self, header: dict[str, Any]) -> None:
        """Send this once all that was written so far has been sent. header: with `all`, checkpoints and outputs too."""
        with self._changed:
            self._jobs.append(header)
            self._changed.notify_all()

    def send_again(self, name: str) -> None:
        """Take a file for one that the supervisor does not have: it had no room for it."""
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
            pass  # the agent sees it too
        except BaseException:
            # No end would be told any more: the agent must not stay.
            self.has_failed = True
            raise

    def _run(self) -> None:
        files: Iterator[None] = iter(())
        busy, look_at, survey_at = False, 0.0, 0.0
        while not self._closed:
            with self._changed:
                if not self._jobs and not (busy and self._out.has_room(BULK)):
                    # With files on their way, until there is room for the next piece.
                    self._changed.wait(0.01 if busy else LOOK_S)
                jobs = list(self._jobs)
                self._jobs.clear()
            now = time.monotonic()
            if jobs or now >= look_at:
                self._look()
                look_at = now + LOOK_S
            for job in jobs:
                if job.pop("all", False):
                    self._send_all()
                    busy = False
                    self._out.put(job, kind=BULK)
                else:
                    self._out.put(job, kind=LIVE)
            if not busy and self.takes_files and now >= survey_at:
                files, busy = self._survey(), True
            if busy and self._out.has_room(BULK):
                busy = next(files, files) is None
                if not busy:
                    survey_at = time.monotonic() + SURVEY_S

    # --- live

    def _look(self) -> None:
        self._take_back(time.monotonic())
        self._keep_limits()
        for name in self._live_names():
            if name in _SHARED:
                self._sender.grown(name, "append", self._grown.setdefault(name, [0, 0]), LIVE)
            elif name.endswith(_GROW):
                self._sender.grown(name, "grow", self._grown.setdefault(name, [0, -1]), LIVE)
            else:
                stamp = stamp_of(os.path.join(self.top, name))
                if stamp is not None and stamp != self._sent.get(name):
                    self._sender.send(Entry(name, "file", real=name), LIVE)
                    self._sent[name] = stamp

    def _take_back(self, now: float) -> None:
        """Forget that files were sent for which there was no room, once it is time to try again."""
        for name, due in list(self._again.items()):
            if now >= due:
                del self._again[name]
                self._sent.pop(name, None)
                if name not in _SHARED:
                    self._grown.pop(name, None)

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
        """Add a line to the driver's log, whose lines come from all nodes."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        try:
            with open(os.path.join(self.top, "logs", "driver.log"), "a", encoding="utf-8") as file:
                file.write(f"{stamp}Z {text}\n")
        except OSError:
            pass  # a full disk, of which others tell

    def _live_names(self) -> Iterator[str]:
        top = self.top
        for folder in (os.path.join("attempts", str(self.attempt)), "metrics", "prepared", "logs"):
            try:
                with os.scandir(os.path.join(top, folder)) as entries:
                    names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
            except OSError:
                continue
            for name in names:
                is_ours = not name.startswith(".") and not name.endswith(".held")
                if is_ours and (folder != "logs" or name.startswith("prepare_")):
                    yield os.path.join(folder, name)
        yield from (name for name in ("environment.json", *_SHARED) if os.path.exists(os.path.join(top, name)))

    # --- files

    def _survey(self) -> Iterator[None]:
        """Send what has been left alone for a while, and say what is gone; a step for each piece."""
        present: set[str] = set()
        for entry in self._entries():
            name = entry.name
            if len(present) % 500 == 499:
                yield  # to new lines of logs, between thousands of files
            if entry.kind == "left":
                continue  # it may be on its way: a link to what is still to be written
            present.add(name)
            stamp = self._stamp(entry)
            if stamp is None or stamp == self._sent.get(name):
                continue
            now = time.monotonic()
            last, since = self._seen.get(name, (None, now))
            if last != stamp:
                self._seen[name] = (stamp, now)
            elif now - since >= QUIET_S:
                if (yield from self._sender.whole(entry, BULK)):
                    self._sent[name] = stamp
                    self._seen.pop(name, None)
                yield
        self._say_gone(present)

    def _entries(self) -> Iterator[Entry]:
        """The user's files: each at its own name, and what its links stand for."""
        for folder in _BULK:
            for entry in entries(self.top, folder):
                if entry.name != folder or entry.kind == "left":
                    yield entry

    def _stamp(self, entry: Entry) -> list[int] | None:
        return stamp_of(os.path.join(self.top, entry.real or entry.name))

    def _say_gone(self, present: set[str]) -> None:
        """Old checkpoints are removed by the script that wrote the new ones; then they need not be kept here either."""
        if not os.path.isdir(os.path.join(self.top, "checkpoints")):
            return  # the folder itself goes: that is the end of the run, not the script's doing
        for name in sorted(self._sent, reverse=True):
            if name.split(os.sep)[0] in _BULK and name not in present:
                self._sender.put(name, "gone", BULK, stamp=self._sent.pop(name))

    def _send_all(self) -> None:
        """All that is not sent yet, at once: nothing changes any more."""
        self._take_back(math.inf)
        present: set[str] = set()
        for entry in self._entries() if self.takes_files else ():
            if entry.kind == "left":
                self._sender.put(entry.name, "left", BULK, why=entry.why)
                continue
            present.add(entry.name)
            self._send_unsent(entry)
        for folder in ("attempts", "metrics", "prepared"):
            for name in names_below(self.top, folder):
                if _is_passing(name):
                    continue
                if name.endswith(_GROW):
                    self._sender.grown(name, "grow", self._grown.setdefault(name, [0, -1]), LIVE)
                elif kind := _plain_kind(os.path.join(self.top, name)):
                    self._send_unsent(Entry(name, kind, real=name))
        if self.takes_files:
            self._say_gone(present)

    def _send_unsent(self, entry: Entry) -> None:
        stamp = self._stamp(entry)
        if stamp is not None and stamp != self._sent.get(entry.name):
            self._sender.send(entry, BULK)
            self._sent[entry.name] = stamp


def _plain_kind(path: str) -> str | None:
    """ "file" or "dir"; None for what is neither, which is nothing of ours."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else None


def _is_passing(name: str) -> bool:
    last = os.path.basename(name)
    return last.startswith(".") or last.endswith(".held")


def _inode(top: str, name: str) -> int:
    try:
        return os.lstat(os.path.join(top, name)).st_ino
    except OSError:
        return 0
