"""Levels of log lines: by the words of Python's logging, of glog and of common formats.

A traceback and the line of its exception count as errors.
"""

from __future__ import annotations

import re

#: Level -> its number, as in Python's logging.
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_BY_LETTER = {"D": 10, "I": 20, "W": 30, "E": 40, "F": 40, "C": 40}
#: A level has its place at the start of a line, behind a time and a name.
_FIRST = 160
_LEVEL = re.compile(
    r"\b(DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b"
    # level=warning, "level": "error"
    r"|(?i:\blevel\w{0,4}[\"']?\s?[=:]\s?[\"']?)((?i:debug|info|warn|err|crit|fatal))"
    # E1128 12:30:00.123 of glog, [W1128 12:30:00 of torch
    r"|(?:^|[\[\]: ])([DIWEF])\d{4} \d\d:\d\d:\d\d"
    # UserWarning: and ValueError: of Python, error: of compilers
    r"|(?:^|[\s.])(?:\w{0,80}(Warning|Error|Exception|KeyboardInterrupt)(?::|$)|(warning|error|fatal|fatal error):)"
)
#: A part of every line with a warning or an error.
_SERIOUS = re.compile(r"warn|err|crit|fatal|exception|interrupt|traceback|[WEF]\d{4} ", re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last)"


def level_of(text: str) -> int:
    """Return the level of a line without colours, 0 if the line has no level.

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
    """A filter for lines of at least one level, which keeps whole tracebacks."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._open: set[object] = set()

    def may_keep(self, writer: object, block: str) -> bool:
        """Return False if no line of a block can have the level. This is far quicker than reading its lines."""
        return self._least < LEVELS["warning"] or writer in self._open or _SERIOUS.search(block) is not None

    def keeps(self, writer: object, text: str) -> bool:
        """Return whether to keep the next line of this writer."""
        if writer in self._open:
            # The first line behind a traceback that is not indented names the exception.
            if text.strip() and not text[0].isspace():
                self._open.discard(writer)
            return True
        if _TRACEBACK in text:
            self._open.add(writer)
        return level_of(text) >= self._least
