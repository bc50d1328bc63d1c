"""Propagation of failures: every rank reports the cause of the first error.

    rank 3 fails         It writes its traceback to the key-value store and raises its own error.
    rank 1 waits for it  It gets "connection closed by peer", reads the store, and raises WorkerError with rank 3's traceback.
    rank 2 gets no error Its watcher thread reads the store, and ends the process if it is still blocked seconds later.

If rank 0 calls save() and rank 1 step(), the two wait for each other. The watcher threads detect and report this.

The keys of the ranks' messages in the store, which works while collectives are blocked:

    failed/<round>     the first error of this round (one run of a guarded block): rank, stage, microbatch, traceback
    seen/<rank>        this rank has read that error, or has failed too
    in/<rank>          the latest calls of a rank that has been waiting long
    end, ended/<rank>  rank 0 wants to end; this rank has stopped watching
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch.distributed as dist

from paceline.checkpoint import leaving
from paceline.parallel.errors import WorkerError
from paceline.parallel.mesh import World

if TYPE_CHECKING:
    from paceline.torch_private import Store

#: Matches error messages of the communication backends. An error of the script, such as a plain "timed out", must not match.
_COMMUNICATION = re.compile(
    r"gloo/|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting \d+ ?ms|application timeout|"
    r"tcpstore|watchdog|monitoredbarrier",
    re.IGNORECASE,
)

_microbatch: int | None = None

#: Interval in seconds at which a rank checks whether another rank has failed.
POLL_S = 0.5
#: How many seconds a rank may stay blocked after another rank has failed. Then the watcher ends the blocked rank's process.
GRACE_S = 5.0
#: Rank 0 serves the store. At its exit it waits at most this many seconds until the other ranks have read all messages.
LAST_S = 3.0

#: All calls have numbers. After a lost rank was replaced, the first call of all ranks has this number.
_ALIGNED = 1000

#: If a call takes longer than this many seconds, the rank publishes its list of calls, so that other ranks can compare it.
STUCK_S = 10.0


@contextlib.contextmanager
def at_microbatch(index: int) -> Iterator[None]:
    """Within the block, name this microbatch in error reports."""
    global _microbatch
    _microbatch = index
    yield
    # Don't use `finally`: after an error, `_microbatch` must keep its value, which the enclosing `guard` reports.
    _microbatch = None


def is_communication(error: BaseException) -> bool:
    """Return whether an error only says that communication with another rank failed."""
    is_torchs = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
    if is_torchs or type(error).__name__ in ("CollectivesError", "ShutDownError"):
        return True
    return type(error) in (RuntimeError, dist.DistError) and bool(_COMMUNICATION.search(str(error)))


class CallListener(Protocol):
    """An object to notify when a guarded call (`FailureWatch.guard`) starts, ends or fails."""

    def entered(self, what: str) -> None: ...

    def returned(self) -> None: ...

    def lost(self, what: str) -> None: ...


class FailureWatch:
    """The exchange of error reports with other ranks, for one training.

    Attributes:
        listener: The object to notify of each guarded call, or None.
    """

    def __init__(self, world: World) -> None:
        self._line = _line_of(world)
        self._stage = world.coordinate("pipe") if world.extent("pipe") > 1 else None
        self.listener: CallListener | None = None

    @contextlib.contextmanager
    def guard(self, what: str = "") -> Iterator[None]:
        """Report an error in the block to all ranks.

        `what` is the name of the call, such as "step", for messages.

        Raises:
            WorkerError: Another rank failed first.
        """
        global _microbatch
        if self._line is None or self._line.is_inside:
            yield
            return
        self._line.enter(what)
        if self.listener is not None:
            self.listener.entered(what)
        try:
            yield
        except Exception as error:
            # Read `_line`, the connection to the other ranks, only now: in the block, `renew` may have replaced it.
            line = self._line
            # A communication error is the consequence of another rank's failure. Wait for that rank's report.
            if is_communication(error) and line.wait_for_root():
                raise line.worker_error() from error
            line.tell(error, lost=is_communication(error), stage=self._stage, microbatch=_microbatch)
            if is_communication(error):
                if self.listener is not None:
                    self.listener.lost(what)
                raise line.lost(error) from error
            raise
        finally:
            self._line.leave()
            _microbatch = None
            if self.listener is not None:
                self.listener.returned()

    def knows_cause(self) -> bool:
        """Return whether a rank has reported its error, or the end of its script."""
        assert self._line is not None
        return self._line.knows_cause()

    def drop(self) -> None:
        """Stop watching the store of a process group that is about to end."""
        assert self._line is not None
        self._line.drop()

    def renew(self, world: World) -> None:
        """Report errors through the new process group's store. Call this within `guard`."""
        self._line = _line_of(world)
        assert self._line is not None
        self._line.is_inside = True

    def align(self, what: str) -> None:
        """Give the present call the same number on all ranks, also on new ranks."""
        assert self._line is not None
        self._line.align(what)


_line: ErrorLine | None = None


def _line_of(world: World) -> ErrorLine | None:
    global _line
    if world.store is None:
        return None
    if _line is None or _line.store is not world.store:
        if _line is not None:
            _line.close()
        _line = ErrorLine(world.rank, world.size, world.store)
    return _line


class _Message(TypedDict):
    rank: int
    stage: int | None
    microbatch: int | None
    what: str
    text: str


class ErrorLine:
    """A channel for error reports through the key-value store.

    All ranks run the same guarded blocks (`guard`), and each run of such a block is a round. A rank that fails ignores other
    ranks' errors of the same round: the cause is probably the same, and the script may handle the error and continue.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size = rank, size
        self.store = store
        self._others = [other for other in range(size) if other != rank]
        self.is_inside = False
        self._round = 0
        self._calls: deque[tuple[int, str]] = deque(maxlen=16)
        self._since = 0.0
        self._own_failures: set[int] = set()
        self._root: _Message | None = None
        self._root_round = 0
        self._reading = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="paceline-failures", daemon=True)
        self._thread.start()
        # At the end of the program, report an error that was raised outside of Paceline's calls, for example between two steps.
        self._before = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self.close)

    def enter(self, what: str) -> None:
        if self._root is not None:
            raise self.worker_error()
        self._since = time.monotonic()
        self._round += 1
        self._calls.append((self._round, what))
        self.is_inside = True

    def leave(self) -> None:
        self.is_inside = False

    def align(self, what: str) -> None:
        self._round = _ALIGNED
        self._calls.clear()
        self._calls.append((self._round, what))

    def knows_cause(self) -> bool:
        with contextlib.suppress(Exception):  # the store ends when rank 0 ends
            self._read()
        return self._root is not None or any(map(self._has_ended, self._others))

    def drop(self) -> None:
        """Stop the polling thread without waiting for other ranks."""
        atexit.unregister(self.close)
        self._over.set()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._before

    def tell(
        self, error: BaseException, *, lost: bool = False, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        """Publish this rank's error.

        `lost` marks an error that another rank's end has caused.
        """
        with self._reading:
            self._own_failures.add(self._round)
            # The watcher may just have read another rank's error in this call. Drop that error: otherwise `enter` would
            # raise it in the next call, even if the caller handles this rank's own error.
            if self._root is not None and self._root_round in self._own_failures:
                self._root = None
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        what = f"{type(error).__name__}: {error}"
        message: _Message = {"rank": self.rank, "stage": stage, "microbatch": microbatch, "what": what, "text": text}
        key = "lost" if lost else f"failed/{self._round}"
        with contextlib.suppress(Exception):
            # `compare_set` writes only to an empty key, so that the error of the first failing rank stays.
            self.store.compare_set(key, "", json.dumps(message))
        self._say_seen()

    def wait_for_root(self) -> bool:
        """Wait for the first failed rank's report. Return whether it came."""
        deadline = time.monotonic() + GRACE_S
        while self._root is None and time.monotonic() < deadline and not leaving.asked():
            try:
                self._read()
            except Exception:
                break
            time.sleep(0.02)
        if self._root is not None:
            self._say_seen()
        return self._root is not None

    def worker_error(self) -> WorkerError:
        root = self._root
        assert root is not None
        places = ("rank", root["rank"]), ("stage", root["stage"]), ("microbatch", root["microbatch"])
        where = ", ".join(f"{name} {number}" for name, number in places if number is not None)
        text = "\n".join(f"    {line}" for line in root["text"].rstrip().splitlines())
        return WorkerError(
            f"{where} failed first, and this rank ({self.rank}) can't go on without it: {root['what']}\n"
            f"  The traceback of rank {root['rank']}:\n{text}",
            rank=int(root["rank"]),
            cause_text=root["text"],
        )

    def lost(self, error: BaseException) -> WorkerError:
        """Return a WorkerError for a communication error without a known cause."""
        for rank in self._others:
            if self._has_ended(rank):
                return WorkerError(
                    f"rank {rank} has come to the end of its script, and rank {self.rank} waits for it in "
                    f"{dict(self._calls).get(self._round, 'a call')}. Every rank has to make the same calls in the same order: "
                    "is one below `if rank == 0`?",
                    rank=rank,
                    cause_text="",
                )
        return WorkerError(
            f"rank {self.rank} can't reach another rank, which has ended without a word: was it killed, for want of memory "
            f"perhaps? See its log, or its machine's. torch says: {error}",
            rank=-1,
            cause_text="",
        )

    def _has_ended(self, rank: int) -> bool:
        try:
            return bool(self.store.check([f"ended/{rank}" if rank else "end"]))
        except Exception:
            # Rank 0 has ended. It served the store, so the store does not answer any more.
            return False

    def close(self) -> None:
        """Stop the polling thread. Rank 0 first waits for the other ranks' threads."""
        atexit.unregister(self.close)
        if self._over.is_set():
            return
        if self.rank == 0 and self._thread.is_alive():
            with contextlib.suppress(Exception):
                self.store.set("end", "1")
            # The store ends with rank 0's process, so rank 0 waits until the other ranks' watchers have stopped.
            self._wait_for_others("ended")
        self._over.set()
        self._thread.join(2 * POLL_S)
        if self.rank != 0:
            with contextlib.suppress(Exception):
                self.store.set(f"ended/{self.rank}", "1")
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._before

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The script has raised this error outside of Paceline's calls. Report it before Python prints the traceback: otherwise
        # the other ranks would wait in their next call until the process group's timeout.
        if (
            isinstance(error, Exception)
            and not isinstance(error, WorkerError)
            and self._round not in self._own_failures
        ):
            self.tell(error)
        self._before(kind, error, trace)

    def _say_seen(self) -> None:
        if self.rank == 0:
            self._wait_for_others("seen")
            return
        with contextlib.suppress(Exception):
            self.store.set(f"seen/{self.rank}", "1")

    def _wait_for_others(self, word: str) -> None:
        deadline = time.monotonic() + LAST_S
        others = [f"{word}/{rank}" for rank in self._others]
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and not leaving.asked() and not self.store.check(others):
                time.sleep(0.02)

    # Watch in a separate thread: the main thread may be in a collective, which returns only when all ranks have joined.
    def _look(self) -> None:
        ends_at: float | None = None
        while not self._over.wait(POLL_S):
            try:
                self._read()
                self._compare_calls()
                if self.store.check(["end"]):
                    self.store.set(f"ended/{self.rank}", "1")
                    return
            except Exception:
                # Stop watching: rank 0 and its store have ended. A main thread that waits for rank 0 gets an error from torch.
                return
            if self._root is None or not self.is_inside:
                ends_at = None
                continue
            # With Gloo the collective often fails within GRACE_S, because the failed rank closes its connections. `guard` then
            # raises a WorkerError, which the script can handle. End this process only if its call is still running after GRACE_S.
            ends_at = ends_at or time.monotonic() + GRACE_S
            if time.monotonic() > ends_at:
                # Use `os._exit`: the main thread waits in C++, so no exception reaches it, and a regular exit would wait for it.
                print(f"paceline: {self.worker_error()}", file=sys.stderr, flush=True)
                os._exit(1)

    def _compare_calls(self) -> None:
        """End the process if two ranks have long waited in different calls."""
        if not self.is_inside or time.monotonic() - self._since < STUCK_S:
            return
        own = dict(self._calls)
        self.store.set(f"in/{self.rank}", json.dumps(list(own.items())))
        for rank in (rank for rank in self._others if self.store.check([f"in/{rank}"])):
            # A slow rank may have made fewer calls than a fast rank, which is no error. So compare the calls with equal numbers:
            # if two ranks made different calls under one number, they wait for each other forever.
            for number, call in json.loads(self.store.get(f"in/{rank}")):
                if own.get(number, call) == call:
                    continue
                print(
                    f"paceline: rank {self.rank} called {own[number]} where rank {rank} called {call}, and now they wait for "
                    "each other. Every rank has to make the same calls in the same order: is one below `if rank == 0`?",
                    file=sys.stderr,
                    flush=True,
                )
                # Give the other rank's watcher time to read this rank's calls, because the end of rank 0 also ends the store.
                time.sleep(4 * POLL_S)
                os._exit(1)

    def _read(self) -> None:
        """Read another rank's error of the last three rounds from the store."""
        with self._reading:
            now = self._round
            # Check three calls: a rank that has sent its part of a collective continues before other ranks receive this part.
            for number in range(max(now - 2, 0), now + 1):
                key = f"failed/{number}"
                if self._root is None and number not in self._own_failures and self.store.check([key]):
                    self._root = json.loads(self.store.get(key))
                    self._root_round = number
                    self.store.set(f"seen/{self.rank}", "1")
