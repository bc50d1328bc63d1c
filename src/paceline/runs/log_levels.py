"""Recognize the levels of log lines in common formats, such as Python's logging and glog.

A traceback and the line of its exception count as errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Level -> its number, as in Python's logging.
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_BY_LETTER = {"D": 10, "I": 20, "W": 30, "E": 40, "F": 40, "C": 40}
#: A level is recognised only in the first characters of a line: at the start, or after a time and a logger's name.
_FIRST = 160
_LEVEL = re.compile(
    r"\b(DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b"
    # This part matches, for example, level=warning and "level": "error".
    r"|(?i:\blevel\w{0,4}[\"']?\s?[=:]\s?[\"']?)((?i:debug|info|warn|err|crit|fatal))"
    # This part matches, for example, E1128 12:30:00.123 (glog) and [W1128 12:30:00 (torch).
    r"|(?:^|[\[\]: ])([DIWEF])\d{4} \d\d:\d\d:\d\d"
    # This part matches, for example, UserWarning: and ValueError: (Python), and error: (compilers).
    r"|(?:^|[\s.])(?:\w{0,80}(Warning|Error|Exception|KeyboardInterrupt)(?::|$)|(warning|error|fatal|fatal error):)"
)
#: Each line with a warning or error has one of these texts in lower case. The last texts are for glog lines ("E1128 12:30").
_SERIOUS = (
    "warn",
    "err",
    "crit",
    "fatal",
    "exception",
    "interrupt",
    "traceback",
    *(f"{one}{two}" for one in "wef" for two in "01"),
)
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_TRACEBACK = "Traceback (most recent call last)"


def level_of(text: str) -> int:
    """Return the `logging` level of a line without color codes; 0 if unknown.

    Example:
        >>> level_of("2026-11-28 10:00:00 WARNING disk is slow"), level_of("step 1")
        (30, 0)
    """
    if _TRACEBACK in text:
        return LEVELS["error"]
    found = _LEVEL.search(text[:_FIRST])
    word = next((group for group in found.groups() if group), "") if found else ""
    if word in {"KeyboardInterrupt", "Exception"}:
        return LEVELS["error"]
    return _BY_LETTER[word[0].upper()] if word else 0


class LevelFilter:
    """A filter that keeps log lines of a minimum level, and whole tracebacks."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._open: set[object] = set()

    def lines(self, writer: object, block: str) -> Iterator[tuple[int, str]]:
        """Yield (offset, line) of each line in the text `block` that passes the filter."""
        lower, at = block.lower(), 0
        # Searching for words such as "error" is far quicker than testing each line, but needs texts of equal length.
        is_quick = self._least >= LEVELS["warning"] and len(lower) == len(block)
        places = dict.fromkeys(_SERIOUS, -1)
        while at <= len(block):
            if is_quick and writer not in self._open:
                for word in (word for word, place in places.items() if place < at):
                    found = lower.find(word, at)
                    places[word] = found if found >= 0 else len(block) + 1
                at = max(at, block.rfind("\n", 0, min(places.values())) + 1)
                if min(places.values()) > len(block):
                    return
            end = block.find("\n", at)
            line = block[at : end if end >= 0 else None]
            if self.keeps(writer, line):
                yield at, line
            at += len(line) + 1

    def keeps(self, writer: object, text: str) -> bool:
        """Return whether the next log line of the rank `writer` passes the filter."""
        text = COLOUR.sub("", text) if "\x1b" in text else text
        if writer in self._open:
            # After a traceback, the first line without indentation names the exception.
            if text.strip() and not text[0].isspace():
                self._open.discard(writer)
            return True
        if _TRACEBACK in text:
            self._open.add(writer)
        return level_of(text) >= self._least
