"""Curves as tables, for the policies' tests."""

from __future__ import annotations

from paceline.runs import states
from paceline.sweeps.trial import Trial


def trials(*curves: tuple[float, ...], over: tuple[int, ...] = ()) -> list[Trial]:
    """A trial for each curve; those in `over` have ended."""
    return [
        Trial(
            number=number,
            run_id=f"s_{number}",
            status=states.COMPLETED if number in over else states.RUNNING,
            curve=tuple(curve),
        )
        for number, curve in enumerate(curves)
    ]
