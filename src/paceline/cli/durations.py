"""Durations on the command line: `--max-duration 1h30m`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from paceline.system import units


def duration_option(*names: str, help: str, unit: str = "s", least: float = 0.0) -> Any:
    """A typer option that takes what `durations.seconds` takes, for `Annotated[float, ...]`: the verb gets seconds.

    help: says the default, where there is one. unit: of a number without a unit: w, d, h, m or s.
    least: the shortest duration that is allowed, in seconds.
    """
    return typer.Option(*names, metavar="DURATION", parser=_parser(unit, least), help=help, show_default=False)


def _parser(unit: str, least: float) -> Callable[[Any], float]:
    def parse(given: Any) -> float:
        # Defaults come through here as well as words.
        if isinstance(given, float):  # a default, which is in seconds
            return given
        try:
            found = units.seconds(given, unit=unit)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if found < least:
            raise typer.BadParameter(f"{given!r} is too short; it has to be {least:g} s or more.")
        return found

    return parse
