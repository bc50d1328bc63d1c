"""The colours of trials, the same in every picture."""

from __future__ import annotations

from paceline.runs import states

#: From the worst trial to the best; readable on white, and in order also for those who see no red or green.
_SHADES = ((0xC9, 0xD3, 0xDF), (0x7F, 0xBF, 0xC9), (0x2C, 0x7F, 0xB8), (0x1B, 0x2A, 0x7A))
FAILED = "#d62728"
BEST = "#1b2a7a"
GREY = "#8a8f98"


def shade(place: float | None) -> str:
    """The colour of a trial at this place from 0, the worst, to 1, the best; grey without a place."""
    if place is None:
        return GREY
    at = min(max(place, 0.0), 1.0) * (len(_SHADES) - 1)
    first = min(int(at), len(_SHADES) - 2)
    pairs = zip(_SHADES[first], _SHADES[first + 1], strict=True)
    return "#" + "".join(f"{round(low + (high - low) * (at - first)):02x}" for low, high in pairs)


def line_of(status: str, place: float | None) -> tuple[str, str]:
    """(colour, dashes) of a trial's line: dashes as SVG has them, empty for a whole line."""
    if status == states.FAILED:
        return FAILED, "3 3"
    return shade(place), "" if status == states.COMPLETED else "7 4"
