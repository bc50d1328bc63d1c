"""Answers of engines, kept for all runs of a workspace together: one asks, the others wait and take its answer.

<workspace>/engines/<name>.json, <name>.lock

An answer is a dict of JSON, with "told": when it was there, in seconds since the epoch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import EngineError, PacelineError, TargetError
from paceline.system import locks
from paceline.system.files import read_json, write_json

#: How old an answer may be.
FRESH_S = 5.0

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def answers_dir(workspace_dir: Path) -> Path:
    """The folder in which the answers of a workspace's engines lie."""
    return workspace_dir / "engines"


def answer(path: Path, ask: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """The answer in this file, no older than `FRESH_S`; else what `ask` returns, which is in it from then on."""
    found = kept(path)
    if not _is_fresh(found, clock):
        # The lock is held while the engine is asked: others wait for this answer instead of asking themselves.
        with locked(path):
            found = kept(path)  # by now somebody else may have asked
            if not _is_fresh(found, clock):
                found = ask()
                keep(path, found)
    return found


def kept(path: Path) -> dict[str, Any]:
    """What the file has, however old; {} where that is nothing."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def keep(path: Path, found: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk, or somebody else's workspace: the answer is good all the same
        write_json(path, found)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """While it lasts, no other process asks for this file; but where its folder can't be written to, and on a file system without
    locks.
    """
    with contextlib.ExitStack() as held:
        # Whoever may only read the workspace still gets an answer, one that is not shared.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locks.locked(path.with_suffix(".lock")))
        yield


def _is_fresh(found: dict[str, Any], clock: Callable[[], float]) -> bool:
    # Clocks of machines that share the folder may differ.
    return abs(clock() - float(found.get("told", 0.0))) < FRESH_S


class Lookout:
    """What `look` returns, a number, as it was when asked last. pause_s: from one look's end to the next.

    A look that fails, for the engine does not answer, changes nothing.
    """

    def __init__(self, look: Callable[[], int], pause_s: float) -> None:
        self._look, self._pause_s = look, pause_s
        self._thread: threading.Thread | None = None
        self._next = 0.0
        # Written by the thread alone, and read here: one number.
        self._found = 0

    def found(self) -> int:
        """The last answer, 0 before the first. Begins another look where it is time for one; never waits."""
        is_looking = self._thread is not None and self._thread.is_alive()
        if not is_looking and time.monotonic() >= self._next:
            # A daemon: an engine that never answers must not keep the supervisor alive.
            self._thread = threading.Thread(target=self._run, name="paceline-lookout", daemon=True)
            self._thread.start()
        return self._found

    def _run(self) -> None:
        with contextlib.suppress(TargetError, EngineError, OSError):
            self._found = self._look()
        self._next = time.monotonic() + self._pause_s


def all_within(calls: Mapping[Name, Callable[[], Result]], limit_s: float) -> dict[Name, Result | Exception]:
    """Make all calls at once; what each returns or raises, TimeoutError for one that takes longer than `limit_s`.

    Such a call goes on in the background; what it brings is lost.
    """
    answers: dict[Name, Result | Exception] = {}

    def make(name: Name, call: Callable[[], Result]) -> None:
        try:
            answer: Result | Exception = call()
        except Exception as error:  # whoever asked decides what it means
            answer = error
        # One assignment under the interpreter's lock, so nobody sees half an answer.
        answers[name] = answer

    threads = [threading.Thread(target=make, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # Read once: an answer that comes after this moment counts as late.
    late = TimeoutError(f"no answer in {limit_s:g} s")
    return {name: answers.get(name, late) for name in calls}


def within(call: Callable[[], Result], limit_s: float) -> Result | Exception:
    """Make one call as `all_within` does."""
    return all_within({"": call}, limit_s)[""]


def said(error: Exception) -> str:
    """The text of an error, with its name where it is not one of Paceline's own."""
    return str(error) if isinstance(error, (PacelineError, TimeoutError)) else f"{type(error).__name__}: {error}"
