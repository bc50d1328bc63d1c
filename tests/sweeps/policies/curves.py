"""Curves as tables, for the policies' tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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


def paused(*curves: tuple[float, ...], **others: Mapping[str, Any]) -> list[Trial]:
    """A trial for each curve, paused. others: `t2={"status": "Running"}` is what trial 2 has instead."""
    found = [
        dataclasses.replace(trial, status=states.CANCELED, paused="for a while", chosen={"x": trial.number / 10})
        for trial in trials(*curves)
    ]
    for name, values in others.items():
        number = int(name[1:])
        found[number] = dataclasses.replace(found[number], **{"paused": None, **values})
    return found
