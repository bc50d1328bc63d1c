r"""Other people's text on a terminal: a script's lines, tags, names, messages of errors and of other machines.

Such text may hold control characters. A terminal obeys them: it clears the screen, sets its title, writes to the clipboard,
turns a line around. So they are shown instead (`\x1b`), or left out where they only move the cursor.

The sequences are those of ECMA-48, and xterm's (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html). What turns
text around is Unicode's bidirectional formatting ("Trojan Source", Boucher and Anderson, 2021).
"""

from __future__ import annotations

import re
from collections.abc import Hashable

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"  # C0, C1, bidi, lone halves
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_COLOUR = r"\x1b\[[0-9;:]*m"
#: Whole sequences: of the cursor and of colours (CSI), of titles, links and the clipboard (OSC and its kin), and short ones.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\`-~]"
)
_COLOURS = re.compile(_COLOUR)
_RESET = "\x1b[0m"
#: Of colours that a writer leaves set, so many characters are kept.
_LONGEST_COLOURS = 256


def visible(text: str, *, lines: bool = False) -> str:
    r"""`text` with every control character as its escape, such as `\\x1b` or `\\n`. lines: ends of lines and tabs stay."""
    # Nearly every line ends here, and this is far quicker than a search.
    if text.isprintable():
        return text
    if lines:
        return "\n".join(_CONTROL.sub(_escape_in_line, line.removesuffix("\r")) for line in text.split("\n"))
    return _CONTROL.sub(_escape, text)


def visible_line(text: str) -> str:
    """A line of a log for a terminal: its colours stay, what moves the cursor or sets a title is left out, and any other
    control character but the tab is shown.
    """
    if text.isprintable():
        return text
    text = _SEQUENCE.sub(_colour_or_nothing, text.replace("\b", ""))
    parts = _COLOURS.split(text)
    # One part more than there are colours, so the last is followed by none.
    colours = [*_COLOURS.findall(text), ""]
    return "".join(_CONTROL.sub(_escape_in_line, part) + colour for part, colour in zip(parts, colours, strict=True))


class TerminalLines:
    """Lines of several writers on one terminal: the colours that one of them leaves set go on in its own next line alone."""

    def __init__(self) -> None:
        self._set: dict[Hashable, str] = {}

    def line(self, writer: Hashable, text: str) -> str:
        """`text` as `visible_line` has it, begun in the writer's colours and ended in the terminal's."""
        before = self._set.get(writer, "")
        if not before and text.isprintable():
            return text
        text = visible_line(text)
        after = before
        for code in _COLOURS.findall(text):
            # `\x1b[1;31m` has the fields 1 and 31; an empty field stands for 0, which sets everything back.
            fields = code[2:-1].split(";")
            if fields[-1] in ("", "0"):
                after = ""
            else:
                # 38;2;R;G;B may hold a 0 that resets nothing; one in front always does.
                keeps = fields[0] not in ("", "0") and len(after) < _LONGEST_COLOURS
                after = after + code if keeps else code
        self._set[writer] = after
        return before + text + (_RESET if after else "")


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, as Python keeps it in file names
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _escape_in_line(found: re.Match[str]) -> str:
    return "\t" if found[0] == "\t" else _escape(found)


def _colour_or_nothing(found: re.Match[str]) -> str:
    return found[0] if _COLOURS.fullmatch(found[0]) else ""
