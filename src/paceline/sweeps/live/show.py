"""A sweep shown to its end, in the way that fits where the program runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO

from paceline.controlling import following
from paceline.runs import notebook as runs_notebook
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.sweeps.live import notebook, terminal


def to_the_end(folder: RunFolder, stream: IO[str], line: Callable[[str], None], *, stays: bool = True) -> RunRecord:
    """Show the sweep until it has ended; its final record.

    A notebook gets a table that is replaced, a terminal one that is drawn over (stays: and left there), and anything else
    what the controller says, each line by `line`.
    """
    if runs_notebook.is_here():
        return notebook.to_the_end(folder)
    # A dumb terminal, such as an editor's, can't be drawn over.
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", ""):
        return terminal.to_the_end(folder, stream, stays=stays)
    return following.to_the_end(folder, line)


def way_back(folder: RunFolder) -> str:
    """What is said to who has stopped watching."""
    return (
        f"Sweep {folder.run_id} goes on. See it again: paceline sweep show -f {folder.run_id}\n"
        f"End it: paceline sweep stop {folder.run_id}"
    )
