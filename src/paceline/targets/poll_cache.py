"""Answers of engines, kept for all runs of a workspace together: one asks, the others wait and take its answer.

<workspace>/engines/<name>.json, <name>.lock
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from paceline.system import locks

#: How old an answer may be.
FRESH_S = 5.0


def answers_dir(workspace_dir: Path) -> Path:
    """The folder in which the answers of a workspace's engines lie."""
    return workspace_dir / "engines"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """While it lasts, no other process asks: whether that is so. It is not where the folder can't be written to, nor on a
    file system without locks."""
    is_held = False
    with contextlib.ExitStack() as held:
        # Whoever may only read the workspace still gets an answer, one that is not shared.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locks.locked(path))
            is_held = True
        yield is_held
