"""Answers of engines, kept for all runs of a workspace together: one asks, the others wait and take its answer.

<workspace>/engines/<name>.json, <name>.lock

An answer is a dict of JSON, with "told": when it was there, in seconds since the epoch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.system import locks
from paceline.system.files import read_json, write_json

#: How old an answer may be.
FRESH_S = 5.0


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
