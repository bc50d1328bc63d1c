"""A sweep with all that its pictures have to cope with."""

from __future__ import annotations

import dataclasses
import math
import random

import paceline as pl
from paceline.runs import states
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial

HOSTILE = "</script><svg onload=alert(1)>$x^2$"

SPEC = SweepSpec(
    space=Space(
        {
            "--lr": pl.loguniform(1e-4, 1),
            HOSTILE.replace(" ", "_").replace("=", "_"): pl.choice(HOSTILE, [1, 2], None),
            "optimizer": pl.choice({"--momentum": pl.uniform(0, 0.9)}, {"beta": pl.uniform(0.9, 0.99)}),
            "layers": pl.randint(1, 5),
            "seed": 3,
        }
    ),
    metric=f"loss {HOSTILE}",
    goal="minimize",
)


def make_trials(count: int = 40) -> list[Trial]:
    """Completed, failed with and without a value, stopped and running trials; lr and momentum make the loss."""
    source = random.Random(0)
    trials = []
    for number in range(count):
        chosen = SPEC.space.draw(lambda dimension: dimension.expression.raw_at(source.random()))
        values = SPEC.space.values(chosen)
        loss = math.log10(values["--lr"]) ** 2 + 0.1 * values.get("--momentum", 0)
        status = {3: states.FAILED, 4: states.FAILED, 5: states.CANCELED, 6: states.RUNNING}.get(
            number, states.COMPLETED
        )
        curve = () if number == 3 else (math.nan,) if number == 7 else (loss + 1, loss)
        trials.append(
            Trial(number=number, run_id="", chosen=chosen, values=values, status=status, curve=curve),
        )
    return trials


#: The sweep `SPEC` with a second metric, which is minimized.
SPEC_OF_TWO = dataclasses.replace(SPEC, further=(("size", "minimize"),))


def make_trials_of_two(count: int = 40) -> list[Trial]:
    """The same, of which each but one has logged the second metric, too."""
    return [
        dataclasses.replace(trial, further=(() if trial.number == 9 else (float(trial.number * 7 % 10),),))
        for trial in make_trials(count)
    ]
