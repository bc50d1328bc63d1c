r"""Escaping of untrusted text for a terminal: a script's lines, tags, names and error messages.

Terminals execute control characters: they clear the screen, set the title, write to the clipboard or reverse a line. So such
characters are escaped (`\x1b`), or dropped if they only move the cursor.

ECMA-48 and xterm (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html) define the sequences. Unicode's bidirectional
formatting reverses text ("Trojan Source", Boucher and Anderson, 2021).
"""

from __future__ import annotations

import re
from collections.abc import Hashable

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"  # control, bidi, surrogate codes
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_COLOUR = r"\x1b\[[0-9;:]*m"
#: Complete escape sequences: for cursor and colours (CSI); for titles, links and clipboard (OSC and similar); short ones.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\`-~]"
)
_COLOURS = re.compile(_COLOUR)
_RESET = "\x1b[0m"
#: Maximum number of characters of the colour escape sequences that carry over to a writer's next line.
_LONGEST_COLOURS = 256


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with control characters escaped, such as `\\x1b` or `\\n`.

    lines: keep newlines and tabs.
    """
    # Return early, because nearly all lines are printable and so contain no control characters.
    if text.isprintable():
        return text
    if lines:
        return "\n".join(_CONTROL.sub(_escape_in_line, line.removesuffix("\r")) for line in text.split("\n"))
    return _CONTROL.sub(_escape, text)


def visible_line(text: str) -> str:
    """Return a log line for a terminal, without control characters except colours."""
    if text.isprintable():
        return text
    text = _SEQUENCE.sub(_colour_or_nothing, text.replace("\b", ""))
    parts = _COLOURS.split(text)
    # The split text has one part more than it has colour sequences, so add an empty colour to the list.
    colours = [*_COLOURS.findall(text), ""]
    return "".join(_CONTROL.sub(_escape_in_line, part) + colour for part, colour in zip(parts, colours, strict=True))


class TerminalLines:
    """A formatter that keeps the colours of each rank's lines apart on one terminal."""

    def __init__(self) -> None:
        self._set: dict[Hashable, str] = {}

    def line(self, writer: Hashable, text: str) -> str:
        """Return a line of the rank `writer` in the rank's current colours, reset at the end."""
        before = self._set.get(writer, "")
        if not before and text.isprintable():
            return text
        text = visible_line(text)
        after = before
        for code in _COLOURS.findall(text):
            # An escape code has fields: `\x1b[1;31m` has 1 and 31. A last field that is 0 or empty resets all colours.
            fields = code[2:-1].split(";")
            if fields[-1] in ("", "0"):
                after = ""
            else:
                # A first field of 0 resets the earlier colours; another 0, as in 38;2;R;G;B, does not.
                keeps = fields[0] not in ("", "0") and len(after) < _LONGEST_COLOURS
                after = after + code if keeps else code
        self._set[writer] = after
        return before + text + (_RESET if after else "")


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a surrogate in this range stands for a byte that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _escape_in_line(found: re.Match[str]) -> str:
    return "\t" if found[0] == "\t" else _escape(found)


def _colour_or_nothing(found: re.Match[str]) -> str:
    return found[0] if _COLOURS.fullmatch(found[0]) else ""
