"""A sweep followed as it goes: what its controller says, line by line."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord

_PAUSE_S = 0.1


def to_the_end(folder: RunFolder, line: Callable[[str], None]) -> RunRecord:
    """Call `line` for each line of the controller's log from its start, until the sweep has ended; the final record."""
    tail = _Tail(folder.logs / "driver.log")
    while True:
        # The record first: what is said before the end is there once the end is seen.
        record = read.record(folder)
        for text in tail.new():
            line(text)
        if record.is_terminal:
            return record
        time.sleep(_PAUSE_S)


class _Tail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> list[str]:
        """The lines that have been finished since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        # What follows the last line's end is still being written and comes whole with a later look.
        whole = data.rfind(b"\n") + 1
        self._at += whole
        return data[:whole].decode("utf-8", errors="replace").splitlines()
