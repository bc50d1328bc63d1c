"""Query schedulers such as Slurm in the background, and share their answers between runs.

    <workspace>/engines/<name>.json, <name>.lock

All runs of a workspace share the answer of a scheduler (engine): one process queries, the others wait. An answer is a JSON
object. Its key "told" has the time of the answer in seconds since the epoch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.errors import EngineError, PacelineError, TargetError
from paceline.system import locks
from paceline.system.files import read_json, write_json

#: Age in seconds from which a cached answer is too old to be used.
FRESH_S = 5.0

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def answers_dir(workspace_dir: Path) -> Path:
    """Return a workspace's folder of cached answers of Slurm, Ray and others."""
    return workspace_dir / "engines"


def doctor_path(workspace_dir: Path, name: str) -> Path:
    """Return the file with a target's last result of `paceline compute doctor`."""
    return answers_dir(workspace_dir) / f"{name}.doctor.json"


def answer(path: Path, ask: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Return the answer cached at `path`; call `ask` if it is too old."""
    found = kept(path)
    if not _is_fresh(found, clock):
        # Hold the lock during the query: other processes then wait for the answer instead of sending their own query.
        with locked(path):
            found = kept(path)  # another process may have stored an answer while this process waited for the lock
            if not _is_fresh(found, clock):
                found = ask()
                keep(path, found)
    return found


def kept(path: Path) -> dict[str, object]:
    """Return the answer cached at `path`, however old; {} without one."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def keep(path: Path, found: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # on a full disk, or in another user's workspace, don't cache the answer
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let only this process renew the cached answer `path` during a `with` block.

    The lock has no effect if the folder is read-only or its file system has no locks.
    """
    with contextlib.ExitStack() as held:
        # Query without a lock if this user can only read the workspace.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locks.locked(path.with_suffix(".lock")))
        yield


def _is_fresh(found: dict[str, Any], clock: Callable[[], float]) -> bool:
    # An answer from the future is not fresh: the clock of the machine that wrote it may be wrong.
    return abs(clock() - float(found.get("told", 0.0))) < FRESH_S


class Lookout(Generic[Result]):
    """A background poller of one value, such as the number of free nodes.

    After a failed query, the poller keeps the last value.

    Args:
        look: Queries the value and returns it.
        pause_s: Seconds from the end of one query to the start of the next.
        first: The value until the first answer.
    """

    def __init__(self, look: Callable[[], Result], pause_s: float, first: Result) -> None:
        self._look, self._pause_s = look, pause_s
        self._thread: threading.Thread | None = None
        self._next = 0.0
        # Only the polling thread writes this value, so it needs no lock.
        self._found = first

    def found(self) -> Result:
        """Return the latest value, and start a query when due. Never blocks."""
        is_looking = self._thread is not None and self._thread.is_alive()
        if not is_looking and time.monotonic() >= self._next:
            # Use a daemon thread, because a query may hang. Callers then get the last answer, and the supervisor can still exit.
            self._thread = threading.Thread(target=self._run, name="paceline-lookout", daemon=True)
            self._thread.start()
        return self._found

    def _run(self) -> None:
        with contextlib.suppress(TargetError, EngineError, OSError):
            self._found = self._look()
        self._next = time.monotonic() + self._pause_s


def all_within(calls: Mapping[Name, Callable[[], Result]], limit_s: float) -> dict[Name, Result | Exception]:
    """Make all calls in parallel. Return {name: result, exception or TimeoutError}.

    A call that takes longer than `limit_s` gives a TimeoutError. It continues in a daemon thread, because a thread of a
    pool would block the program's exit.
    """
    answers: dict[Name, Result | Exception] = {}

    def make(name: Name, call: Callable[[], Result]) -> None:
        try:
            answer: Result | Exception = call()
        except Exception as error:  # the caller gets this exception in place of an answer
            answer = error
        # No lock is needed: a single assignment is atomic under the GIL.
        answers[name] = answer

    threads = [threading.Thread(target=make, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # Look up each answer only once: a call without an answer at this line counts as timed out, even if it ends a moment later.
    late = TimeoutError(f"no answer in {limit_s:g} s")
    return {name: answers.get(name, late) for name in calls}


def within(call: Callable[[], Result], limit_s: float) -> Result | Exception:
    """Call `call` for at most `limit_s`. Return its result, or the exception."""
    return all_within({"": call}, limit_s)[""]


def said(error: Exception) -> str:
    """Return an exception's text, after its type if it is not Paceline's."""
    return str(error) if isinstance(error, (PacelineError, TimeoutError)) else f"{type(error).__name__}: {error}"
