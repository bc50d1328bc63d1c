"""The resolver's or installer's own reason for a failure, out of all that it printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

_LONGEST = 600
_ERROR = re.compile(r"(?:[A-Za-z_.]*(?:Error|Exception)\b|error:|fatal(?: error)?:)")
#: What pip calls the stages of a build, which say nothing of the reason.
_STAGES = ("error: metadata-generation-failed", "error: subprocess-exited-with-error", "error: failed-wheel-build")
_NOISE = re.compile(r"^(warning|hint|DEBUG|WARNING|\[notice\]|note|Using Python|Resolved |Prepared |   Building )")


def of_uv(lines: Sequence[str]) -> str:
    """Return what uv says of its first error, in a sentence or two; older and newer versions draw it in different ways."""
    for number, line in enumerate(lines):
        found = re.match(r"\s*(?:error:|×)\s*(.*)", line)
        if found is None:
            continue
        head, causes = found[1], [""]
        for each in lines[number + 1 :]:
            if re.match(r"\s*(hint|error):", each):
                break
            text = re.sub(r"^\s*(?:[│├╰─▶╭·]+\s*)+", "", each).strip()
            if cause := re.match(r"\s*(?:[Cc]aused by|cause):\s*(.*)|\s*[├╰]─+▶\s*(.*)", each):
                causes.append(cause[1] or cause[2] or "")
            elif text and not _NOISE.match(text):
                causes[-1] = f"{causes[-1]} {text}".strip()
        # Of a failed resolution the causes say it all.
        told = [part.rstrip(". ") for part in (head, *causes) if part]
        return _short(": ".join(told[1:] if len(told) > 1 and told[0].startswith("No solution found") else told))
    return _last(lines)


def of_pip(lines: Sequence[str]) -> str:
    """Pip's own ERROR lines, what contradicts what, and the last error that a build printed."""
    told: list[str] = []
    for number, line in enumerate(lines):
        # Which package it is about may stand in the indented lines below.
        below = [each.strip() for each in takewhile(lambda each: each.startswith("    "), lines[number + 1 :])]
        if line.startswith("The conflict is caused by:"):
            told.insert(0, "; ".join(below[:4]))
        elif line.strip().startswith("ERROR:"):
            told.append(" ".join((line.partition("ERROR:")[2].strip(), *below[:4])))
    inner = [text for line in lines if _ERROR.match(text := line.strip(" │|╰─>×")) and not text.startswith(_STAGES)]
    parts = [each.rstrip(".: ") for each in dict.fromkeys((*told[:3], *inner[-1:])) if each]
    return _short(". ".join(parts)) if parts else _last(lines)


def _last(lines: Sequence[str]) -> str:
    told = [line.strip() for line in lines if line.strip()]
    return _short(told[-1]) if told else "it printed nothing"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
