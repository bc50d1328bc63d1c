"""When a worker is asked to end, and how it ends once its checkpoint is whole.

    SIGTERM            a cancel, a preemption, a time limit: noted, and heeded at the next call of save()
    PACELINE_ELASTIC_REQUEST   the supervisor wants to go on with more nodes (docs/decisions/0018-elastic.md)

Between two calls a step is half done, so nothing can be saved there: the signal alone changes nothing. A second one ends the
process at once, as one without save() would.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
#: The time that a rank that does not save gives the one that does, where they share a store and where they don't; and that
#: the one that has saved gives the others to follow. Guesses.
_WITH_STORE_S, _WITHOUT_STORE_S, _FOLLOW_S = 30.0, 5.0, 5.0
#: For a question to the store that is under way. One that takes longer comes out of it no more.
_STOP_S = 2.0
_LEFT = "paceline_checkpoint_left"

_is_asked = False
#: The same, as a thread has learnt it: the handler has not run yet, for the main thread is in a collective.
_has_heard = False
_is_listening = False
_saves = True
#: The end of the pipe into which the interpreter writes the numbers of signals at once, where this module has made it.
_pipe: int | None = None
_following: threading.Thread | None = None
#: Taken again by a handler that runs within `follow`.
_one_follows = threading.RLock()
#: The script has ended by itself.
_is_over = threading.Event()

#: Unix seconds: of the run (max_run_duration_seconds), of the Slurm job.
VARIABLES = ("PACELINE_END_TIME", "SLURM_JOB_END_TIME")
#: Beside what steps and saves were seen to take. A guess.
_SPARE_S = 10.0


def listen(*, saves: bool) -> None:
    """Note SIGTERM from now on, unless the script has a handler of its own. saves: whether this rank writes checkpoints."""
    global _is_listening, _saves
    _saves = saves
    if _is_listening or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_signal)
        # Helpers that the script forks (a DataLoader's workers) have nothing to save: SIGTERM ends them.
        # Blocked meanwhile, or one that comes just after the fork would be noted in the child and lost.
        os.register_at_fork(before=_block, after_in_child=_in_child, after_in_parent=_unblock)
        if not saves:
            _hear_in_collectives()
    _is_listening = True


def asked() -> str | None:
    """SIGNAL or RESIZE where this process has been asked to end; None where it goes on."""
    if _is_asked or _has_heard:
        return SIGNAL
    return RESIZE if run_variables.is_resize_requested() else None


def leave(why: str, *, followers: int = 0) -> NoReturn:
    """End this process: by SIGTERM, or with the code that tells the supervisor that a checkpoint is whole.

    followers: so many other ranks, 1 and up, may wait for this one in a collective, and are to end with it (`follow`).
    """
    store = default_store() if followers else None
    if store is not None:
        # Before the connections break, which would be an error in their collective. Who has not been asked to end stays.
        with contextlib.suppress(Exception):
            store.set(_LEFT, "1")
            store.wait([f"{_LEFT}_{rank}" for rank in range(1, followers + 1)], timedelta(seconds=_FOLLOW_S))
    if why == RESIZE:
        raise SystemExit(run_variables.EXIT_RESIZE)
    _flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    # Not reached, unless SIGTERM is blocked.
    raise SystemExit(128 + signal.SIGTERM)


def default_store() -> Any:
    """The key-value store of torch's world, or None where the script has made no world."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from paceline import torch_private

    # A world over MPI has none.
    with contextlib.suppress(Exception):
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
    """End this process, which saves nothing, once the rank that does has left. That one may need it for the step that it is
    in. Then this one waits in a collective, where no handler of Python's runs: so a thread ends it.
    """
    global _following
    with _one_follows:
        if _following is None:
            _following = threading.Thread(target=_end_after_the_first, name="paceline-leave", daemon=True)
            _following.start()
            # A script may come to its end meanwhile. A thread that comes out of torch's C++ then aborts the process.
            atexit.register(_stop_following)


def _hear_in_collectives() -> None:
    """Start a thread that hears of SIGTERM while the main thread waits in a collective: the interpreter runs handlers between
    two of its own instructions only, and rank 0 may leave before the next one. Not where the script has such a pipe itself.
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
    while time.monotonic() < deadline:
        if _is_over.wait(0.05):
            return
        try:
            if store is not None and store.check([_LEFT]):
                break
        except Exception:
            break  # the store is rank 0's, and went with it
    _flush()
    with contextlib.suppress(Exception):
        store.set(f"{_LEFT}_{sys.modules['torch.distributed'].get_rank()}", "1")
    if asked() == RESIZE:
        os._exit(run_variables.EXIT_RESIZE)
    # Python lets the main thread alone change a handler; the C library does not ask.
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _in_child() -> None:
    global _pipe
    if _pipe is not None:
        # A signal of the child is none of the parent's.
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
    """Says once that it is time to save: when the next call of save() might come too late.

    The next call comes after the longest time that lay between two so far, and a save takes as long as the longest did;
    both are counted twice.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._last: float | None = None
        self._longest_s = self._save_s = 0.0
        self._is_said = False

    def asked(self, now: float | None = None) -> str | None:
        """LIMIT where a save is due now. Called once at each call of save()."""
        now = time.time() if now is None else now
        if self._last is not None:
            self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        end = self._end()
        if end is None or self._is_said or now < end - 2 * (self._longest_s + self._save_s) - _SPARE_S:
            return None
        self._is_said = True
        return LIMIT

    def took(self, seconds: float) -> None:
        """A save took so long."""
        self._save_s = max(self._save_s, seconds)

    def _end(self) -> float | None:
        found = []
        for name in VARIABLES:
            text = self._environment.get(name, "")
            if text.replace(".", "", 1).isdigit():
                found.append(float(text))
        return min(found, default=None)
