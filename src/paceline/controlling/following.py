"""A run with children followed as it goes: what its controller says, line by line."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.logs import LineAssembler, Tail
from paceline.runs.record import RunRecord

_PAUSE_S = 0.1


def to_the_end(folder: RunFolder, line: Callable[[str], None]) -> RunRecord:
    """Call `line` for each line of the controller's log from its start, until the run has ended; the final record."""
    tail, lines = Tail(folder.driver_log), LineAssembler()
    try:
        while True:
            # The record first: what is said before the end is there once the end is seen.
            record = read.record(folder)
            for data in tail.read():
                for text in lines.feed(data):
                    line(text)
            if record.is_terminal:
                return record
            time.sleep(_PAUSE_S)
    finally:
        tail.close()
