"""Requests to end a worker, and its exit once its checkpoint is complete.

    SIGTERM                    a cancel, a preemption or a time limit: recorded, and handled in the next call of save()
    PACELINE_ELASTIC_REQUEST   the supervisor wants to continue with more nodes (docs/decisions/0018-elastic.md)

The state cannot be saved between two calls of save(), because a training step is half done. Therefore the first SIGTERM
only sets a flag. A second SIGTERM ends the process immediately.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

from paceline.system import run_variables

SIGNAL, RESIZE, LIMIT = "signal", "resize", "limit"
#: Time limits in seconds (guesses). _WITH_STORE_S, _WITHOUT_STORE_S: how long a rank that saves nothing waits for the saving rank
#: to end, with or without torch's key-value store. _FOLLOW_S: how long the saving rank waits for the other ranks.
_WITH_STORE_S, _WITHOUT_STORE_S, _FOLLOW_S = 30.0, 5.0, 5.0
#: Seconds to wait at exit for the thread that `follow` starts: it may be in a request to torch's key-value store.
_STOP_S = 2.0
_LEFT = "paceline_checkpoint_left"

_is_asked = False
#: Whether the thread that reads signals has read SIGTERM. The main thread runs no signal handler in a collective.
_has_heard = False
_is_listening = False
_saves = True
#: Write end of the pipe to which Python writes signal numbers, or None if this module has not created the pipe.
_pipe: int | None = None
_following: threading.Thread | None = None
#: Only one thread may wait for the saving rank. Reentrant: a signal handler may interrupt the lock's holder.
_one_follows = threading.RLock()
#: Set when the script ends normally. The thread that waits for the saving rank then stops without ending this process.
_is_over = threading.Event()

#: Environment variables with Unix times: when max_run_duration_seconds ends the run, and when the Slurm job ends.
VARIABLES = ("PACELINE_END_TIME", "SLURM_JOB_END_TIME")
#: Safety margin in seconds (a guess). The last save begins this much earlier than the measured times of steps and saves require.
_SPARE_S = 10.0


def listen(*, saves: bool) -> None:
    """Record SIGTERM from now on, unless the script has its own handler.

    `saves` says whether this rank writes checkpoints.
    """
    global _is_listening, _saves
    _saves = saves
    if _is_listening or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_signal)
        # SIGTERM must end forked children at once, for example a DataLoader's workers, which save nothing. Block SIGTERM during a
        # fork: otherwise the child could run this handler, which only records the signal, before `_in_child` removes the handler.
        os.register_at_fork(before=_block, after_in_child=_in_child, after_in_parent=_unblock)
        if not saves:
            _hear_in_collectives()
    _is_listening = True


def asked() -> str | None:
    """Return why this process must end: "signal" (SIGTERM), "resize" (more nodes), or None."""
    if _is_asked or _has_heard:
        return SIGNAL
    return RESIZE if run_variables.is_resize_requested() else None


def leave(why: str, *, followers: int = 0) -> NoReturn:
    """End this process: with exit code EXIT_RESIZE if `why` is "resize", else by SIGTERM.

    First wait up to 5 s until the other ranks, which save nothing, have ended. `followers` is the number of these ranks.
    """
    if followers:
        # Let the other ranks end first: when this rank's connections close, collectives on the other ranks raise errors.
        with contextlib.suppress(Exception):
            store = default_store()
            store.set(_LEFT, "1")
            store.wait([f"{_LEFT}_{rank}" for rank in range(1, followers + 1)], timedelta(seconds=_FOLLOW_S))
    if why == RESIZE:
        raise SystemExit(run_variables.EXIT_RESIZE)
    _flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    # This line runs only if SIGTERM is blocked. Then exit with the exit code of SIGTERM.
    raise SystemExit(128 + signal.SIGTERM)


def default_store() -> Any:
    """Return the key-value store of torch's default process group, or None."""
    from paceline import torch_private

    # torch may not be loaded, may have no process group, or may use the MPI backend. Then there is no key-value store.
    with contextlib.suppress(Exception):
        if sys.modules["torch.distributed"].is_initialized():
            return torch_private.default_store()
    return None


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _is_asked
    if _is_asked:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _is_asked = True
    if not _saves:
        follow()


def follow() -> None:
    """Start a thread that ends this process once the saving rank has ended.

    The saving rank's last step may need collectives with this rank, so this rank must not exit first. The main thread
    cannot wait for the saving rank, because it may be blocked in a collective.
    """
    global _following
    with _one_follows:
        if _following is None:
            _following = threading.Thread(target=_end_after_the_first, name="paceline-leave", daemon=True)
            _following.start()
            # Stop the thread at exit: a thread that returns from C++ code while Python shuts down would abort the process.
            atexit.register(_stop_following)


def _hear_in_collectives() -> None:
    """Start a thread that handles SIGTERM during collectives.

    The main thread runs Python's signal handlers only after its collective has returned. The new thread reads signals
    from a pipe (`signal.set_wakeup_fd`). If the script uses that function, no thread starts.
    """
    global _pipe
    hears, tells = os.pipe()
    os.set_blocking(tells, False)
    if (others := signal.set_wakeup_fd(tells, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(others)
        os.close(hears)
        os.close(tells)
        return
    _pipe = tells
    threading.Thread(target=_hear, args=(hears,), name="paceline-hear", daemon=True).start()


def _hear(pipe: int) -> None:
    global _has_heard
    with open(pipe, "rb", buffering=0) as hears:
        while numbers := hears.read(64):
            if signal.SIGTERM in numbers:
                _has_heard = True
                follow()
                return


def _stop_following() -> None:
    _is_over.set()
    if _following is not None:
        _following.join(_STOP_S)


def _end_after_the_first() -> None:
    store = default_store()
    deadline = time.monotonic() + (_WITHOUT_STORE_S if store is None else _WITH_STORE_S)
    while time.monotonic() < deadline and not _has_first_left(store):
        if _is_over.wait(0.05):
            return
    _flush()
    with contextlib.suppress(Exception):
        store.set(f"{_LEFT}_{sys.modules['torch.distributed'].get_rank()}", "1")
    if asked() == RESIZE:
        os._exit(run_variables.EXIT_RESIZE)
    # Python lets only the main thread change a signal handler, so reset SIGTERM's handler by a call of the C library.
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)


def _has_first_left(store: Any) -> bool:
    try:
        return store is not None and bool(store.check([_LEFT]))
    except Exception:
        return True  # rank 0 serves torch's key-value store, so an error means that rank 0 has ended


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _in_child() -> None:
    global _pipe
    if _pipe is not None:
        # Close the pipe that the child has inherited: otherwise the parent would read the child's signals from this pipe.
        signal.set_wakeup_fd(-1)
        os.close(_pipe)
        _pipe = None
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class TimeLimit:
    """A clock that requests one save shortly before the run's time limit.

    The clock measures the longest interval between two calls of save() and the duration of the longest save. It
    requests the save when the time left is twice the sum of both, plus 10 seconds.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        #: Unix time of the last check (`asked`); infinite before the first one, so that the time before it is no step.
        self._last = math.inf
        self._longest_s = self._save_s = 0.0
        self._is_said = False

    def asked(self, now: float | None = None) -> str | None:
        """Return "limit" once, when the approaching time limit requires a save, else None."""
        now = time.time() if now is None else now
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        if self._is_said or now < self._end() - 2 * (self._longest_s + self._save_s) - _SPARE_S:
            return None
        self._is_said = True
        return LIMIT

    def took(self, seconds: float) -> None:
        """Record the duration of a save."""
        self._save_s = max(self._save_s, seconds)

    def _end(self) -> float:
        texts = (self._environment.get(name, "") for name in VARIABLES)
        return min((float(text) for text in texts if text.replace(".", "", 1).isdecimal()), default=math.inf)
